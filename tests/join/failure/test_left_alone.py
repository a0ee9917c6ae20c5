"""A rank leaves a loop alone, or something out of it: it is told, and all others learn of it, whatever they are in."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from join.collectives import collective_of
from join.collectives._torch_private import timeout_of
from tests.ending import Ending
from tests.harness import Pool, all_or_each, in_test_all
from tests.join.counter import group_works
from tests.shorter import using
from tests.training import MLP, TARGETS, Norm, batch, build, mesh_of

RANKS = 3


class Body(ABC):
    """The body of a loop, which can be left wherever it yields."""

    listed: list[Any]
    weighs = False
    scale: Callable[[torch.Tensor], torch.Tensor]
    window = 1

    @abstractmethod
    def places(self, x: torch.Tensor, y: torch.Tensor, step: int) -> Iterator[None]: ...


class TwoModules(Body):
    """One of them runs backward two or three times a step, on its own and through the other one."""

    def __init__(self) -> None:
        self.net, self.head = DistributedDataParallel(Norm()), DistributedDataParallel(nn.Linear(TARGETS, 1))
        self.optimizers = [torch.optim.Adam(module.parameters()) for module in (self.net, self.head)]
        self.listed = [self.net, self.head, *self.optimizers]

    def places(self, x: torch.Tensor, y: torch.Tensor, step: int) -> Iterator[None]:
        yield
        self.scale(self.head(self.net(x).detach()).sum()).backward()
        yield
        if step % 2 == 0:
            self.scale(self.head(y).sum()).backward()
        self.optimizers[1].step()
        yield
        scores = self.head(self.net(x))
        yield
        self.scale(scores.sum()).backward()
        self.optimizers[0].step()


class Sharded(Body):
    """FSDP2, clipped by the norm of all shards."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard

        net, mesh = MLP(), mesh_of()
        fully_shard(net[0], mesh=mesh)
        fully_shard(net[2], mesh=mesh)
        self.model: Any = fully_shard(net, mesh=mesh)
        self.optimizer = torch.optim.Adam(net.parameters())
        self.listed = [self.model, self.optimizer]

    def places(self, x: torch.Tensor, y: torch.Tensor, step: int) -> Iterator[None]:
        yield
        synchronises = (step + 1) % self.window == 0
        self.model.set_requires_gradient_sync(synchronises)
        output = self.model(x)
        yield
        self.scale((output - y).square().sum()).backward()
        yield
        if synchronises:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            yield
            self.optimizer.step()
            self.optimizer.zero_grad()


class Accumulating(Sharded):
    window = 3


class WithZero(Body):
    """All steps run the same bursts."""

    def __init__(self) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.net = DistributedDataParallel(MLP())
        self.optimizer = ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.Adam)
        self.listed = [self.net, self.optimizer]

    def places(self, x: torch.Tensor, y: torch.Tensor, step: int) -> Iterator[None]:
        self.optimizer.zero_grad()
        self.scale((self.net(x) - y).square().sum()).backward()
        self.optimizer.step()
        yield


class Weighed(TwoModules):
    weighs = True


def running(rank: int, kind: type[Body], steps: range, place: int, lookahead: int, how: dict[str, Any]) -> str:
    """Rank 1 raises at a place of the first of some steps, or, without a place, leaves all of these out."""
    torch.manual_seed(0)
    body = kind()
    try:
        with Join(body.listed, divide_by_initial_world_size=False, **how) as block:
            batches = [batch(rank, 0, number) for number in range((4, 6, 0)[rank])]
            weigh: Any = (lambda data: len(data[0])) if body.weighs else None
            loop = block.iterate(batches, lookahead=lookahead, weigh=weigh, window=body.window)
            body.scale = block.scale
            for at, (x, y) in enumerate(loop):
                if rank == 1 and at in steps and place < 0:
                    continue
                for where, _ in enumerate(body.places(x, y, at)):
                    if (rank, at, where) == (1, steps[0], place):
                        raise ValueError("enough")
    except (ValueError, JoinError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


LEFT_OUT = [
    (TwoModules, range(6), 1, {}, False),
    (TwoModules, range(5, 6), 1, {}, True),
    (WithZero, range(1, 2), 1, {}, True),  # and goes on
    (Sharded, range(3, 4), 2, {}, False),
    (Accumulating, range(2, 3), 1, {"timeout": 20.0}, False),
    (TwoModules, range(4, 6), 3, {}, False),
    (TwoModules, range(2, 3), 1, {"timeout": 20.0}, False),
    (Sharded, range(4, 6), 1, {"timeout": 20.0}, True),
]


@pytest.mark.parametrize(("kind", "steps", "lookahead", "how", "over_group"), all_or_each(LEFT_OUT))
def test_a_rank_that_leaves_out_a_step(
    ending: Ending, kind: type[Body], steps: range, lookahead: int, how: dict[str, Any], over_group: bool
) -> None:
    """The others wait for it inside of it, and it for them behind."""
    zero, one, two = ending.run(running, kind, steps, -1, lookahead, how, over_group=over_group)
    assert re.match(
        r"ProtocolError: Rank 1 skipped .* in step \d of join.iterate, or in an earlier step, but rank ", one
    )
    for text in (zero, two):
        assert text.startswith(f"PeerError: rank 1 failed: {one}")


RAISES = [
    (TwoModules, 0, 3, 3, {}, False),
    (TwoModules, 4, 1, 1, {}, True),  # rank 0 has dummies by then
    (Sharded, 0, 1, 1, {}, False),
    (Sharded, 4, 3, 1, {}, True),
    (Accumulating, 2, 2, 3, {}, False),
    (Weighed, 4, 2, 1, {}, False),  # the only rank that still weighs anything
]


@pytest.mark.parametrize(("kind", "step", "place", "lookahead", "how", "over_group"), all_or_each(RAISES))
def test_the_others_are_told_whatever_the_body_does(
    ending: Ending, kind: type[Body], step: int, place: int, lookahead: int, how: dict[str, Any], over_group: bool
) -> None:
    steps = range(step, step + 1)
    zero, one, two = ending.run(running, kind, steps, place, lookahead, how, over_group=over_group)
    assert one == "ValueError: enough"
    for text in (zero, two):
        assert text.startswith("PeerError: rank 1 failed: ValueError: enough. The process group cannot be used")


def slow(rank: int, kind: str) -> str:
    """Rank 2 comes late to step 2, where others wait for it."""
    ddp = DistributedDataParallel(MLP(), find_unused_parameters=True)
    other = DistributedDataParallel(nn.Linear(2, 2))

    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(4):
            time.sleep(1.0 * ((rank, step) == (2, 2)))
            yield batch(rank, 0, step)

    try:
        with Join([ddp]) as block:
            for x, y in block.iterate(loader()):
                if rank == 0 and kind == "asks":
                    _ = block.is_last_step
                (ddp(x) - y).square().sum().backward()
                if kind == "nested":
                    with Join([other]):
                        other(torch.ones(1, 2)).sum().backward()
    except (ValueError, JoinError) as error:
        return f"{type(error).__name__}: {error}"
    group_works(collective_of(None))
    return "fine"


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("kind", ["asks", "nested"])
def test_nobody_who_waits_for_a_slow_rank_has_left_something_out(pool: Pool, kind: str, over_group: bool) -> None:
    assert pool.run(slow, kind, ranks=RANKS, over_group=over_group) == ["fine"] * RANKS


# -- collectives that no joinable stands for ---------------------------------------------------------------------------


def with_own_collectives(rank: int, how: str) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(ddp.parameters())
    try:
        with using(still=1.0), Join([ddp, optimizer]) as block:
            for step, (x, y) in enumerate(block.iterate([batch(rank, 0, step) for step in range(3 + rank)])):
                optimizer.zero_grad()
                ((ddp(x) - y) ** 2).mean().backward()
                if rank == 1 and step == 2 and how == "break":
                    break
                if rank == 1 and step == 3:  # where rank 0 has a dummy
                    raise ValueError("mine")
                dist.all_reduce(torch.ones(3))  # the body's own
                optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize(
    ("how", "ranks", "over_group"),
    all_or_each([("raise", 3, False), ("raise", 3, True), ("break", 3, False), ("break", 3, True), ("raise", 5, True)]),
)
def test_all_ranks_end_and_say_why(ending: Ending, how: str, ranks: int, over_group: bool) -> None:
    """Those, too, that are no neighbours of rank 1 in a ring, and only see others end."""
    texts = ending.run(with_own_collectives, how, ranks=ranks, over_group=over_group)
    mine = "ValueError: mine" if how == "raise" else "ProtocolError: Rank 1 "
    assert texts[1].startswith(mine)
    for rank, text in enumerate(texts):
        assert rank == 1 or text.startswith(f"PeerError: rank 1 failed: {texts[1]}")


def in_a_plain_block(rank: int) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp], timeout=3):
            for step in range((2, 0, 2)[rank]):
                ddp(batch(rank, 0, step)[0]).sum().backward()
                dist.all_reduce(torch.ones(3))  # to which rank 1 does not come
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@in_test_all
def test_a_collective_of_ones_own_in_a_plain_block(ending: Ending) -> None:
    told = "JoinTimeoutError: Ranks [0, 2] announced no collective within timeout=3 s"
    for started in [ending.start(in_a_plain_block, over_group=over_group) for over_group in (False, True)]:
        zero, one, two = [str(end.result) for end in started.ends()]
        assert one.startswith(told)
        for text in (zero, two):
            assert text.startswith(f"JoinTimeoutError: rank 1 failed: {told}")


def limits(rank: int) -> None:
    before = timeout_of(dist.distributed_c10d._get_default_group())
    ddp = DistributedDataParallel(build("mlp"))
    for _ in range(2):
        with Join([ddp], timeout=30):
            assert timeout_of(ddp.process_group).total_seconds() == 60  # pyright: ignore[reportArgumentType]
            with Join([], process_group=None, timeout=3) as inner:
                list(inner.iterate([]))
                assert timeout_of(ddp.process_group).total_seconds() == 6  # pyright: ignore[reportArgumentType]
            assert timeout_of(ddp.process_group).total_seconds() == 60  # pyright: ignore[reportArgumentType]
        assert timeout_of(ddp.process_group) == before  # pyright: ignore[reportArgumentType]


def test_the_time_limit_of_the_group(pool: Pool) -> None:
    pool.run(limits, ranks=2)
