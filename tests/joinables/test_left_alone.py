"""A rank leaves a loop alone: the others are told, whatever they are in; or all processes end."""

from __future__ import annotations

import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import join.early_exit
from join import Join, JoinError
from join.collectives.segment import SWITCH
from joinables import SharedCall
from tests.joinables.test_failures import group_works
from tests.models import MLP, TARGETS, Norm, batch, build
from tests.pool import Pool
from tests.training import mesh_of

RANKS = 3


class Body(ABC):
    """The body of a loop, which can be left wherever it yields."""

    listed: list[Any]
    weighs = False

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
        self.head(self.net(x).detach()).sum().backward()
        yield
        if step % 2 == 0:
            self.head(y).sum().backward()
        self.optimizers[1].step()
        yield
        scores = self.head(self.net(x))
        yield
        scores.sum().backward()
        self.optimizers[0].step()


class Sharded(Body):
    """FSDP2, clipped by the norm of all shards."""

    window = 1

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard

        net, mesh = MLP(), mesh_of()
        fully_shard(net[0], mesh=mesh)
        fully_shard(net[2], mesh=mesh)
        self.model: Any = fully_shard(net, mesh=mesh)
        self.optimizer = torch.optim.Adam(net.parameters())
        self.clip = SharedCall(lambda: nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.listed = [self.model, self.clip, self.optimizer]

    def places(self, x: torch.Tensor, y: torch.Tensor, step: int) -> Iterator[None]:
        yield
        synchronises = (step + 1) % self.window == 0
        self.model.set_requires_gradient_sync(synchronises)
        output = self.model(x)
        yield
        (output - y).square().sum().backward()
        yield
        if synchronises:
            self.clip()
            yield
            self.optimizer.step()
            self.optimizer.zero_grad()


class Accumulating(Sharded):
    window = 3


class Slow(Sharded):
    """One step of one rank takes longer than a rank that leaves has seen any to take."""

    def places(self, x: torch.Tensor, y: torch.Tensor, step: int) -> Iterator[None]:
        time.sleep(3.0 * ((dist.get_rank(), step) == (0, 2)))
        yield from super().places(x, y, step)


class WithZero(Body):
    """All steps run the same bursts."""

    def __init__(self) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.net = DistributedDataParallel(MLP())
        self.optimizer = ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.Adam)
        self.listed = [self.net, self.optimizer]

    def places(self, x: torch.Tensor, y: torch.Tensor, step: int) -> Iterator[None]:
        self.optimizer.zero_grad()
        (self.net(x) - y).square().sum().backward()
        self.optimizer.step()
        yield


class WithBuffers(Body):
    def __init__(self) -> None:
        self.net = DistributedDataParallel(Norm())
        self.listed = [self.net]

    def places(self, x: torch.Tensor, y: torch.Tensor, step: int) -> Iterator[None]:
        self.net(x).sum().backward()
        yield


class Weighed(TwoModules):
    weighs = True


class WeighedSharded(Sharded):
    weighs = True


def leaving(rank: int, kind: type[Body], step: int, place: int, lookahead: int) -> str:
    torch.manual_seed(0)
    body = kind()
    try:
        with Join(body.listed, divide_by_initial_world_size=False) as block:
            batches = [batch(rank, 0, number) for number in range((4, 6, 0)[rank])]
            for at, (x, y) in enumerate(block.iterate(batches, lookahead=lookahead)):
                if body.weighs:
                    block.weight = len(x)
                for where, _ in enumerate(body.places(x, y, at)):
                    if (rank, at, where) == (1, step, place):
                        raise ValueError("enough")
    except (ValueError, JoinError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group_works()
    return "fine"


def skipping(rank: int, kind: type[Body], who: int, steps: range, lookahead: int, how: dict[str, Any]) -> str:
    torch.manual_seed(0)
    body = kind()
    try:
        with Join(body.listed, divide_by_initial_world_size=False, **how) as block:
            batches = [batch(rank, 0, number) for number in range((4, 6, 0)[rank])]
            for at, (x, y) in enumerate(block.iterate(batches, lookahead=lookahead)):
                if rank != who or at not in steps:
                    list(body.places(x, y, at))
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group_works()
    return "fine"


@pytest.mark.parametrize(
    ("kind", "who", "steps", "lookahead", "how"),
    [
        (TwoModules, 2, range(6), 1, {}),  # if join.shadowing: continue
        (TwoModules, 0, range(4, 6), 1, {}),
        (TwoModules, 0, range(4, 6), 3, {}),
        (TwoModules, 1, range(5, 6), 1, {}),
        (TwoModules, 1, range(1, 2), 1, {}),  # and goes on
        (Sharded, 2, range(3, 4), 1, {}),
        (Accumulating, 0, range(2, 3), 1, {}),
        (TwoModules, 2, range(6), 1, {"steps": "loader"}),
        (TwoModules, 1, range(5, 6), 1, {"steps": "loader"}),
        (TwoModules, 0, range(4, 6), 1, {"timeout": 60.0}),
        (TwoModules, 1, range(5, 6), 1, {"timeout": 60.0}),
        (TwoModules, 1, range(2, 3), 1, {"timeout": 60.0}),
        (TwoModules, 2, range(3), 1, {"timeout": 60.0, "steps": "loader"}),
        (Sharded, 2, range(1, 6), 1, {}),
        (Sharded, 0, range(1, 6), 1, {"steps": "loader"}),
        (Sharded, 1, range(2, 6), 3, {"steps": "loader"}),
        (Sharded, 1, range(3, 6), 2, {}),
        (Sharded, 0, range(4, 6), 1, {"timeout": 60.0}),
    ],
)
def test_a_rank_that_leaves_out_a_step(
    pool: Pool, kind: type[Body], who: int, steps: range, lookahead: int, how: dict[str, Any]
) -> None:
    """The others wait for it inside of it, and it for them behind."""
    texts = pool.run(skipping, kind, who, steps, lookahead, how, ranks=RANKS)
    for rank, text in enumerate(texts):
        told = "ProtocolError: " if rank == who else f"PeerError: rank {who} failed: ProtocolError: "
        assert text.startswith(f"{told}rank {who} left ")
        assert f" out of step {steps[0] + 1} of join.iterate, and rank " in text


@pytest.mark.parametrize(("kind", "step"), [(WithZero, 0), (WithZero, 2), (WithBuffers, 0), (WithBuffers, 1)])
def test_a_rank_that_leaves_out_a_step_between_machines(pool: Pool, kind: type[Body], step: int) -> None:
    """It goes on, and is told when a roll call tells how many bursts all have run."""
    steps = range(step, step + 1)
    texts = pool.run(skipping, kind, 1, steps, 1, {}, ranks=RANKS, over_group=True)
    for rank, text in enumerate(texts):
        assert text.startswith("ProtocolError: " if rank == 1 else "PeerError: rank 1 failed: ProtocolError: ")
        assert f"rank 1 left {'the ' if kind is WithBuffers else 'the backward'}" in text
        assert f" out of step {step + 1} of join.iterate, and rank 0 did not" in text


@pytest.mark.parametrize(
    ("kind", "step", "place", "lookahead"),
    [
        (TwoModules, 0, 0, 1),  # before any step has shown what the body does
        (TwoModules, 0, 3, 3),
        (TwoModules, 1, 2, 1),
        (TwoModules, 4, 1, 1),  # rank 0 has dummies by then
        (Sharded, 0, 1, 1),
        (Sharded, 1, 0, 3),
        (Sharded, 4, 3, 1),
        (Accumulating, 1, 1, 1),
        (Accumulating, 2, 0, 1),
        (Accumulating, 2, 2, 3),
        (Slow, 2, 0, 1),
        (Weighed, 4, 2, 1),  # the only rank that still weighs anything
        (WeighedSharded, 4, 1, 1),
    ],
)
def test_the_others_are_told_whatever_the_body_does(
    pool: Pool, kind: type[Body], step: int, place: int, lookahead: int
) -> None:
    first, second, third = pool.run(leaving, kind, step, place, lookahead, ranks=RANKS)
    assert second == "ValueError: enough"
    assert first == third == "PeerError: rank 1 failed: ValueError: enough"


def leaving_where_others_throw(rank: int, raises: bool) -> tuple[str, int]:
    ddp, text = DistributedDataParallel(MLP()), "fine"
    try:
        with Join([ddp], throw_on_early_termination=True) as block:
            batches = [batch(rank, 0, number) for number in range(2 + 2 * rank)]
            for step, (x, _) in enumerate(block.iterate(batches, lookahead=4)):
                ddp(x).sum().backward()
                if (rank, step) == (1, 1):
                    if raises:
                        raise ValueError("enough")
                    break
    except (ValueError, JoinError) as error:
        text = type(error).__name__
    group_works()
    with Join([ddp]) as block:  # what one rank has answered, and no other, is not taken for an answer here
        steps = sum(1 for _ in block.iterate(range(2 + rank)))
    return text, steps


@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_that_leaves_where_the_others_throw(pool: Pool, raises: bool) -> None:
    mine = "ValueError" if raises else "ProtocolError"
    assert pool.run(leaving_where_others_throw, raises, ranks=2) == [("EarlyTerminationError", 3), (mine, 3)]


def skipping_dummies(rank: int, counts: list[int], asks: bool, how: dict[str, Any]) -> str:
    ddp = DistributedDataParallel(MLP())
    try:
        with Join([ddp], **how) as block:
            for x, y in block.iterate([batch(rank, 0, number) for number in range(counts[rank])]):
                if asks:
                    _ = block.is_last_step
                if not block.shadowing:
                    (ddp(x) - y).square().sum().backward()
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group_works()
    return "fine"


@pytest.mark.parametrize("how", [{}, {"timeout": 30.0}])
@pytest.mark.parametrize(("counts", "asks"), [([1, 1, 4], False), ([1, 4, 0], False), ([1, 4, 4], True)])
def test_ranks_that_skip_dummies(pool: Pool, counts: list[int], asks: bool, how: dict[str, Any]) -> None:
    for rank, text in enumerate(pool.run(skipping_dummies, counts, asks, how, ranks=RANKS)):
        skips = counts[rank] < max(counts)
        assert text.startswith("ProtocolError: rank " if skips else "PeerError: rank ")
        assert " left " in text


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
            for step, (x, y) in enumerate(block.iterate(loader())):
                if rank == 0 and kind == "asks":
                    _ = block.is_last_step
                if (rank, step, kind) == (1, 2, "raises"):
                    raise ValueError("mine")
                (ddp(x) - y).square().sum().backward()
                if kind == "nested":
                    with Join([other]):
                        other(torch.ones(1, 2)).sum().backward()
    except (ValueError, JoinError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group_works()
    return "fine"


@pytest.mark.parametrize("kind", ["asks", "nested", "raises"])
def test_nobody_who_waits_for_a_slow_rank_has_left_something_out(pool: Pool, kind: str) -> None:
    told = [
        "PeerError: rank 1 failed: ValueError: mine",
        "ValueError: mine",
        "PeerError: rank 1 failed: ValueError: mine",
    ]
    assert pool.run(slow, kind, ranks=RANKS) == (told if kind == "raises" else ["fine"] * RANKS)


# -- collectives that nobody can shadow --------------------------------------------------------------------------------


def rank_main(rank: int, ranks: int, path: str, how: str, over_group: bool, results: Any) -> None:
    join.early_exit.LIMIT_SECONDS = join.early_exit._SEEN_GRACE_SECONDS = 3.0
    os.environ[SWITCH] = "0" if over_group else "1"
    dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(ddp.parameters())
    try:
        with Join([ddp, optimizer]) as block:
            for step, (x, y) in enumerate(block.iterate([batch(rank, 0, step) for step in range(3 + rank)])):
                optimizer.zero_grad()
                ((ddp(x) - y) ** 2).mean().backward()
                if rank == 1 and step == 2 and how == "break":
                    break
                if rank == 1 and step == 3:  # where rank 0 has a dummy
                    raise ValueError("mine")
                dist.all_reduce(torch.ones(3))  # the body's own, which nobody can shadow
                optimizer.step()
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
        # Rank 1's process ends here: this sets the others free.


def accumulating_main(rank: int, ranks: int, path: str, how: str, results: Any) -> None:
    """Between machines, where a rank that leaves cannot see which backwards of the others reduce nothing."""
    join.early_exit.LIMIT_SECONDS = 3.0
    os.environ[SWITCH] = "0"
    dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
    body = Accumulating()
    try:
        with Join(body.listed) as block:
            for step, (x, y) in enumerate(block.iterate([batch(rank, 0, step) for step in range(6 + rank)])):
                if rank == 1 and step == 4:
                    if how == "break":
                        break
                    raise ValueError("mine")
                for _ in body.places(x, y, step):
                    pass
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))


def in_a_plain_block(rank: int, ranks: int, path: str, results: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp], timeout=3):
            for step in range((2, 0, 2)[rank]):
                ddp(batch(rank, 0, step)[0]).sum().backward()
                dist.all_reduce(torch.ones(3))  # to which rank 1 does not come
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))


def run_to_the_end(main: Any, ranks: int, path: Path, *arguments: Any) -> dict[int, str]:
    """What so many processes of their own tell; none of them may hang."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = [
        context.Process(target=main, args=(rank, ranks, str(path / "store"), *arguments, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 90
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung
    return dict(results.get(timeout=5) for _ in range(ranks))


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("how", ["raise", "break"])
def test_all_processes_end_and_say_why(tmp_path: Path, how: str, over_group: bool) -> None:
    texts = run_to_the_end(rank_main, 3, tmp_path, how, over_group)
    mine = "ValueError: mine" if how == "raise" else "ProtocolError: rank 1 left the loop over join.iterate early"
    assert texts[1].startswith(mine)
    for rank in (0, 2):
        assert texts[rank].startswith("PeerError: ")
        assert f"rank 1 failed: {mine}" in texts[rank]


@pytest.mark.parametrize("how", ["raise", "break"])
def test_all_processes_end_where_shards_accumulate(tmp_path: Path, how: str) -> None:
    texts = run_to_the_end(accumulating_main, 3, tmp_path, how)
    told = "ranks [1] left the loop over join.iterate early"
    assert texts[1].startswith("ValueError: mine" if how == "raise" else f"ProtocolError: {told}")
    for rank in (0, 2):
        if how == "raise":
            assert texts[rank] == "PeerError: rank 1 failed: ValueError: mine"
        else:
            assert texts[rank].startswith(f"ProtocolError: {told}")


def test_ranks_that_only_see_others_end_say_why_they_did(tmp_path: Path) -> None:
    """In a ring of five, the collectives of two fail since those between them and rank 1 have ended."""
    texts = run_to_the_end(rank_main, 5, tmp_path, "raise", False)
    assert texts.pop(1) == "ValueError: mine"
    assert set(texts.values()) == {"PeerError: rank 1 failed: ValueError: mine"}


def test_a_collective_of_ones_own_in_a_plain_block(tmp_path: Path) -> None:
    texts = run_to_the_end(in_a_plain_block, 3, tmp_path)
    assert texts[1].startswith("JoinTimeoutError: waited 3 s for ranks [0, 2], which announced nothing")
    for rank in (0, 2):
        assert texts[rank].startswith("RuntimeError: ") and "losed by peer" in texts[rank]
