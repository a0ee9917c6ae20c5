"""Declared numbers of steps: no header, and wrong declarations are errors on all ranks and no hang."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from join import EarlyTerminationError, Join, JoinError, PeerError, ProtocolError
from join.collectives import ThreadCollective, run_threads
from tests.join.counter import Counter, Leading, blames


def outcome(collective: ThreadCollective, declared: list[int], made: list[int], fail_at: int | None = None) -> Any:
    """What rank 1 raises at ``fail_at``, or everybody's error."""
    counter, follower = Counter(collective), Counter(collective)
    rank, text, usable = collective.rank, "fine", True
    try:
        with Join([counter, follower], steps=declared[rank]):
            for step in range(made[rank]):
                if rank == 1 and step == fail_at:
                    raise KeyError("here")
                counter()
                follower()
    except (KeyError, JoinError) as error:
        text = f"{type(error).__name__}: {error}"
        usable = getattr(error, "group_is_usable", False)
    assert usable is (text == "fine")
    return counter.total, follower.total, text


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_totals(steps: list[int]) -> None:
    for first, second, text in run_threads(len(steps), lambda collective: outcome(collective, steps, steps)):
        assert (first, second, text) == (sum(steps), sum(steps), "fine")


@pytest.mark.parametrize(
    ("made", "wrong", "text"),
    [
        ([2, 3, 0], 1, "ProtocolError: rank 1 declared steps=4 and made 3"),
        ([2, 5, 0], 1, "ProtocolError: rank 1 declared steps=4 and began step 5"),
        ([3, 4, 0], 0, "ProtocolError: rank 0 declared steps=2 and began step 3"),
        ([2, 4, 1], 2, "ProtocolError: rank 2 declared steps=0 and began step 1"),
    ],
)
def test_wrong_declarations(made: list[int], wrong: int, text: str) -> None:
    for rank, (_, _, told) in enumerate(run_threads(3, lambda collective: outcome(collective, [2, 4, 0], made))):
        assert told.startswith(f"{text}; ") if rank == wrong else blames(told, wrong, text)


def test_several_wrong_declarations() -> None:
    zero, one, two = (told for _, _, told in run_threads(3, lambda each: outcome(each, [2, 4, 0], [0, 0, 0])))
    assert zero.startswith("ProtocolError: rank 0 declared steps=2 and made 0; ")
    assert one.startswith("ProtocolError: rank 1 declared steps=4 and made 0; ")
    assert two.startswith("PeerError: rank ")


def test_a_rank_that_raises() -> None:
    first, second, third = run_threads(3, lambda collective: outcome(collective, [2, 4, 5], [2, 4, 5], fail_at=2))
    assert blames(first[2], 1, "KeyError: 'here'") and blames(third[2], 1, "KeyError: 'here'")
    assert second[2] == "KeyError: 'here'"


def told(collective: ThreadCollective, runs: Any, steps: int) -> str:
    """What a rank is told where ``runs`` says which of two bursts it runs."""
    bursts = [Leading(collective, "one"), Leading(collective, "two")]
    with pytest.raises((ProtocolError, PeerError)) as caught, Join(bursts, steps=steps):
        for burst in runs(collective.rank):
            bursts[burst]()
    return f"{caught.type.__name__}: {caught.value}"


def test_bursts_in_another_order() -> None:
    zero, one, two = run_threads(3, lambda each: told(each, lambda rank: [0, 1, 0, 1][: 4 - (rank == 1)], 2))
    assert one.startswith("ProtocolError: rank 1 declared steps=2 and made 1 and 1 of 2 parts of another; ")
    assert blames(zero, 1, one) and blames(two, 1, one)


def test_a_burst_out_of_turn() -> None:
    zero, one, two = run_threads(3, lambda each: told(each, lambda rank: (1, 0) if rank == 1 else (0, 1), 1))
    assert one.startswith("ProtocolError: rank 1 ran two in step 1 where one was due; with steps=, each step runs")
    assert blames(zero, 1, one) and blames(two, 1, one)


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
