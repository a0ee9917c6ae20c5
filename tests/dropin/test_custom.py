"""Joinables of one's own, written for torch's classes: totals, keywords, hooks, early termination."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.dropin.counter import counter_class
from tests.dropin.either import OURS, TORCHS, either, run
from tests.ending import Ending, assert_blamed
from tests.harness import Pool
from tests.training import batch, build

COUNTS = [(0, 3, 1), (2, 0, 4), (2, 2, 2), (0, 0, 0)]
"""How many batches each rank has; uneven, even, and none at all."""


def three(rank: int, library: Any, counts: tuple[int, ...]) -> list[tuple[Any, ...]]:
    counters = [counter_class(library)() for _ in range(3)]
    with library.Join(counters, most=True, sizes=[1, 2]):
        for _ in range(counts[rank]):
            for counter in counters:
                counter()
        for counter in counters:
            for work in filter(None, counter.works):
                work.wait()
    return [(each.total, each.silent, each.keywords, each.last_joiner, each.calls_of_last) for each in counters]


@either()
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_totals_keywords_and_hooks(pool: Pool, counts: tuple[int, ...], library: str) -> None:
    for rank, counters in enumerate(run(pool, library, three, counts)):
        for position, (total, silent, keywords, last_joiner, calls_of_last) in enumerate(counters):
            assert total == sum(counts)
            assert silent == [position > 0] * counts[rank]
            assert keywords == {"most": True, "sizes": [1, 2]}
            assert last_joiner is (counts[rank] == max(counts))
            assert calls_of_last == max(counts)


def beside_ddp(rank: int, library: Any, first: bool) -> int:
    ddp, counter = DistributedDataParallel(build("mlp")), counter_class(library)()
    with library.Join([counter, ddp] if first else [ddp, counter]):
        for step in range([0, 3, 1][rank]):
            if first:
                counter()
            ddp(batch(rank, 0, step)[0]).sum().backward()
            if not first:
                counter()
    return counter.total


@either()
@pytest.mark.parametrize("first", [True, False])
def test_beside_a_ddp_module(pool: Pool, first: bool, library: str) -> None:
    assert run(pool, library, beside_ddp, first) == [4, 4, 4]


def half_moved(rank: int, library: Any) -> tuple[int, list[bool]]:
    theirs = importlib.import_module(TORCHS)
    counter = counter_class(SimpleNamespace(Joinable=theirs.Joinable, JoinHook=theirs.JoinHook, Join=library.Join))()
    with library.Join([counter]):
        for _ in range(rank):
            counter()
    silent = counter.silent
    counter()
    return counter.total, silent


@pytest.mark.parametrize("library", [OURS, TORCHS])
def test_a_class_that_still_derives_from_torchs(pool: Pool, library: str) -> None:
    assert run(pool, library, half_moved) == [(6, [False] * rank) for rank in range(3)]


def disabled(rank: int, library: Any) -> tuple[Any, ...]:
    counter = counter_class(library)()
    with library.Join([counter], False, True, most=True):
        counter()
        counter()
    return counter.total, counter.silent, counter.last_joiner


@either()
def test_a_block_that_is_not_enabled_does_nothing(pool: Pool, library: str) -> None:
    assert run(pool, library, disabled) == [(6, [True, True], None)] * 3


def terminated(rank: int, library: Any, counts: tuple[int, ...]) -> tuple[int, str, int]:
    counter = counter_class(library)()
    told = ""
    try:
        with library.Join([counter], throw_on_early_termination=True):
            for _ in range(counts[rank]):
                counter()
    except RuntimeError as error:
        told = str(error)
    return counter.total, told, counter.reduce(1)


@either()
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_throw_on_early_termination(pool: Pool, counts: tuple[int, ...], library: str) -> None:
    least = min(counts)
    for rank, (total, told, ranks) in enumerate(run(pool, library, terminated, counts)):
        assert total == 3 * least
        if max(counts) == least:
            assert told == ""
        elif counts[rank] == least:
            assert told == f"Rank {rank} exhausted all inputs."
        else:
            assert told == "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        assert ranks == 3  # the group works


def validated(rank: int, library: Any, after: bool) -> tuple[int, list[bool]]:
    counter = counter_class(library)()
    if after:
        with library.Join([counter]):
            for _ in range(rank):
                counter()
        counter.works.clear()
    counter()
    return counter.total, counter.silent


@either()
def test_outside_before_a_block(pool: Pool, library: str) -> None:
    assert run(pool, library, validated, False) == [(3, [True])] * 3


@either(wrong="what was listed goes on to notify after the block, by an all-reduce that nobody waits for")
def test_outside_after_a_block(pool: Pool, library: str) -> None:
    assert run(pool, library, validated, True) == [(3 + 3, [True])] * 3


def entered_again(rank: int, library: Any) -> tuple[int, list[bool]]:
    counter, last = counter_class(library)(), []
    join = library.Join([counter])
    for counts in COUNTS:
        with join:
            for _ in range(counts[rank]):
                counter()
        last.append(counter.last_joiner)
    return counter.total, last


@either()
def test_entered_again(pool: Pool, library: str) -> None:
    for rank, (total, last) in enumerate(run(pool, library, entered_again)):
        assert total == sum(map(sum, COUNTS))
        assert last == [counts[rank] == max(counts) for counts in COUNTS]


def subgroup(rank: int, library: Any) -> int:
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0
    counter = counter_class(library)(group)
    with library.Join([counter]):
        for _ in range(rank):
            counter()
    return counter.total


@either()
def test_some_ranks_only(pool: Pool, library: str) -> None:
    assert run(pool, library, subgroup) == [2, 0, 2]


def refused(rank: int, library: Any) -> None:
    counter = counter_class(library)
    with pytest.raises(ValueError, match="multiple process groups"):
        library.Join([counter(), counter(dist.new_group([0, 1, 2]))])
    with pytest.raises(ValueError, match="requires at least one joinable"):
        library.Join([])


@either()
def test_what_cannot_be_listed(pool: Pool, library: str) -> None:
    run(pool, library, refused)


def one_raises(rank: int, library: Any) -> str:
    counter = counter_class(library)()
    try:
        with library.Join([counter]):
            for step in range([0, 3, 3][rank]):
                counter()
                if rank == step == 1:
                    raise ValueError("no more")
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@either(wrong="a rank that raises tells nobody: the others wait for it until its process ends")
def test_a_rank_that_raises(ending: Ending, library: str) -> None:
    assert_blamed(run(ending, library, one_raises), 1, "ValueError: no more")
