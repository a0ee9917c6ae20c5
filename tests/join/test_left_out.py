"""A rank leaves a burst out of a step of a loop and goes on, so that its next ones meet the last ones of the others."""

from __future__ import annotations

import pytest

from join import Join, JoinError
from join.collectives import ThreadCollective, run_threads
from tests.join.counter import Leading, group_works
from tests.join.without_notes import WithoutNotes

STEPS = 8
BURSTS = [0, 1, 1]


def outcome(collective: ThreadCollective, runs: list[int], step: int, lookahead: int) -> tuple[int, str]:
    """Rank 1 runs other bursts in a step than all ranks in all others.

    Returns:
        How many steps this rank has ended, and what it is told.
    """
    leading = [Leading(collective, "first"), Leading(collective, "second")]
    ended, text = 0, "fine"
    try:
        with Join(leading) as join:
            for at, _ in enumerate(join.iterate([0] * (STEPS - 4 * collective.rank), lookahead=lookahead)):
                for burst in runs if collective.rank == 1 and at == step else BURSTS:
                    leading[burst]()
                ended += 1
    except JoinError as error:
        text = f"{type(error).__name__}: {error}"
    group_works(collective)
    return ended, text


@pytest.fixture(params=[True, False], ids=["notes", "no notes"])
def notes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ranks keep notes."""
    if not request.param:
        monkeypatch.setattr("join.collectives.threads._ThreadLine", WithoutNotes)
        monkeypatch.setattr("join.early_exit._GRACE_SECONDS", 0.1)
    return request.param


@pytest.mark.parametrize("runs", [[], [0, 1]])
@pytest.mark.parametrize(("step", "lookahead"), [(0, 1), (2, 1), (3, 2), (4, 1), (6, 1)])
def test_the_rank_is_told_before_others_are_missed(notes: bool, runs: list[int], step: int, lookahead: int) -> None:
    """With notes when it begins its next burst, else when it has run the bursts of another step."""
    (_, zero), (ended, one), (_, two) = run_threads(3, lambda collective: outcome(collective, runs, step, lookahead))
    if notes:
        assert ended == step + 1
        where = f"{'second' if runs else 'first'} out of step {step + 1}"
    else:
        assert ended == (step // lookahead + 2) * lookahead
        steps = f"step {step + 1}" if lookahead == 1 else f"steps {step} to {step + 1}"
        where = f"{'something' if runs else 'first, second'} out of {steps}"
    assert one.startswith(f"ProtocolError: rank 1 left {where} of join.iterate, and rank ")
    assert zero == two == f"PeerError: rank 1 failed: {one}"


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_rank_that_runs_more(step: int) -> None:
    zero, one, two = (
        text for _, text in run_threads(3, lambda collective: outcome(collective, [*BURSTS, 1], step, lookahead=1))
    )
    for text in (zero, one, two):
        assert text.startswith(("ProtocolError: rank ", "PeerError: rank "))
        assert f" out of step {step + 1} of join.iterate, and rank " in text  # 1, or 0 that was told by then
