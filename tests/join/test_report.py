"""The numbers of the report."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from join import Join, JoinReport, rounds
from join.collectives import SingleCollective, ThreadCollective, run_threads
from tests.join.counter import Counter, Leading

STEPS = [2, 5, 0]


def report_of(collective: Any, steps: list[int], *, enable: bool = True) -> JoinReport:
    counter = Counter(collective)
    mine = steps[collective.rank]
    with Join([counter], enable) as join:
        for _ in range(mine):
            counter()
    return join.report


def test_every_step_is_counted() -> None:
    for report in run_threads(3, lambda collective: report_of(collective, STEPS)):
        assert [row.steps for row in report.ranks] == STEPS
        assert [row.shadowed for row in report.ranks] == [3, 0, 5]
        assert all(0 < row.joined_at <= row.ended_at for row in report.ranks)


def test_the_steps_of_the_busiest_joinable_are_told() -> None:
    def rank_main(collective: ThreadCollective) -> JoinReport:
        often, seldom = Leading(collective, "often"), Leading(collective, "seldom")
        with Join([seldom, often]) as join:
            for _ in range(3):
                often()
            seldom()
        return join.report

    for report in run_threads(2, rank_main):
        assert [row.steps for row in report.ranks] == [3] * 2


def looping(collective: ThreadCollective, announcing: bool) -> JoinReport:
    """Two loops, the second of which all ranks break out of."""
    counter = Counter(collective)
    with Join([counter]) as join:
        for last in (9, 1):
            for step, _ in enumerate(join.iterate(range(STEPS[collective.rank]))):
                if announcing and last == 9:
                    counter()
                if step == last:
                    break
    return join.report


@pytest.mark.parametrize("announcing", [False, True])
def test_loops_count_their_batches(announcing: bool) -> None:
    for report in run_threads(3, lambda collective: looping(collective, announcing)):
        assert [row.steps for row in report.ranks] == [4, 7, 0]
        assert [row.shadowed for row in report.ranks] == [3, 0, 7]
        assert report.steps == 7


def test_a_rank_with_data_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait for a roll call takes 1,000 seconds."""
    seconds = itertools.count(step=1000)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    for report in run_threads(3, lambda collective: looping(collective, False)):
        assert [row.idle >= 1000 for row in report.ranks] == [True, False, True]


def test_one_process_and_no_process() -> None:
    single = SingleCollective()
    assert [row.steps for row in report_of(single, [3]).ranks] == [3]
    assert report_of(single, [3], enable=False).to_dict() == {"ranks": (), "even": True, "counts_steps": False}
