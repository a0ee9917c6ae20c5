"""Hooks on parameters: the user's own in a block, and the block's own after it; with a compiled module, too."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from join.collectives._torch_private import accumulators
from tests.harness import Pool
from tests.training import TOLERANCE, batch, build

COUNTS = (4, 2, 0), (1, 3, 2)


def twice(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


def step_after_the_block(module: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step of the module alone, on the same batch on all ranks."""
    x, y = batch(0, 9, 9)
    optimizer.zero_grad()
    (module(x) - y).square().mean().backward()
    optimizer.step()


def alone() -> list[torch.Tensor]:
    module = build("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for epoch, counts in enumerate(COUNTS):
        for step in range(max(counts)):
            optimizer.zero_grad()
            for x, y in (batch(rank, epoch, step) for rank in range(3) if counts[rank] > step):
                (2 * (module(x) - y).square().mean() / sum(count > step for count in counts)).backward()
            optimizer.step()
        step_after_the_block(module, optimizer)
    return [parameter.detach() for parameter in module.parameters()]


def train(rank: int, iterates: bool, compiled: bool) -> list[torch.Tensor]:
    ddp = DistributedDataParallel(build("mlp"))
    module: Any = torch.compile(ddp, backend="eager") if compiled else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    parameters: list[nn.Parameter] = list(ddp.parameters())
    for epoch, counts in enumerate(COUNTS):
        rows = [batch(rank, epoch, step) for step in range(counts[rank])]
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in join.iterate(rows) if iterates else rows:
                optimizer.zero_grad()
                handles = [parameter.register_hook(twice) for parameter in parameters]
                (module(x) - y).square().mean().backward()
                for handle in handles:
                    handle.remove()
                optimizer.step()
        step_after_the_block(module, optimizer)
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.in_test_all)])
@pytest.mark.parametrize("iterates", [False, True])
def test_as_one_process(pool: Pool, iterates: bool, compiled: bool) -> None:
    for found in pool.run(train, iterates, compiled, ranks=3):
        torch.testing.assert_close(found, alone(), atol=10 * TOLERANCE, rtol=1e-4)


def reads_gradients(rank: int, window: int) -> tuple[int, list[float], list[torch.Tensor]]:
    """A step of some micro-batches, in which a hook sums the norms of gradients over ranks as they are accumulated."""
    group = cast("dist.ProcessGroup", dist.new_group())
    ddp = DistributedDataParallel(build("mlp"))
    calls, norms = list[int](), list[float]()

    def monitor(parameter: torch.Tensor) -> None:
        dist.all_reduce(cast("torch.Tensor", parameter.grad).norm(), group=group)
        calls.append(1)

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(monitor)
    with Join([ddp]) as join:
        for x, _ in join.iterate([batch(0, 0, step) for step in range(0 if rank else window)], window=window):
            with nullcontext() if join.ends_window else ddp.no_sync():
                join.scale(ddp(x).sum()).backward()
            norms.append(sum(cast("torch.Tensor", each.grad).norm().item() for each in ddp.parameters()))
    return len(calls), norms, [cast("torch.Tensor", parameter.grad) for parameter in ddp.parameters()]


@pytest.mark.parametrize("window", [1, 2])
def test_a_dummy_has_gradients_to_read(pool: Pool, window: int) -> None:
    (calls, norms, first), (others, dummies, second) = pool.run(reads_gradients, window, ranks=2)
    assert calls == others == window * len(first)
    assert all(norm > 0 == dummy for norm, dummy in zip(norms[:-1], dummies[:-1], strict=True))
    assert norms[-1] == dummies[-1] > 0
    torch.testing.assert_close(first, second)


def hooks_after_wrapping(rank: int) -> list[int]:
    """Wrap a module several times, each time before the wrapper of before is gone, and count a parameter's hooks."""
    module, counts = build("mlp"), list[int]()
    for _ in range(3):
        ddp = DistributedDataParallel(module)
        with Join([ddp]):
            ddp(batch(rank, 0, 0)[0]).sum().backward()
        handle = accumulators(list(module.parameters()))[0].register_prehook(id)
        counts.append(len(handle.hooks_dict_ref()))
        handle.remove()
    return counts


def test_hooks_end_with_the_module_that_wraps(pool: Pool) -> None:
    for counts in pool.run(hooks_after_wrapping, ranks=2):
        assert counts == [2, 2, 2]


def hooks_called_after_the_block(rank: int) -> int:
    ddp, called = DistributedDataParallel(build("mlp")), list[str]()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp]):
        ddp(batch(rank, 0, 0)[0]).sum().backward()
        ddp(batch(rank, 0, 1)[0])  # the hooks wait for its backward
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code.co_name))
    step_after_the_block(ddp, optimizer)
    sys.setprofile(None)
    return called.count("_arrive")


def test_hooks_rest_outside_of_blocks(pool: Pool) -> None:
    assert pool.run(hooks_called_after_the_block, ranks=2) == [0, 0]


def refuse(gradient: torch.Tensor) -> None:
    raise OverflowError


def after_one_that_raised(rank: int, hidden: bool, raises: bool) -> list[torch.Tensor]:
    shown, module = list[torch.Tensor](), build("mlp")

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        shown.append(output)
        return output.detach() if hidden else output

    def of(x: torch.Tensor) -> torch.Tensor:
        ddp(x)
        return shown[-1]

    module.register_forward_hook(keep)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for step in range(3 - 2 * rank):
            x, y = batch(rank, 0, step)
            if raises:
                handle = next(ddp.parameters()).register_hook(refuse)
                with ddp.no_sync(), pytest.raises(OverflowError):
                    (of(x) - y).sum().backward()
                handle.remove()
            optimizer.zero_grad()
            (of(x) - y).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.parametrize("hidden", [False, True])
def test_a_backward_after_one_that_raised_is_found(pool: Pool, hidden: bool) -> None:
    expected = pool.run(after_one_that_raised, hidden, False, ranks=2)
    torch.testing.assert_close(pool.run(after_one_that_raised, hidden, True, ranks=2), expected)
