"""What a block leaves behind: nothing."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import warnings
import weakref
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError, PeerError
from joinables import ZeroStep
from tests.ending import Ending, assert_blamed
from tests.harness import Pool, all_or_each
from tests.training import assert_same, batch, build, flat_state
from tests.versions import OWN_BUFFERS

RANKS = 3


def snapshot(ddp: Any, optimizer: Any, zero: Any) -> dict[str, Any]:
    return {
        "forward hooks": list(ddp._forward_hooks.items()),
        "forward pre-hooks": list(ddp._forward_pre_hooks.items()),
        "backward hooks": [list((p._backward_hooks or {}).items()) for p in ddp.parameters()],
        "step hooks": [list(o._optimizer_step_pre_hooks.items()) for o in (optimizer, zero, zero.optim)],
        "step post-hooks": [list(o._optimizer_step_post_hooks.items()) for o in (optimizer, zero, zero.optim)],
        "configs": (ddp._join_config, zero._join_config),
        "param sync": ddp.require_forward_param_sync,
        "filters": list(warnings.filters),
        "notify": TorchJoin.notify_join_context,
        "attributes": sorted(vars(ddp)),
    }


def leave_behind(rank: int, how: str, hooked: bool) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build("mlp"))
    if hooked:
        ddp.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    before = snapshot(ddp, optimizer, zero)
    join = Join([ddp, optimizer, zero], enable=how != "disabled")
    assert snapshot(ddp, optimizer, zero) == before  # built, never entered
    if how == "never entered":
        return
    steps = 2 if how == "disabled" else [0, 2, 1][rank]
    try:
        with join:
            for step in range(steps):
                ddp(batch(rank, 0, step)[0]).sum().backward()
                zero.step()
            if how == "exception":
                raise KeyError
    except (KeyError, PeerError):
        pass
    assert snapshot(ddp, optimizer, zero) == before
    if how != "exception":  # after which the group is lost
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == RANKS
    if rank == 0:  # nobody else takes part
        with torch.no_grad():
            ddp(batch(0, 0, 0)[0])


@pytest.mark.parametrize(
    ("how", "hooked"), all_or_each(product(["normal", "exception", "disabled", "never entered"], [False, True]))
)
def test_nothing_is_left(ending: Ending, how: str, hooked: bool) -> None:
    ending.run(leave_behind, how, hooked, ranks=RANKS)


def copy_inside(rank: int) -> None:
    ddp = DistributedDataParallel(build("norm"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x, _ = batch(rank, 0, 0)

    def check(copied: Any) -> None:
        assert_same(flat_state(copied.state_dict()), flat_state(ddp.state_dict()))
        ddp.eval()
        copied.eval()
        with torch.no_grad():
            assert torch.equal(copied.module(x), ddp.module(x))
        ddp.train()

    with Join([ddp, optimizer]):
        for step in range(2):
            for duplicate in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
                copied = duplicate(ddp)
                check(copied)
            ddp(batch(rank, 0, step)[0]).sum().backward()
            optimizer.step()
        # A copy is in no block: it trains on its own, like any DDP module.
        copied(x).sum().backward()
        buffer = io.BytesIO()
        torch.save(ddp, buffer)
        buffer.seek(0)
        check(torch.load(buffer, weights_only=False))
    check(copy.deepcopy(ddp))


def test_copies_inside_and_after(pool: Pool) -> None:
    pool.run(copy_inside, ranks=2)


class Forward:
    """A forward of the user's, with attributes of any name."""

    def __init__(self, forward: Any) -> None:
        self._forward, self._module, self.calls = forward, "the user's", 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._forward(*args, **kwargs)


def own_forwards(rank: int) -> None:
    """What the user puts in the place of ``forward`` is called, before the block, in it and after it."""
    ddp = DistributedDataParallel(build("mlp"))
    x, _ = batch(rank, 0, 0)
    calls: list[str] = []

    def steps() -> None:
        for _ in range(rank):
            ddp(x).sum().backward()

    first = ddp.forward = Forward(ddp.forward)
    with Join([ddp]):
        assert isinstance(copy.deepcopy(ddp).forward, Forward)
        steps()
    assert ddp.forward is first
    assert first.calls == rank

    with Join([ddp]):
        inside = ddp.forward

        @functools.wraps(inside)
        def second(*args: Any, **kwargs: Any) -> Any:
            calls.append("second")
            return inside(*args, **kwargs)

        ddp.forward = second
        steps()
    assert ddp.forward is second
    with Join([ddp]):
        steps()
    assert ddp.forward is second
    assert calls == ["second"] * (2 * rank)
    ddp.forward = inside  # kept from a block that is over
    with Join([ddp]):
        steps()
    ddp(x).sum().backward()  # an ordinary DDP module's, on all ranks
    assert first.calls == 4 * rank + 1


def test_a_forward_of_the_users(pool: Pool) -> None:
    pool.run(own_forwards, ranks=2)


class Recursive(DistributedDataParallel):
    """Its forward calls itself."""

    def forward(self, x: torch.Tensor, *, again: bool = True) -> Any:
        return self.forward(x, again=False) if again else super().forward(x)


def calls_itself(rank: int) -> dict[str, torch.Tensor]:
    ddp = Recursive(build("norm"))
    with Join([ddp]) as join:
        for step in join.iterate(range([0, 3, 1][rank]), dummy=lambda step: step):
            ddp.zero_grad()
            ddp(batch(rank, 0, step)[0]).sum().backward()
    assert "forward" not in vars(ddp)
    return flat_state([parameter.grad for parameter in ddp.parameters()]) | flat_state(list(ddp.buffers()))


def test_a_forward_that_calls_itself(pool: Pool) -> None:
    first, *others = pool.run(calls_itself, ranks=RANKS)
    for other in others:
        assert_same(first, other)


def hooked(rank: int) -> float:
    """A hook of the user's changes a buffer, also on dummies, which leave no trace."""
    ddp = DistributedDataParallel(build("norm"), **OWN_BUFFERS)
    ddp.module.register_buffer("calls", torch.zeros(()))
    ddp.register_forward_hook(lambda ddp, *_: ddp.module.calls.add_(1) and None)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    with Join([ddp]) as join:
        for step in join.iterate(range([2, 4][rank]), dummy="last"):
            ddp(batch(rank, 0, step)[0]).sum().backward()
        calls = float(ddp.module.calls)
    return calls


def test_what_hooks_of_the_users_do_to_buffers(pool: Pool) -> None:
    assert pool.run(hooked, ranks=2) == [2, 4]


def called_directly(rank: int, kind: str) -> str:
    ddp = DistributedDataParallel(build(kind))
    try:
        with Join([ddp]):
            ddp.module(batch(rank, 0, 0)[0])
            for step in range(2 * rank):
                ddp.forward(batch(rank, 0, step)[0]).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("kind", ["mlp", "norm"])
def test_a_forward_that_is_called_directly(ending: Ending, kind: str) -> None:
    told = "JoinError: DistributedDataParallel.forward was called directly"
    assert_blamed(ending.run(called_directly, kind, ranks=2), 1, told)


def leaf_output(rank: int) -> None:
    class Identity(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> Any:
            return self.weight, x * self.weight

    ddp = DistributedDataParallel(Identity())
    with Join([ddp]):
        for _ in range(rank + 1):
            weight, y = ddp(torch.ones(2))
            (weight + y).sum().backward()
    assert not (ddp.module.weight._backward_hooks or {})


def test_hooks_on_leaf_outputs_are_removed(pool: Pool) -> None:
    pool.run(leaf_output, ranks=2)


def backward_too_late(rank: int, initial: bool) -> dict[str, torch.Tensor]:
    """A backward after the block is an ordinary DDP backward: reduced if the forward was the module's last."""
    ddp = DistributedDataParallel(build("mlp"))
    with Join([ddp], divide_by_initial_world_size=initial):
        for step in range(2):
            output = ddp(batch(rank, 0, step)[0])
            if step == 0:
                output.sum().backward()
    ddp.zero_grad()
    output.sum().backward()
    ddp.zero_grad()
    ddp(batch(rank, 0, 2)[0]).sum().backward()
    return flat_state([parameter.grad for parameter in ddp.parameters()])


@pytest.mark.parametrize("initial", [True, False])
def test_backward_after_the_block(pool: Pool, initial: bool) -> None:
    first, second = pool.run(backward_too_late, initial, ranks=2)
    assert_same(first, second)


def unused_stays_untouched(rank: int, views: bool) -> None:
    ddp = DistributedDataParallel(build("branches"), find_unused_parameters=True, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, weight_decay=0.5)
    unused = ddp.module.unused
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for step in range([0, 3, 1][rank]):
            optimizer.zero_grad()
            ddp(batch(rank, 0, step)[0], rank % 3).sum().backward()
            optimizer.step()
    assert unused.grad is None
    assert unused not in optimizer.state
    assert torch.equal(unused, torch.ones(3))


@pytest.mark.parametrize("views", [False, True])
def test_a_parameter_nobody_uses(pool: Pool, views: bool) -> None:
    pool.run(unused_stays_untouched, views, ranks=RANKS)


def refused(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build("mlp"))
    with pytest.raises(TypeError, match=r"divide_by_initial_world_sze=False.*divide_by_initial_world_size"):
        Join([ddp], divide_by_initial_world_sze=False)
    with pytest.raises(ValueError, match=r"joinables\[0\] and joinables\[1\] are the same"):
        Join([ddp, torch.compile(ddp, backend="eager")])
    with pytest.raises(ValueError, match="multiple process groups"):
        Join([ddp, DistributedDataParallel(build("mlp"), process_group=dist.new_group([0, 1]))])
    norm = DistributedDataParallel(build("norm"))
    norm.module[1] = torch.nn.SyncBatchNorm(8)  # afterwards: DDP takes it on GPUs only
    norm.module.forward_is_over = True  # as the trainer's wrapper says of itself
    with pytest.raises(ValueError, match=r"SyncBatchNorm \('1'\)"):
        Join([norm])
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    sharded._overlap_with_ddp = True
    with pytest.raises(ValueError, match="overlap_with_ddp=False"):
        ZeroStep(sharded)
    with pytest.raises(TypeError, match="The class SGD cannot join"):
        Join([ddp, torch.optim.SGD])
    with Join([ddp]), pytest.raises(TypeError, match="of type DistributedDataParallel, which announces its bursts"):
        Join.notify_join_context(ddp)


def test_what_cannot_join_is_refused(pool: Pool) -> None:
    pool.run(refused, ranks=2)


def told(rank: int) -> list[str]:
    ddp, other = (DistributedDataParallel(build("mlp")) for _ in range(2))
    embedding = DistributedDataParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    texts: list[str] = []

    def around() -> None:
        with TorchJoin([ddp]), Join([ddp]):
            pass

    def inside() -> None:
        with Join([other]), other.join():
            other(batch(rank, 0, 0)[0])

    for case in (around, inside, Join([embedding]).__enter__):
        try:
            case()
        except (ValueError, JoinError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_modules_that_cannot_be_in_a_block(pool: Pool) -> None:
    theirs = (
        "The module is or was in torch's own Join or model.join(). Remove torch's Join, which this one replaces, and"
        " wrap the plain module in a new DistributedDataParallel. [J107]"
    )
    sparse = "ValueError: The layer 'module.0' has sparse gradients, which a rank without data cannot receive"
    for first, second, third in pool.run(told, ranks=2):
        assert (first, second) == (f"ValueError: {theirs}", f"JoinError: {theirs}")
        assert third.startswith(sparse)


def freed_after_a_block(rank: int, how: str) -> None:
    module = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gone = weakref.ref(module)
    steps = rank + 1
    gc.collect()
    gc.disable()
    try:
        with Join([module, optimizer]) as join:
            batches = [batch(rank, 0, step)[0] for step in range(steps)]
            for x in join.iterate(batches) if how == "iterate" else batches:
                optimizer.zero_grad()
                module(x).sum().backward()
                optimizer.step()
        del join, module, optimizer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["plain", "iterate"])
def test_a_module_is_freed_with_its_last_reference(pool: Pool, how: str) -> None:
    pool.run(freed_after_a_block, how, ranks=2)
