"""Ranks that leave a loop in lockstep at any step, whatever the body does in it: an error for all, and nobody hangs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from join import Join
from join.collectives import SingleCollective, ThreadCollective, run_threads
from join.lockstep import MEETING, LockstepChannel, Note
from tests.join.counter import Leading, group_works
from tests.join.without_notes import WithoutNotes

SOAK = int(os.environ.get("SOAK", "0"))


def test_a_note_is_no_longer_than_a_line_takes() -> None:
    for flags in [(), (True,) * 16, (True,) * 60]:
        assert 0 < Note(1000, flags).packed(10**8) < 1 << 52
    assert Note(MEETING).packed(1 << 20) > 0


@pytest.mark.parametrize("steps", [1, 5000, 1 << 19, 1 << 20, (7 << 20) + 3])
def test_the_step_of_a_note_is_the_nearest_to_ones_own(steps: int) -> None:
    channel = LockstepChannel(SingleCollective())
    channel.steps = steps
    for step in range(max(steps - 3, 0), steps + 4):
        assert channel.unpacked(Note(3).packed(step)) == (Note(3), step)
        assert channel.unpacked(Note(3, ()).packed(step)) == (Note(3, ()), step)


@st.composite
def loops(draw: st.DrawFn) -> dict[str, Any]:
    """A loop: which bursts its body runs in each step, and where ranks leave it: by step, place among them and way.

    Where ranks keep no notes, every n-th step runs the same, and nobody leaves before one has shown it.
    """
    notes = draw(st.booleans())
    counts = draw(st.lists(st.integers(0, 7), min_size=2, max_size=4))
    options = draw(st.sampled_from([{}, {"steps": "loader"}, {"timeout": 20}]))
    every = draw(st.integers(0, 1 if "timeout" in options else 4))
    leaves = st.one_of(st.none(), st.integers(0 if notes else max(every, 1), 7))
    together = draw(st.booleans())
    usual = draw(st.sampled_from([[0], [0, 1]]))
    bursts = [usual if every and (step + 1) % every == 0 else [] for step in range(7)]
    if notes and draw(st.booleans()):
        bursts = draw(st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=7, max_size=7))
    return {
        "notes": notes,
        "counts": counts,
        "options": options,
        "bursts": bursts,
        "lookahead": draw(st.integers(1, 4)),
        "leaves": [draw(leaves)] * len(counts) if together else [draw(leaves) for _ in counts],
        "raises": [draw(st.booleans()) for _ in counts],
        "place": draw(st.integers(0, 3)),
    }


def outcome(collective: ThreadCollective, loop: dict[str, Any]) -> str:
    rank, text = collective.rank, "fine"
    leading = [Leading(collective, "first"), Leading(collective, "second")]

    def leaves(step: int, place: int) -> bool:
        bursts = len(loop["bursts"][step])
        leaving = step == loop["leaves"][rank] and place == min(loop["place"], bursts)
        if leaving and loop["raises"][rank]:
            raise ValueError("enough")
        return leaving

    try:
        with Join(leading, **loop["options"]) as join:
            batches = [torch.ones(1)] * loop["counts"][rank]
            for step, _ in enumerate(join.iterate(batches, lookahead=loop["lookahead"])):
                if leaves(step, 0):
                    break
                for place, burst in enumerate(loop["bursts"][step], 1):
                    leading[burst]()
                    if leaves(step, place):
                        break
                else:
                    continue
                break
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    group_works(collective)
    return text


@pytest.mark.timeout(300 + 5 * SOAK)
@settings(max_examples=SOAK or 60, derandomize=not SOAK, deadline=None)
@given(loops())
def test_leaving_at_any_step(loop: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Without notes it is always waited for; with them, as long as nobody notes anything.
        patch.setattr("join.early_exit._GRACE_SECONDS", 2.0 if loop["notes"] else 0.1)
        if not loop["notes"]:
            patch.setattr("join.collectives.threads._ThreadLine", WithoutNotes)
        told = run_threads(len(loop["counts"]), lambda collective: outcome(collective, loop))
    steps = max(loop["counts"])
    leaves = [at if at is not None and at < steps else None for at in loop["leaves"]]
    if set(leaves) == {None} or (len(set(leaves)) == 1 and not any(loop["raises"])):
        assert told == ["fine"] * len(told)
        return
    for text, raises in zip(told, loop["raises"], strict=True):
        own = ("ValueError: enough", "JoinError: rank ") if raises else ()  # the latter on an empty dummy
        assert text.startswith(("PeerError: rank ", "ProtocolError: ranks ", *own))
