"""Random generators that ranks seeded alike, or not, around blocks."""

from __future__ import annotations

import logging
import random
import re
import threading
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join, generators
from tests.harness import Pool
from tests.training import batch, build

numpy = pytest.importorskip("numpy")


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    numpy.random.seed(number)


def draws() -> list[float]:
    return [random.random(), float(torch.rand(())), float(numpy.random.rand())]


def train(rank: int, counts: tuple[int, ...], way: str, seeds: str, between: str) -> Any:
    """Draw once a step; return what the ranks draw before each epoch, and after the last."""
    model = torch.nn.Sequential(build("mlp"), torch.nn.Dropout(0.5))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    seed(7 + rank * (seeds == "own"))
    found: list[list[float]] = []
    for epoch in range(3):
        found.append(draws())
        if between == "validation" and epoch == 1 and rank == 0:
            draws()
        mine = [batch(rank, epoch, step) for step in range(counts[rank])]
        if between == "smaller" and rank == 1:
            mine[-1] = mine[-1][0][:1], mine[-1][1][:1]
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in join.iterate(mine) if way == "iterate" else mine:
                draws()
                optimizer.zero_grad()
                (ddp(x) - y).square().mean().backward()
                optimizer.step()
    return [*found, draws()]


UNEVEN, EVEN = (2, 4, 0), (2, 2, 2)


@pytest.mark.parametrize("way", ["plain", "iterate"])
def test_generators_that_were_seeded_alike(pool: Pool, way: str) -> None:
    """They draw alike before each epoch, as one process does that makes as many steps."""
    results = pool.run(train, UNEVEN, way, "alike", "", ranks=3)
    assert results[0] == results[1] == results[2]
    seed(7)
    alone: list[float] = []
    for _ in range(3):
        alone.append(draws()[0])
        for _ in range(4):
            random.random()
    assert [found[0] for found in results[0][:3]] == alone


@pytest.mark.parametrize("way", ["plain", "iterate"])
@pytest.mark.parametrize("counts", [UNEVEN, EVEN])
def test_generators_of_each_rank_stay_its_own(pool: Pool, way: str, counts: tuple[int, ...]) -> None:
    results = pool.run(train, counts, way, "own", "", ranks=3)
    for rank, found in enumerate(results):
        seed(7 + rank)
        assert found[0] == draws()
        steps = max(counts) if way == "iterate" else counts[rank]
        for _ in range(steps):
            random.random()
        assert found[1][0] == random.random()


def test_a_validation_on_one_rank_between_blocks(pool: Pool) -> None:
    """From then on the generators of that rank are its own, and those of the others, too."""
    first, second, third = pool.run(train, UNEVEN, "plain", "alike", "validation", ranks=3)
    assert first[:2] == second[:2] == third[:2]
    assert first[2] != second[2]
    assert third[2] != second[2]  # which has drawn in its steps


def test_dropout_on_smaller_batches_in_an_even_block(pool: Pool) -> None:
    """The ranks draw different numbers, as under plain DDP, and keep their own."""
    first, second = pool.run(train, (2, 2), "plain", "alike", "smaller", ranks=2)
    assert first[1][0] == second[1][0]  # of Python: one draw a step
    assert first[1][1] != second[1][1]


def train_and_keep_the_log(rank: int, counts: tuple[int, ...], between: str) -> list[str]:
    texts = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("join")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        train(rank, counts, "plain", "alike", between)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return [text for text in texts if "random generators" in text]


@pytest.mark.parametrize(
    ("counts", "between", "told"),
    [
        ((2, 2), "smaller", "of torch .* in a Join block in which all ranks had data"),
        (UNEVEN, "validation", "of numpy and python and torch .* between two Join blocks"),
    ],
)
def test_generators_that_drift_apart_are_logged_once(
    pool: Pool, counts: tuple[int, ...], between: str, told: str
) -> None:
    first, *others = pool.run(train_and_keep_the_log, counts, between, ranks=len(counts))
    assert len(first) == 1 and re.search(told, first[0])
    assert not any(others)


def test_every_draw_of_numpy_is_seen() -> None:
    """A normal number may be the second half of an earlier draw, whose only trace is a flag."""
    numpy.random.seed(0)
    before = generators.digests_of_generators()
    assert generators.digests_of_generators() == before
    for _ in range(4):
        numpy.random.normal()
        after = generators.digests_of_generators()
        assert after[3] != before[3]
        before = after
    numpy.random.seed(0)
    assert generators.digests_of_generators()[:3] == before[:3]


def test_threads_read_states_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as threads hung: one held the generator's mutex of torch, and another one waited for it with the GIL."""
    real, at_once, reads = torch.get_rng_state, list[bool](), threading.Barrier(2)

    def slow() -> torch.Tensor:
        try:
            reads.wait(0.1)  # until another thread is here, if nothing keeps them apart
            at_once.append(True)
        except threading.BrokenBarrierError:
            at_once.append(False)
        return real()

    monkeypatch.setattr(torch, "get_rng_state", slow)
    threads = [threading.Thread(target=call) for call in (generators.digests_of_generators, generators.capture) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [False] * 4
