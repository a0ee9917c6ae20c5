"""Blocks in generators, whose consumer ends them by a ``break``, by ``close``, or by an exception of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from join.collectives import ThreadCollective, run_threads
from tests.ending import Ending, assert_blamed
from tests.harness import Pool
from tests.join.counter import Counter
from tests.training import TOLERANCE, batch, build, mlp_in_one_process

COUNTS = (2, 5, 0)


def calls(counter: Counter) -> Generator[int]:
    with Join([counter]):
        for number in range(100):
            yield number
            counter()


def nested(counter: Counter) -> Generator[int]:
    yield from calls(counter)


async def awaited(counter: Counter) -> AsyncGenerator[int]:
    with Join([counter]):
        for number in range(100):
            yield number
            await asyncio.sleep(0)
            counter()


def breaks(counter: Counter, rank: int) -> None:
    for number in calls(counter):
        if number == COUNTS[rank]:
            break


def closes(counter: Counter, rank: int) -> None:
    generator = nested(counter)
    for _ in range(COUNTS[rank] + 1):
        next(generator)
    generator.close()


def breaks_asynchronously(counter: Counter, rank: int) -> None:
    async def consume() -> None:
        async with aclosing(awaited(counter)) as numbers:
            async for number in numbers:
                if number == COUNTS[rank]:
                    break

    asyncio.run(consume())


@pytest.mark.parametrize("ends", [breaks, closes, breaks_asynchronously])
def test_a_closed_generator_is_out_of_data(ends: Callable[[Counter, int], None]) -> None:
    def rank_main(collective: ThreadCollective) -> int:
        counter = Counter(collective)
        for _ in range(2):
            ends(counter, collective.rank)
        return counter.total

    assert run_threads(3, rank_main) == [2 * sum(COUNTS)] * 3


def steps_of(rank: int, ddp: Any, optimizer: Any, lockstep: bool) -> Generator[int]:
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        yield 0  # on a rank without data, too
        data = [batch(rank, 0, step) for step in range(COUNTS[rank])]
        for step, (x, y) in enumerate(join.iterate(data) if lockstep else data, 1):
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            yield step


def two_epochs(rank: int, lockstep: bool) -> list[torch.Tensor]:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    for _ in range(2):
        for step in steps_of(rank, ddp, optimizer, lockstep):
            if step == (max(COUNTS) if lockstep else COUNTS[rank]):
                break
    return [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.parametrize("lockstep", [False, True])
def test_training_in_a_generator_that_a_break_closes(pool: Pool, lockstep: bool) -> None:
    for found in pool.run(two_epochs, lockstep, ranks=3):
        torch.testing.assert_close(found, mlp_in_one_process(COUNTS, epochs=2), atol=TOLERANCE, rtol=0)


def consuming(rank: int, lockstep: bool, raises: bool) -> str:
    """Rank 1 leaves a generator in its first step: by an exception, or by a ``break``."""
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(ddp.parameters())
    try:
        with closing(steps_of(rank, ddp, optimizer, lockstep)) as steps:
            for step in steps:
                if rank == 1 and step == 1:
                    if raises:
                        raise ValueError("mine")
                    break
    except (ValueError, JoinError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_exception_that_closes_a_generator_is_told(ending: Ending, lockstep: bool) -> None:
    assert_blamed(ending.run(consuming, lockstep, True), 1, "ValueError: mine")


def test_a_break_of_one_rank_in_a_generator_is_told(ending: Ending) -> None:
    assert_blamed(ending.run(consuming, True, False), 1, "ProtocolError: Rank 1 left the loop over join.iterate")
