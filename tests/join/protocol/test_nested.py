"""Blocks inside blocks on one process group, with thread ranks: each has settings and comparisons of its own."""

from __future__ import annotations

import threading

import pytest

from join import EarlyTerminationError, Join, JoinError, JoinTimeoutError, PeerError, ProtocolError
from join.collectives import ThreadCollective, run_threads
from tests.join.counter import Leading


def pair(collective: ThreadCollective) -> tuple[Leading, Leading]:
    return Leading(collective, "left"), Leading(collective, "right")


def test_a_rank_that_has_left_an_inner_block_has_data() -> None:
    def run(collective: ThreadCollective) -> tuple[str, int]:
        outer, inner = pair(collective)
        with Join([outer]) as join:
            with Join([inner]) as nested:
                for _ in nested.iterate([0]):
                    inner()
            progress = join.channel.progress()  # for the errors of ranks that wait for this one
        return progress.doing.partition(" (")[0], progress.loop

    assert run_threads(2, run) == [("has announced nothing", 1)] * 2  # the loop that has begun last, if it has ended


def test_an_inner_block_may_be_uneven_where_the_outer_one_throws() -> None:
    def run(collective: ThreadCollective) -> tuple[int, int]:
        outer, inner = pair(collective)
        with Join([outer], throw_on_early_termination=True):
            outer()
            with Join([inner]):
                for _ in range(collective.rank):
                    inner()
            outer()
        return outer.inner.total, inner.inner.total

    assert run_threads(3, run) == [(6, 3)] * 3


def test_an_inner_block_throws_where_the_outer_one_does_not() -> None:
    def run(collective: ThreadCollective) -> int:
        outer, inner = pair(collective)
        with pytest.raises(EarlyTerminationError), Join([outer]), Join([inner], throw_on_early_termination=True):
            for _ in range(1 + collective.rank):
                inner()
        return inner.inner.total

    assert run_threads(3, run) == [3] * 3


def test_an_inner_block_has_a_timeout_of_its_own() -> None:
    is_told = threading.Barrier(2, timeout=15)

    def run(collective: ThreadCollective) -> str:
        outer, inner = pair(collective)
        with pytest.raises(JoinTimeoutError) as caught, Join([outer]):
            outer()
            with Join([inner], timeout=0.5):
                if collective.rank == 1:
                    is_told.wait()
                inner()
        if collective.rank == 0:
            is_told.wait()
        return str(caught.value)

    for text in run_threads(2, run):
        assert "Ranks [1] announced no collective within timeout=0.5 s" in text


def test_an_inner_block_has_no_timeout_where_the_outer_one_has() -> None:
    def run(collective: ThreadCollective) -> list[float | None]:
        outer, inner = pair(collective)
        with Join([outer], timeout=60.0) as join:
            with Join([inner]):
                limits = [join.channel.guard.timeout]
                inner()
            limits.append(join.channel.guard.timeout)
        return limits

    assert run_threads(2, run) == [[None, 60.0]] * 2


def test_an_inner_block_compares_its_list_before_its_first_burst() -> None:
    """In a loop, its bursts send no header that would show the difference."""

    def run(collective: ThreadCollective) -> int:
        outer, (left, right) = Leading(collective), pair(collective)
        with pytest.raises(ProtocolError, match="with different objects or arguments"), Join([outer]) as join:
            for each in (left, right):
                with Join([each]):  # from here on, both lists are known
                    pass
            for _ in join.iterate([0]):
                mine = (left, right)[collective.rank]
                with Join([mine]):
                    mine()
        return left.inner.total + right.inner.total

    assert run_threads(2, run) == [0, 0]


def test_a_block_whose_lists_differ_announces_nothing_more() -> None:
    def run(collective: ThreadCollective) -> None:
        left, right = pair(collective)
        for each in (left, right):
            with Join([each]):
                pass
        mine = (left, right)[collective.rank]
        with pytest.raises(JoinError, match="The Join block has already ended"), Join([mine]):
            with pytest.raises(ProtocolError, match="with different objects or arguments"):
                mine()
            mine()

    run_threads(2, run)


class Copied(Leading):
    """Notes from which rank its state is copied."""

    source: int | None = None

    def exchange(self, source: int) -> None:
        self.source = source


def test_state_of_an_outer_block_is_copied_with_that_of_an_uneven_inner_one() -> None:
    """Its bursts were shadowed, too, and the outer block may end evenly."""

    def run(collective: ThreadCollective) -> tuple[int | None, int | None]:
        outer, inner = Copied(collective, "outer"), Copied(collective, "inner")
        with Join([outer]):
            with Join([inner]):
                for _ in range(collective.rank):
                    outer()
                    inner()
            return outer.source, inner.source

    assert run_threads(2, run) == [(1, 1)] * 2


def test_an_uneven_block_in_the_body_of_a_loop() -> None:
    def run(collective: ThreadCollective) -> str:
        outer, inner = pair(collective)
        with pytest.raises((ProtocolError, PeerError)) as caught, Join([outer]) as join:
            for _ in join.iterate([0, 0]):
                with Join([inner]):
                    for _ in range(1 + collective.rank):
                        inner()
        return str(caught.value)

    for text in run_threads(2, run):
        assert "Rank 0 skipped" in text and "in step 1 of join.iterate" in text, text


def test_an_even_block_in_the_body_of_a_loop() -> None:
    def run(collective: ThreadCollective) -> int:
        outer, inner = pair(collective)
        with Join([outer]) as join:
            for _ in join.iterate([0] * collective.rank):
                with Join([inner]):
                    inner()
                outer()
        return inner.inner.total

    assert run_threads(3, run) == [6] * 3  # two steps of three ranks


def test_after_a_block_that_was_opened_in_a_loop_the_block_around_it_is_plain() -> None:
    def run(collective: ThreadCollective) -> tuple[list[bool], str]:
        outer, inner = pair(collective)
        opened: Join | None = None
        with Join([outer]) as join:
            for _ in join.iterate([1, 2][collective.rank :]):
                opened = opened or Join([inner]).open()
            assert opened is not None
            opened.close()
            outer()
            return [join.shadowing, opened.shadowing], join.channel.place.phase.name

    assert run_threads(2, run) == [([False, False], "PLAIN")] * 2


def test_a_loop_that_began_in_an_inner_block_goes_on_after_it() -> None:
    def run(collective: ThreadCollective) -> tuple[list[bool], list[bool], bool]:
        outer, inner = pair(collective)
        dummies, lasts = list[bool](), list[bool]()
        with Join([outer]) as join:
            opened = Join([inner]).open()
            for _ in join.iterate(range(2 + 2 * collective.rank)):
                opened.close()
                outer()
                dummies.append(join.shadowing)
                lasts.append(join.is_last_step)
        return dummies, lasts, join.report.even

    lasts = [False, False, False, True]
    assert run_threads(2, run) == [([False, False, True, True], lasts, False), ([False] * 4, lasts, False)]
