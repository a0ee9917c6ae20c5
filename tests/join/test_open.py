"""Blocks that list nothing, and blocks that are opened and closed without a ``with`` statement."""

from __future__ import annotations

import gc
import os
import signal
import sys
from multiprocessing import connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from join import Join, JoinError, PeerError
from join.collectives import SingleCollective, ThreadCollective, collective_of, run_threads
from tests.ending import Ending, assert_blamed
from tests.harness import Pool
from tests.join.counter import Counter
from tests.training import batch, build

COUNTS = (3, 5, 0)


def evaluate(rank: int, ranks: list[int]) -> list[Any]:
    """The mean output over all samples, by a body with a collective of its own."""
    group = dist.new_group(ranks)
    if rank not in ranks:
        return []
    model, total, steps = build("mlp"), torch.zeros(2), []
    with Join([], process_group=group) as join, torch.no_grad():
        for x, _ in join.iterate([batch(rank, 0, step) for step in range(COUNTS[rank])]):
            part = torch.tensor([model(x).sum(), len(x)])
            dist.all_reduce(part, group=group)
            total += part
            steps.append(join.shadowing)
    return [total, steps, [(row.steps, row.shadowed) for row in join.report.ranks]]


@pytest.mark.parametrize("ranks", [[0, 1, 2], [1, 2]], ids=str)
def test_a_block_for_loops_that_only_evaluate(pool: Pool, ranks: list[int]) -> None:
    results = pool.run(evaluate, ranks, ranks=3)
    model, most = build("mlp"), max(COUNTS[rank] for rank in ranks)
    batches = [batch(rank, 0, step)[0] for rank in ranks for step in range(COUNTS[rank])]
    expected = torch.tensor([sum(model(x).sum().item() for x in batches), sum(map(len, batches))])
    for rank in ranks:
        total, steps, report = results[rank]
        torch.testing.assert_close(total, expected)
        assert steps == [step >= COUNTS[rank] for step in range(most)]
        assert report == [(COUNTS[each], most - COUNTS[each]) for each in ranks]


def test_open_and_close_are_a_block() -> None:
    def rank_main(collective: ThreadCollective) -> tuple[int, int]:
        counter = Counter(collective)
        join = Join([counter])
        for _ in range(2):
            assert join.open() is join
            with pytest.raises(JoinError, match="This Join is open"):
                join.open()
            for _ in range(collective.rank):
                counter()
            join.close()
            join.close()  # it is closed
        return counter.total, join.report.ranks[0].shadowed

    assert run_threads(3, rank_main) == [(6, 2)] * 3


def failing(rank: int) -> str:
    counter = Counter(collective_of(None))
    join = Join([counter]).open()
    try:
        try:
            for step in range(rank + 2):
                if (rank, step) == (1, 1):
                    raise KeyError("in a hook")
                counter()
            join.close()
        except Exception as error:
            join.close(error)
            raise
    except (KeyError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_what_it_is_closed_with_is_told(ending: Ending) -> None:
    assert_blamed(ending.run(failing), 1, "KeyError: 'in a hook'")


def ends_inside(rank: int, way: str) -> None:
    """Rank 1 ends with its block open, and rank 0 does not close its own after an exception."""
    counter = Counter(collective_of(None))
    join = Join([counter]).open()
    for _ in range((100, 2, 0)[rank]):
        counter()
    if rank == 1:
        if way == "raises":
            raise KeyError("mine")
        if way == "ends at once":
            os._exit(3)
        if way == "destroys the group":
            dist.destroy_process_group()
        sys.exit(3)
    join.close()


NEVER_LEFT = "failed: JoinError: Its process ended inside a Join block. Call join.close() before that. [J582]"
TOLD = {
    "raises": "failed: KeyError: 'mine'. The process",
    "ends at once": "is gone, without",
    "destroys the group": NEVER_LEFT,
    "exits": NEVER_LEFT,
}


@pytest.mark.parametrize("way", TOLD)
def test_a_process_that_ends_with_its_block_open(ending: Ending, way: str) -> None:
    ends = ending.ends(ends_inside, way, limit=30)
    for end in (ends[0], ends[2]):
        assert end.code in (1, -signal.SIGABRT)  # torch may abort a process whose group is broken at its very end
        assert f"PeerError: rank 1 {TOLD[way]}" in end.text


def ends_after_another(rank: int) -> None:
    pids = [0, 0, 0]
    dist.all_gather_object(pids, os.getpid())
    Join([Counter(collective_of(None))]).open()
    if rank == 1:
        raise KeyError("mine")
    connection.wait([os.pidfd_open(pids[1])])
    sys.exit(3)


def test_a_process_that_ends_with_its_block_open_after_another_rank_has_failed(ending: Ending) -> None:
    ends = ending.ends(ends_after_another, limit=30)
    for end in (ends[0], ends[2]):
        assert f"PeerError: rank 1 {TOLD['raises']}" in end.text


def test_a_join_that_is_not_kept() -> None:
    def rank_main(collective: ThreadCollective) -> int:
        counter = Counter(collective)
        Join([counter]).open()
        for _ in range(collective.rank):
            counter()
        gc.collect()
        Join.current(collective).close()
        return counter.total

    assert run_threads(3, rank_main) == [3] * 3


def never_closes(rank: int) -> None:
    Join([], process_group=SingleCollective()).open()


def test_one_that_is_never_closed(ending: Ending) -> None:
    (end,) = ending.ends(never_closes, ranks=1, group=False)
    assert "A Join block was opened and never left" in end.stderr
