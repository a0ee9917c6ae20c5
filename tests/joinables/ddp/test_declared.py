"""Declared steps with DDP and ZeRO, where they go wrong; where they go right is in ``test_exact``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from join import Join, Joinable, JoinError, JoinHook
from tests.ending import Ending, assert_blamed
from tests.joinables.test_failures import group_works, unhooked
from tests.models import batch, build
from tests.pool import Pool


def outcome(rank: int, model: str, declared: list[int], made: list[int], fail: str) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build(model))
    optimizer: Any = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    text = "fine"
    try:
        with Join([ddp, optimizer], steps=declared[rank], divide_by_initial_world_size=False):
            for step in range(made[rank]):
                x, y = batch(rank, 0, step)
                optimizer.zero_grad()
                failing = rank == 1 and step == 1
                if failing and fail == "loading":
                    raise KeyError(fail)
                loss = ((ddp(x) - y) ** 2).mean()
                if failing and fail == "loss":
                    raise KeyError(fail)
                loss.backward()
                if failing and fail == "after backward":
                    raise KeyError(fail)
                optimizer.step()
    except (KeyError, JoinError) as error:
        text = f"{type(error).__name__}: {error}"
    unhooked(ddp, optimizer)
    ddp.eval()
    with torch.no_grad():
        ddp(batch(rank, 0, 0)[0]) if rank == 0 and model == "mlp" else None
    return text


@pytest.mark.parametrize(("model", "where"), [("mlp", "loading"), ("mlp", "loss"), ("norm", "after backward")])
def test_a_rank_that_raises(ending: Ending, model: str, where: str) -> None:
    assert_blamed(ending.run(outcome, model, [3, 2, 0], [3, 2, 0], where), 1, f"KeyError: '{where}'")


def weighted_outcome(rank: int, model: str, steps: list[int], weight: Any) -> str:
    """Rank 1 sets ``weight`` before its second step, or raises where that is ``None``."""
    trained: Any
    if model == "sharded":
        trained = fully_shard(build("mlp"), mesh=init_device_mesh("cpu", (3,)))
    else:
        trained = DistributedDataParallel(build(model))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    text = "fine"
    join = Join([trained, optimizer], steps=steps[rank])
    join.weight = 2
    try:
        with join:
            for step in range(steps[rank]):
                x, y = batch(rank, 0, step)
                trained.zero_grad()
                if rank == 1 and step == 1:
                    if weight is None:
                        raise KeyError(step)
                    join.weight = weight
                ((trained(x) - y) ** 2).mean().backward()
                optimizer.step()
    except (KeyError, ValueError, JoinError) as error:
        text = f"{type(error).__name__}: {error}"
    return text


@pytest.mark.parametrize(
    ("model", "steps", "weight"), [("mlp", [2, 3, 0], None), ("norm", [2, 4, 0], -1), ("sharded", [3, 3, 3], -1)]
)
def test_a_rank_that_raises_with_weights(ending: Ending, model: str, steps: list[int], weight: Any) -> None:
    """Also where no other rank has as many steps, and so nothing to weigh."""
    told = "KeyError: 1" if weight is None else "ValueError: weight=-1 must be"
    assert_blamed(ending.run(weighted_outcome, model, steps, weight), 1, told)


class Fails(Joinable):
    """A joinable with one all-reduce, whose hook raises behind it."""

    join_device = torch.device("cpu")  # pyright: ignore[reportAssignmentType]
    join_process_group = None  # pyright: ignore[reportAssignmentType]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        join_self = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                join_self.reduce()
                raise KeyError("hook")

        return Hook()

    def reduce(self) -> None:
        dist.all_reduce(torch.ones(1))

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.reduce()


def hook_fails(rank: int) -> str:
    joinable, text = Fails(), "fine"
    try:
        with Join([joinable], steps=[1, 4, 3][rank]):
            for _ in range([1, 4, 3][rank]):
                joinable()
    except (KeyError, JoinError) as error:
        text = f"{type(error).__name__}: {error}"
    return text


def test_a_hook_that_raises(ending: Ending) -> None:
    assert_blamed(ending.run(hook_fails), 0, "KeyError: 'hook'")


def test_weights_of_0_on_all_ranks(pool: Pool) -> None:
    """All ranks run that backward, so all know."""
    for text in pool.run(weighted_outcome, "mlp", [1, 3, 0], 0, ranks=3):
        assert text.startswith("ValueError: join.weight is 0 on all ranks at once, so their gradients have no mean; ")


@pytest.mark.parametrize(("model", "made"), [("mlp", [3, 1, 0]), ("norm", [3, 3, 0]), ("mlp", [3, 2, 1])])
def test_wrong_declarations(ending: Ending, model: str, made: list[int]) -> None:
    declared = [3, 2, 0]
    rank = next(rank for rank in range(3) if made[rank] != declared[rank])
    how = f"made {made[rank]}" if made[rank] < declared[rank] else f"began step {declared[rank] + 1}"
    texts = ending.run(outcome, model, declared, made, "")
    assert_blamed(texts, rank, f"ProtocolError: rank {rank} declared steps={declared[rank]} and {how}")


def keeps_result(rank: int, forgetful: list[int]) -> str:
    """Declared and made: 0, 2 and 4 steps; ranks ``forgetful`` do not zero their gradients before the second."""
    ddp = DistributedDataParallel(build("mlp"))
    told = ""
    try:
        with Join([ddp], steps=2 * rank):
            for step in range(2 * rank):
                if step != 1 or rank not in forgetful:
                    ddp.zero_grad()
                ddp(batch(rank, 0, step)[0]).sum().backward()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return told


@pytest.mark.parametrize("forgetful", [[1, 2], [2]])
def test_gradients_that_hold_the_last_result(ending: Ending, forgetful: list[int]) -> None:
    for rank, told in enumerate(ending.run(keeps_result, forgetful)):
        if rank in forgetful:
            assert told.startswith("ValueError: steps= needs zero_grad()")
        else:
            assert told.startswith(f"PeerError: rank {forgetful[0]} failed: ValueError: steps= needs zero_grad()")


def refused(rank: int) -> None:
    ddp, other = DistributedDataParallel(build("mlp")), DistributedDataParallel(build("mlp"))
    x = batch(rank, 0, 0)[0]
    with pytest.raises(ValueError, match="cannot tell in which order"):
        Join([ddp, other], steps=1).__enter__()
    with pytest.raises(JoinError, match="join = Join"), Join([ddp], steps=1) as join:
        join.weight = 3
    ddp.zero_grad()
    join = Join([ddp], steps=1)
    join.weight = 3
    with pytest.raises(JoinError, match="in all of the block or in none of it"), join:
        join.weight = None
    with (
        pytest.raises(ValueError, match=r"gradients still hold the last result; call zero_grad\(\)"),
        Join([ddp], steps=3),
    ):
        for _ in range(3):
            ddp(x).sum().backward()
    norm = DistributedDataParallel(build("norm"))
    with pytest.raises(JoinError, match="needs a forward of its own"), Join([norm], steps=2):
        loss = norm(x).sum()
        loss.backward(retain_graph=True)
        norm.zero_grad()
        loss.backward()
    group_works()


def test_what_steps_cannot_do(pool: Pool) -> None:
    pool.run(refused, ranks=2)
