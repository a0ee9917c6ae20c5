"""Declared numbers of steps: no header, and wrong declarations are errors on all ranks and no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from join import EarlyTerminationError, Join, JoinError, PeerError, ProtocolError
from join.collectives import ThreadCollective, run_threads
from tests.join.counter import Counter, Leading


def outcome(collective: ThreadCollective, declared: list[int], made: list[int], fail_at: int | None = None) -> Any:
    """What rank 1 raises at ``fail_at``, everybody else's error, and that the group works afterwards."""
    counter, follower = Counter(collective), Counter(collective)
    rank, text = collective.rank, "fine"
    try:
        with Join([counter, follower], steps=declared[rank]):
            for step in range(made[rank]):
                if rank == 1 and step == fail_at:
                    raise KeyError("here")
                counter()
                follower()
    except (KeyError, JoinError) as error:
        text = f"{type(error).__name__}: {error}"
    ones = torch.ones(1)
    collective.all_reduce(ones).wait()
    assert ones.item() == collective.world_size
    return counter.total, follower.total, text


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_totals(steps: list[int]) -> None:
    for first, second, text in run_threads(len(steps), lambda collective: outcome(collective, steps, steps)):
        assert (first, second, text) == (sum(steps), sum(steps), "fine")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([2, 3, 0], "ProtocolError: rank 1 declared steps=4 and made 3"),
        ([2, 5, 0], "ProtocolError: rank 1 declared steps=4 and began step 5"),
        ([3, 4, 0], "ProtocolError: rank 0 declared steps=2 and began step 3"),
        ([2, 4, 1], "ProtocolError: rank 2 declared steps=0 and began step 1"),
        ([0, 0, 0], "ProtocolError: rank 0 declared steps=2 and made 0; rank 1 declared steps=4 and made 0"),
    ],
)
def test_wrong_declarations(made: list[int], text: str) -> None:
    for _, _, told in run_threads(3, lambda collective: outcome(collective, [2, 4, 0], made)):
        assert told == text


def test_a_rank_that_raises() -> None:
    first, second, third = run_threads(3, lambda collective: outcome(collective, [2, 4, 5], [2, 4, 5], fail_at=2))
    assert first[2] == third[2] == "PeerError: rank 1 failed: KeyError: 'here'"
    assert second[2] == "KeyError: 'here'"


def test_bursts_in_another_order() -> None:
    def run(collective: ThreadCollective) -> str:
        one, two = Leading(collective, "one"), Leading(collective, "two")
        with pytest.raises((ProtocolError, PeerError)) as caught, Join([one, two], steps=2):
            for step in range(2):
                one()
                if collective.rank != 1 or step == 0:
                    two()
        return str(caught.value)

    for text in run_threads(3, run):
        assert text == "rank 1 declared steps=2 and made 1 and 1 of 2 parts of another"


def test_a_burst_out_of_turn() -> None:
    def run(collective: ThreadCollective) -> str:
        one, two = Leading(collective, "one"), Leading(collective, "two")
        with pytest.raises(ProtocolError) as caught, Join([one, two], steps=1):
            for burst in (two, one) if collective.rank == 1 else (one, two):
                burst()
        return str(caught.value)

    for text in run_threads(3, run):
        assert text.startswith("rank 1 ran two in step 1 where one was due; with steps=, each step runs")


def test_early_termination() -> None:
    def run(collective: ThreadCollective) -> tuple[int, str]:
        counter = Counter(collective)
        steps = [4, 2, 3][collective.rank]
        with (
            pytest.raises(EarlyTerminationError) as caught,
            Join([counter], throw_on_early_termination=True, steps=steps),
        ):
            for _ in range(steps):
                counter()
        return counter.total, str(caught.value)

    detected = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    assert run_threads(3, run) == [(6, detected), (6, "Rank 1 exhausted all inputs."), (6, detected)]


def test_bad_declarations() -> None:
    def run(collective: ThreadCollective) -> None:
        for steps, kind in ((-1, ValueError), (1.5, TypeError), ("loaders", TypeError), (True, TypeError)):
            with pytest.raises(kind, match="steps="):
                Join([Counter(collective)], steps=steps)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"timeout=2 watches headers, which steps=3 does without"):
            Join([Counter(collective)], steps=3, timeout=2)
        with Join([Counter(collective)]), pytest.raises(JoinError, match="another is open"):
            Join([Counter(collective)], steps=0).__enter__()
        with Join([Counter(collective)], steps=0), pytest.raises(JoinError, match="a block with steps= is open"):
            Join([Counter(collective)]).__enter__()

    run_threads(1, run)


def test_declared_on_some_ranks_only() -> None:
    def run(collective: ThreadCollective) -> None:
        with pytest.raises(ProtocolError, match="steps='declared'"):
            Join([Counter(collective)], steps=collective.rank or None).__enter__()

    run_threads(2, run)
