"""Join over joinables of one's own, with thread ranks: totals, hooks, keywords, failures, early termination."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from join import EarlyTerminationError, Join, JoinError, JoinTimeoutError, PeerError, ProtocolError
from join.block import joins, release
from join.collectives import SingleCollective, ThreadCollective, collective_of, run_threads
from tests.harness import Pool
from tests.join.counter import Counter, CounterHook, Leading, blames


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_totals_hooks_and_keywords(ranks: int) -> None:
    steps = [rank % 5 for rank in range(ranks)]

    def rank_main(collective: ThreadCollective) -> tuple[Any, ...]:
        counters = [Counter(collective) for _ in range(3)]
        with Join(counters, sync_max_count=True) as join:
            for _ in range(steps[collective.rank]):
                for counter in counters:
                    counter()
        return counters, join.report

    results = run_threads(ranks, rank_main)
    for rank, (counters, report) in enumerate(results):
        first, *others = counters
        assert [counter.total for counter in counters] == [sum(steps)] * 3
        assert all(work is not None for work in first.works)
        assert all(work is None for other in others for work in other.works)
        assert all(counter.keywords == {"sync_max_count": True} for counter in counters)
        assert all(counter.last_joiner is (steps[rank] == max(steps)) for counter in counters)
        assert str(report) == str(results[0][1])
        assert [row.steps for row in report.ranks] == steps
        assert [row.shadowed for row in report.ranks] == [max(steps) - each for each in steps]
        assert report.even is (len(set(steps)) == 1)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=16), st.integers(1, 3), st.booleans())
def test_any_step_counts(steps: list[int], followers: int, leading: bool) -> None:
    def rank_main(collective: ThreadCollective) -> list[int]:
        own = Leading(collective)
        counters = [Counter(collective) for _ in range(followers)]
        with Join([own, *counters] if leading else counters):
            for step in range(steps[collective.rank]):
                if leading:
                    own()
                for counter in counters:
                    counter()
                if leading and step % 2:
                    own()
                    for counter in counters:
                        counter()
        return [counter.total for counter in counters]

    expected = sum(steps) + (sum(each // 2 for each in steps) if leading else 0)
    assert run_threads(len(steps), rank_main) == [[expected] * followers] * len(steps)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, "raise", "exit"])), min_size=2, max_size=8))
def test_any_failure_ends_everywhere(plan: list[tuple[int, str | None]]) -> None:
    """Whoever raises wherever: nobody hangs, and peers learn of it unless they were done before."""

    def rank_main(collective: ThreadCollective) -> str:
        steps, end = plan[collective.rank]
        counter = Counter(collective)
        try:
            with Join([counter]):
                for _ in range(steps):
                    counter()
                if end == "raise":
                    raise ValueError(f"rank {collective.rank} has had enough")
        except ValueError:
            outcome = "raised"
        except PeerError as error:
            outcome = f"peer: {error}"
        else:
            outcome = "fine"
        return outcome

    outcomes = run_threads(len(plan), rank_main)
    failing = {rank for rank, (_, end) in enumerate(plan) if end == "raise"}
    if not failing:
        assert set(outcomes) == {"fine"}
    else:
        assert "fine" not in outcomes
        raised = {rank for rank, outcome in enumerate(outcomes) if outcome == "raised"}
        for outcome in outcomes:
            if outcome.startswith("peer"):
                assert any(f"rank {rank} failed: ValueError: rank {rank} has had enough" in outcome for rank in raised)


def test_throw_on_early_termination() -> None:
    steps = [3, 5, 4]

    def rank_main(collective: ThreadCollective) -> tuple[int, str]:
        counter = Counter(collective)
        with pytest.raises(EarlyTerminationError) as caught, Join([counter], throw_on_early_termination=True):
            for _ in range(steps[collective.rank]):
                counter()
        counter.reduce(1)
        return counter.total, str(caught.value)

    everyone = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    expected = [(9, "Rank 0 exhausted all inputs."), (9, everyone), (9, everyone)]
    assert run_threads(3, rank_main) == expected


def test_a_failure_in_the_step_that_stops_is_told() -> None:
    steps = [4, 1, 3]

    def rank_main(collective: ThreadCollective) -> str:
        counter = Counter(collective)
        with pytest.raises((OSError, JoinError)) as caught, Join([counter], throw_on_early_termination=True):
            for step in range(steps[collective.rank]):
                if collective.rank == 0 and step == 1:
                    raise OSError("disk")
                counter()
        return f"{caught.type.__name__}: {caught.value}"

    zero, *others = run_threads(3, rank_main)
    assert zero == "OSError: disk"
    assert all(blames(text, 0, zero) for text in others)


def test_throw_with_even_inputs_does_not_throw() -> None:
    def rank_main(collective: ThreadCollective) -> int:
        counter = Counter(collective)
        with Join([counter], throw_on_early_termination=True):
            counter()
        return counter.total

    assert run_threads(2, rank_main) == [2, 2]


def test_different_announcements_are_a_protocol_error() -> None:
    def rank_main(collective: ThreadCollective) -> str:
        left, right = Leading(collective, "left"), Leading(collective, "right")
        with pytest.raises(ProtocolError) as caught, Join([left, right]):
            if collective.rank == 0:
                left()
            elif collective.rank < 3:
                right()
        assert left.inner.reduce(1) == 4
        return str(caught.value)

    for rank, message in enumerate(run_threads(4, rank_main)):
        assert "1 x left, 2 x right" in message
        assert f"rank {rank} announced {['left', 'right', 'right', 'none'][rank]}" in message


def test_follower_out_of_step_is_an_error() -> None:
    def early(collective: ThreadCollective) -> str:
        first, second = Counter(collective), Counter(collective)
        with pytest.raises(JoinError) as caught, Join([first, second]):
            second()
        return str(caught.value)

    def missing(collective: ThreadCollective) -> str:
        first, second = Counter(collective), Counter(collective)
        with pytest.raises(JoinError) as caught, Join([first, second]):
            first()
            first()
        return str(caught.value)

    assert all("had announced no burst" in text for text in run_threads(2, early))

    def missing_at_the_end(collective: ThreadCollective) -> str:
        first, second = Counter(collective), Counter(collective)
        with pytest.raises(JoinError) as caught, Join([first, second]):
            for step in range(collective.rank):  # the last step is that of rank 1
                first()
                if step + 1 < collective.rank:
                    second()
        return str(caught.value)

    told = "Counter (joinables[1]) did not notify before"
    assert all(f"{told} the next burst was announced" in text for text in run_threads(2, missing))
    assert all(f"{told} the block ended" in text for text in run_threads(2, missing_at_the_end))


def test_timeout_names_who_is_missing() -> None:
    all_are_told = threading.Barrier(3, timeout=20)

    def rank_main(collective: ThreadCollective) -> str:
        counter = Counter(collective)
        with pytest.raises(JoinTimeoutError) as caught, Join([counter], timeout=1.0):
            counter()
            if collective.rank == 1:
                all_are_told.wait()
            counter()
        if collective.rank != 1:
            all_are_told.wait()
        return str(caught.value)

    texts = run_threads(3, rank_main)
    for rank in (0, 2):
        assert "Ranks [1] announced no collective within timeout=" in texts[rank]
        assert "rank 0 announced Counter (header 2)" in texts[rank]
        assert "rank 2 announced Counter (header 2)" in texts[rank]
    assert "Ranks [1] announced no collective within timeout=" in texts[1]


def test_a_late_rank_learns_that_it_was_given_up() -> None:
    """Its header is complete at once, since the others have sent theirs; but they do not come to the burst."""
    is_told = threading.Barrier(2, timeout=20)

    def rank_main(collective: ThreadCollective) -> int:
        counter = Counter(collective)
        with pytest.raises(JoinTimeoutError), Join([counter], timeout=0.5):
            counter()
            if collective.rank == 1:
                is_told.wait()
            counter()
        if collective.rank == 0:
            is_told.wait()
        return len(counter.works)

    assert run_threads(2, rank_main) == [1, 1]


def test_timeout_of_a_rank_that_never_leaves() -> None:
    is_told = threading.Barrier(2, timeout=20)

    def rank_main(collective: ThreadCollective) -> str:
        counter = Counter(collective)
        with pytest.raises(JoinTimeoutError) as caught, Join([counter], timeout=0.6):
            if collective.rank == 0:
                is_told.wait()
        if collective.rank == 1:
            is_told.wait()
        return str(caught.value)

    texts = run_threads(2, rank_main)
    assert "rank 1 is out of data" in texts[1]


def test_blocks_that_share_a_group() -> None:
    steps = [1, 0, 4]

    def rank_main(collective: ThreadCollective) -> tuple[int, int]:
        outer, inner = Counter(collective), Counter(collective)
        with Join([outer]):
            outer()
            with Join([inner]):
                for _ in range(steps[collective.rank]):
                    outer()
                    inner()
            outer()
        return outer.total, inner.total

    assert run_threads(3, rank_main) == [(3 + 5 + 3, 5)] * 3


def test_other_threads_may_enter_while_a_block_is_left() -> None:
    """Before Python 3.12 another thread can run while a list is made, since that may collect garbage."""
    more = range(-2000, -1000)

    def enter(*_: object) -> None:
        joins[-1001 - len(joins)] = None

    joins.update(dict.fromkeys(more))
    gc.callbacks.append(enter)
    try:
        release(object(), [])
    finally:
        gc.callbacks.remove(enter)
        for key in [key for key in joins if key < 0]:
            del joins[key]


def test_disabled_does_nothing() -> None:
    def rank_main(collective: ThreadCollective) -> tuple[Any, ...]:
        counter = Counter(collective)
        with Join([counter], enable=False, sync_max_count=1) as join:
            counter()
        return counter.works, counter.keywords, counter.last_joiner, join.report.ranks

    assert run_threads(2, rank_main) == [([None], {}, None, ())] * 2


def test_outside_a_block_there_is_nobody_to_tell() -> None:
    """As in a loop of validation: before a block, after it, where others may still be in it, and in one of others."""

    def rank_main(collective: ThreadCollective) -> tuple[int, int, list[bool]]:
        counter, other = Counter(collective), Counter(SingleCollective())
        counter()
        with Join([counter]):
            for _ in range(collective.rank):
                counter()
                other()
        counter()
        assert other.works == [None] * collective.rank
        return counter.total, other.total, [work is None for work in counter.works]

    for rank, (total, others, silent) in enumerate(run_threads(3, rank_main)):
        assert (total, others) == (3 + 3 + 3, rank)
        assert silent == [True, *[False] * rank, True]


def test_entering_again() -> None:
    """It is a new block each time, and what is left of one does not show in the next."""
    steps = [[0, 2, 1], [3, 0, 1], [0, 0, 0], [2, 2, 2]]

    def rank_main(collective: ThreadCollective) -> tuple[int, list[Any], list[bool | None]]:
        counter, reports, last = Counter(collective), [], []
        join = Join([counter])
        for counts in steps:
            with join:
                with pytest.raises(JoinError, match="no report"):
                    _ = join.report
                for _ in range(counts[collective.rank]):
                    counter()
            reports.append([(row.steps, row.shadowed) for row in join.report.ranks])
            last.append(counter.last_joiner)
        return counter.total, reports, last

    for rank, (total, reports, last) in enumerate(run_threads(3, rank_main)):
        assert total == sum(map(sum, steps))
        assert reports == [[(each, max(counts) - each) for each in counts] for counts in steps]
        assert last == [counts[rank] == max(counts) for counts in steps]


def test_entering_again_after_early_termination() -> None:
    def rank_main(collective: ThreadCollective) -> int:
        counter = Counter(collective)
        join = Join([counter], throw_on_early_termination=True)
        with pytest.raises(EarlyTerminationError), join:
            for _ in range(collective.rank + 1):
                counter()
        with pytest.raises(JoinError, match="no report"):
            _ = join.report
        before = counter.total
        with join:
            counter()
        return counter.total - before

    assert run_threads(3, rank_main) == [3, 3, 3]


def test_what_is_set_in_a_block_ends_with_it() -> None:
    def rank_main(collective: ThreadCollective) -> None:
        join = Join([Counter(collective)])
        join.weight = 2
        for _ in range(2):
            with join:
                assert join.weight == 2
                join.weight = 5
                with pytest.raises(JoinError, match=r"join.loader_state was called outside"):
                    join.loader_state()
                assert list(join.iterate([1, 2, 3][: collective.rank + 2], until="first")) == [1, 2]
                assert join.pending == [3][: collective.rank]
            assert join.weight == 2
            assert join.pending == [3][: collective.rank]

    run_threads(2, rank_main)


def test_config_is_set_inside_and_reset_outside() -> None:
    def rank_main(collective: ThreadCollective) -> None:
        first, second = Counter(collective), Counter(collective)
        join = Join([first, second], throw_on_early_termination=True)
        assert not first._join_config.enable
        with join:
            assert first._join_config == (True, True, True)
            assert second._join_config == (True, True, False)
        assert first._join_config == second._join_config == (False, False, False)

    run_threads(2, rank_main)


def test_report_needs_the_end_of_the_block() -> None:
    def rank_main(collective: ThreadCollective) -> None:
        join = Join([Counter(collective)])
        with pytest.raises(JoinError, match="no report"):
            _ = join.report
        with join:
            pass
        data = join.report.to_dict()
        assert [row["rank"] for row in data["ranks"]] == [0, 1]
        assert str(join.report).splitlines()[0].split()[:3] == ["rank", "steps", "shadowed"]

    run_threads(2, rank_main)


def test_report_needs_the_end_of_a_disabled_block_too() -> None:
    join = Join([Counter(SingleCollective())], enable=False)
    with join, pytest.raises(JoinError, match="no report"):
        _ = join.report
    assert join.report.ranks == ()
    with pytest.raises(ValueError, match="of the body"), join:
        raise ValueError("of the body")
    with pytest.raises(JoinError, match="no report"):
        _ = join.report


class RaisingHook(CounterHook):
    def post_hook(self, is_last_joiner: bool) -> None:
        raise KeyError("missing")


def test_post_hook_that_raises_leaves_the_group_in_step() -> None:
    def rank_main(collective: ThreadCollective) -> None:
        counter, other = Counter(collective), Counter(collective)
        counter.join_hook = lambda **kwargs: RaisingHook(counter)  # type: ignore[method-assign]
        with pytest.raises(KeyError), Join([counter, other]):
            if collective.rank == 0:
                counter()
                other()
        assert other.last_joiner is None  # nothing that communicates may follow on one rank alone
        assert other.reduce(1) == 2

    run_threads(2, rank_main)


def in_processes(rank: int) -> tuple[Any, ...]:
    counters = [Counter(collective_of(None)) for _ in range(3)]
    with Join(counters, sync_max_count=True) as join:
        for _ in range([2, 0, 5][rank]):
            for counter in counters:
                counter()
    return (
        [counter.total for counter in counters],
        [[work is not None for work in counter.works] for counter in counters],
        [counter.keywords for counter in counters],
        [counter.last_joiner for counter in counters],
        [row.shadowed for row in join.report.ranks],
    )


def test_joinables_of_ones_own_in_processes(pool: Pool) -> None:
    for rank, (totals, works, keywords, last, shadowed) in enumerate(pool.run(in_processes, ranks=3)):
        steps = [2, 0, 5][rank]
        assert totals == [7, 7, 7]
        assert works == [[True] * steps, [False] * steps, [False] * steps]
        assert keywords == [{"sync_max_count": True}] * 3
        assert last == [rank == 2] * 3
        assert shadowed == [3, 5, 0]
