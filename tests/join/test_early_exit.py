"""Ranks that leave a loop in lockstep at any step, whatever the body does in it: an error for all, and nobody hangs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from join import Join
from join.collectives import ThreadCollective, run_threads
from tests.join.counter import Leading, group_works

SOAK = int(os.environ.get("SOAK", "0"))


@st.composite
def loops(draw: st.DrawFn) -> dict[str, Any]:
    """A loop whose body runs its bursts in every n-th step, and where ranks leave it: by step, place and way."""
    counts = draw(st.lists(st.integers(0, 7), min_size=2, max_size=4))
    options = draw(st.sampled_from([{}, {"steps": "loader"}, {"timeout": 20}]))
    every = draw(st.integers(0, 1 if "timeout" in options else 4))
    # Before a step has shown its bursts, nobody knows which they are.
    leaves = st.one_of(st.none(), st.integers(max(every, 1), 7))
    together = draw(st.booleans())
    return {
        "counts": counts,
        "options": options,
        "every": every,
        "both": draw(st.booleans()),
        "lookahead": draw(st.integers(1, 4)),
        "leaves": [draw(leaves)] * len(counts) if together else [draw(leaves) for _ in counts],
        "raises": [draw(st.booleans()) for _ in counts],
        "place": draw(st.sampled_from(["before", "between", "after"])),
    }


def outcome(collective: ThreadCollective, loop: dict[str, Any]) -> str:
    rank, text = collective.rank, "fine"
    first, second = Leading(collective, "first"), Leading(collective, "second")

    def leaves(step: int, place: str) -> bool:
        leaving = (step, place) == (loop["leaves"][rank], loop["place"])
        if leaving and loop["raises"][rank]:
            raise ValueError("enough")
        return leaving

    try:
        with Join([first, second], **loop["options"]) as join:
            batches = [torch.ones(1)] * loop["counts"][rank]
            for step, _ in enumerate(join.iterate(batches, lookahead=loop["lookahead"])):
                has_bursts = loop["every"] and (step + 1) % loop["every"] == 0
                if leaves(step, "before"):
                    break
                if has_bursts:
                    first()
                if leaves(step, "between"):
                    break
                if has_bursts and loop["both"]:
                    second()
                if leaves(step, "after"):
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
        patch.setattr("join.early_exit._GRACE_SECONDS", 0.1)
        told = run_threads(len(loop["counts"]), lambda collective: outcome(collective, loop))
    steps = max(loop["counts"])
    leaves = [at if at is not None and at < steps else None for at in loop["leaves"]]
    if set(leaves) == {None} or (len(set(leaves)) == 1 and not any(loop["raises"])):
        assert told == ["fine"] * len(told)
        return
    for text, raises in zip(told, loop["raises"], strict=True):
        own = ("ValueError: enough", "JoinError: rank ") if raises else ()  # the latter on an empty dummy
        assert text.startswith(("PeerError: rank ", "ProtocolError: ranks ", *own))
