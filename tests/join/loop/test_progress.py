"""Consumers that read ahead of the body of a loop over ``Join.iterate`` are refused; nobody else is."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.ending import Ending
from tests.harness import Pool, at_night
from tests.training import batch, build, shard

Data = tuple[torch.Tensor, torch.Tensor]
COUNTS = 5, 7, 2


def prefetch(batches: Iterable[Data], depth: int = 1) -> Iterator[Data]:
    source, held = iter(batches), deque[Data]()
    held.extend(islice(source, depth))
    while held:
        held.extend(islice(source, 1))
        yield held.popleft()


def prefetch_copies(batches: Iterable[Data]) -> Iterator[Data]:
    """As to a GPU: what it holds is not what it was given."""
    return prefetch((x.clone(), y.clone()) for x, y in batches)


def windows(batches: Iterable[Data], size: int = 4) -> Iterator[Data]:
    """As the Trainer of transformers reads the batches of a window of accumulation."""
    source = iter(batches)
    while window := list(islice(source, size)):
        yield from window


def in_a_thread(batches: Iterable[Data]) -> Iterator[Data]:
    passed: queue.Queue[Any] = queue.Queue(2)

    def read() -> None:
        try:
            for each in batches:
                passed.put(each)
        except Exception as error:
            passed.put(error)
        passed.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (each := passed.get()) is not None:
        if isinstance(each, Exception):
            raise each
        yield each


CONSUMERS: dict[str, Callable[[Iterable[Data]], Iterable[Data]]] = {
    "prefetch": prefetch,
    "prefetch 3": lambda batches: prefetch(batches, 3),
    "prefetch copies": prefetch_copies,
    "windows": windows,
    "all at once": list,
    "in a thread": in_a_thread,
}


def reads_ahead(rank: int, consumer: str, how: str, dummy: Any = "empty") -> str:
    trained: Any = shard() if how == "shard" else DistributedDataParallel(build(how))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    try:
        with Join([trained, optimizer], divide_by_initial_world_size=False) as join:
            mine = [batch(rank, 0, step) for step in range(COUNTS[rank])]
            for x, y in CONSUMERS[consumer](join.iterate(mine, dummy=dummy)):
                optimizer.zero_grad()
                join.scale(((trained(x) - y) ** 2).mean()).backward()
                optimizer.step()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("consumer", "how"),
    [
        *[(each, "mlp") for each in CONSUMERS],
        ("prefetch", "shard"),
        *[pytest.param(each, "shard", marks=at_night) for each in ("windows", "in a thread")],
        ("in a thread", "norm"),
    ],
)
def test_a_consumer_that_reads_ahead_is_refused(ending: Ending, consumer: str, how: str) -> None:
    for text in ending.run(reads_ahead, consumer, how):
        inside = "Move the prefetcher inside, as in for batch in join.iterate(prefetch(loader))"
        assert inside in text or (how == "shard" and "Loop over join.iterate" in text)  # it came after the loop


@pytest.mark.parametrize("consumer", ["prefetch copies", "all at once"])
def test_a_consumer_that_reads_dummies_with_samples_ahead_is_refused(ending: Ending, consumer: str) -> None:
    for text in ending.run(reads_ahead, consumer, "mlp", "last"):
        assert "Move the prefetcher inside" in text


class Loop:
    """A block on one rank, and the bodies that may be in it."""

    def __init__(self, rank: int) -> None:
        self.ddp = DistributedDataParallel(build("mlp"))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.mine = [batch(rank, 0, step) for step in range(COUNTS[rank])]
        self.rank = rank

    def train(self, x: torch.Tensor, y: torch.Tensor, *, sync: bool = True, scale: Any = None) -> None:
        with nullcontext() if sync else self.ddp.no_sync():
            loss = ((self.ddp(x) - y) ** 2).mean()
            (loss if scale is None else scale(loss)).backward()
        if sync:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluates_alone(self, join: Join) -> None:
        total = sum(float(x.sum()) for x, _ in join.iterate(self.mine))
        assert total
        for x, y in self.mine:  # plain steps, after a loop that calls no module
            self.train(x, y)

    def evaluates(self, join: Join) -> None:
        for x, _ in join.iterate(self.mine):
            with torch.no_grad():
                self.ddp(x)
        for x, y in join.iterate(self.mine):
            self.train(x, y)

    def accumulates(self, join: Join) -> None:
        for x, y in join.iterate(self.mine, window=3):
            self.train(x, y, sync=join.ends_window, scale=join.scale)

    def skips_the_first(self, join: Join) -> None:
        kept: list[torch.Tensor] = []
        for step, (x, y) in enumerate(join.iterate(self.mine)):
            kept.append(x)
            if step >= 2:
                self.train(x, y)

    def skips_three_of_four(self, join: Join) -> None:
        for _ in range(2):
            for step, (x, y) in enumerate(join.iterate(self.mine)):
                if step % 4 == 3:
                    self.train(x, y)

    def skips_the_second(self, join: Join) -> None:
        for step, (x, y) in enumerate(join.iterate(self.mine)):
            if step != 1:
                self.train(x, y)

    def has_noise_of_its_own(self, join: Join) -> None:
        for step, _ in enumerate(join.iterate(self.mine)):
            if step != 1:
                self.ddp(torch.ones_like(self.mine[0][0])).sum().backward()

    def has_two_steps(self, join: Join) -> None:
        for x, y in join.iterate(self.mine[:2]):
            self.train(x, y)
        for x, y in self.mine:
            self.train(x[:0] if self.rank else x, y[:0] if self.rank else y)

    def in_pairs(self, join: Join) -> None:
        before: Any = None
        for x, _ in join.iterate(self.mine):
            if before is not None:
                (self.ddp(before).sum() + self.ddp(x).sum()).backward()
            before = x

    def reads_ahead_inside(self, join: Join) -> None:
        for x, y in join.iterate(prefetch(self.mine, 3), lookahead=2):
            self.train(x, y)

    def has_one_step(self, join: Join) -> None:
        for x, y in join.iterate(self.mine[:1]):
            self.train(x, y)
        for x, y in self.mine:
            self.train(x[:0] if self.rank else x, y[:0] if self.rank else y)


def does_not_read_ahead(rank: int, body: str) -> None:
    loop = Loop(rank)
    with Join([loop.ddp, loop.optimizer], divide_by_initial_world_size=False) as join:
        getattr(loop, body)(join)


@pytest.mark.parametrize("body", [name for name in vars(Loop) if name not in ("train",) and not name.startswith("_")])
def test_nobody_else_is_refused(pool: Pool, body: str) -> None:
    pool.run(does_not_read_ahead, body)
