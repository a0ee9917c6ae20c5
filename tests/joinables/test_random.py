"""Random models, trained in random ways on random numbers of batches: always what one process gets, never a hang.

``make soak`` draws hundreds of them, other ones each time. It prints a case that failed: make it an ``@example`` below,
and leave it there once it is mended.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.grammar import Recipe, recipes
from tests.pool import Pool
from tests.training import Case, check

SOAK = int(os.environ.get("SOAK", "0"))
HANG_SECONDS = 20.0
SHRINK_SECONDS = 120.0
"""From the first failure on: a rank that failed costs seconds, and one that hangs costs more."""

failures: dict[str, AssertionError] = {}
first_failure: list[float] = []


@st.composite
def counts(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Numbers of batches by epoch and rank; mostly a rank has none somewhere."""
    ranks = draw(st.integers(2, 3))
    epoch = st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks)
    epochs = draw(st.lists(epoch, min_size=1, max_size=2))
    if draw(st.integers(0, 4)):
        draw(st.sampled_from(epochs))[draw(st.integers(0, ranks - 1))] = 0
    return tuple(map(tuple, epochs))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    recipe = draw(recipes())
    ddp: dict[str, Any] = {}
    if recipe.has("branch") or (recipe.has("unused") and draw(st.booleans())):
        ddp["find_unused_parameters"] = True
    elif recipe.has("unused") or draw(st.booleans()):
        ddp["static_graph"] = True
    if draw(st.booleans()):
        ddp["bucket_cap_mb"] = draw(st.sampled_from([1e-5, 3e-4]))
    if draw(st.booleans()):
        ddp["gradient_as_bucket_view"] = True
    case = Case(
        model=recipe,
        optimizer=draw(st.sampled_from(["sgd", "adam", "adamw"])),
        rate=0.01,
        zero=draw(st.booleans()),
        zero_views=draw(st.booleans()),
        initial=draw(st.booleans()),
        clip=draw(st.booleans()),
        accumulate=draw(st.integers(1, 3)),
        hook=draw(st.sampled_from(["", "", "allreduce"])),
        ddp=ddp,
        counts=draw(counts()),
        to_none=draw(st.booleans()),
        zero_every=draw(st.sampled_from([1, 1, 2, 3])),
        weighted=draw(st.booleans()),
        declared=draw(st.booleans()),
        iterate=draw(st.sampled_from(["", "empty", "last"])),
        lookahead=draw(st.integers(1, 3)),
        until=draw(st.sampled_from(["all", "all", "first"])),
        stop=draw(st.sampled_from([None, None, 1, 2, 3])),
        one_block=draw(st.booleans()),
        plain_last=draw(st.booleans()),
        forwards=draw(st.integers(1, 2)),
        evaluates=draw(st.booleans()),
    )
    return legal(case, has_buffers=recipe.has("batch norm"))


def legal(case: Case, *, has_buffers: bool) -> Case:
    """The case without what cannot be together."""
    if not case.iterate:
        case = replace(case, lookahead=1, until="all", stop=None, one_block=False, plain_last=False)
    if case.declared:
        case = replace(case, plain_last=False)
    if not case.zero:
        case = replace(case, zero_views=False)
    if case.plain_last:
        # What the loop before left unreduced, a rank without data would not zero, and contribute.
        case = replace(case, accumulate=1)
    if case.one_block and case.accumulate > 1:
        case = replace(case, to_none=True)  # only so can all ranks know that what was left is gone
    if case.clip:
        case = replace(case, zero_every=1)  # a rank without data does not clip what it keeps
    if "static_graph" in case.ddp:
        case = replace(case, accumulate=1)  # torch itself fails where the first backward is under no_sync
    if case.zero and "find_unused_parameters" in case.ddp:
        case = replace(case, to_none=True, zero_every=1)
    if case.declared and not case.iterate and case.initial:
        case = replace(case, to_none=True, zero_every=1)
    if has_buffers:
        # Ranks whose inputs are even end with buffers of their own, and under accumulation the first leader must last.
        epochs = [list(epoch) for epoch in case.counts]
        for epoch in epochs if case.accumulate > 1 else epochs[-1:]:
            epoch[0] = max(-(-max(epoch) // case.accumulate), 1) * case.accumulate
        epochs[-1][-1] = 0
        # In a plain loop after another, buffers are those of the rank that led there, and not of the lowest.
        case = replace(case, plain_last=case.plain_last and len(case.counts) == 1)
        stop = case.stop if case.accumulate == 1 else None
        case = replace(case, counts=tuple(map(tuple, epochs)), until="all", stop=stop)
    return case


MODEL = Recipe((("linear",),))
BRANCHES = Recipe((("linear",), ("branch", 1, (("linear",),), (("linear",),))))
FOUND = {
    "kept gradients that nobody uses, weights": Case(
        model=BRANCHES, weighted=True, zero_every=3, ddp={"find_unused_parameters": True}, counts=((3, 0),)
    ),
    "kept gradients that nobody uses, dummies": Case(
        model=BRANCHES, iterate="last", zero_every=3, ddp={"find_unused_parameters": True}, counts=((3, 0),)
    ),
    "left at the end of a loop, and zeroed": Case(
        model=MODEL, optimizer="sgd", iterate="empty", one_block=True, accumulate=2, counts=((2, 5), (6, 0))
    ),
    "left at the end of a loop, and zeroed, weights": Case(
        model=MODEL, optimizer="sgd", iterate="last", one_block=True, accumulate=3, weighted=True,
        counts=((5, 0), (4, 2)),
    ),
    "left at the end of a loop on top of kept ones": Case(
        model=MODEL, optimizer="sgd", iterate="last", one_block=True, accumulate=3, zero_every=2, initial=True,
        counts=((3, 5), (1, 5)),
    ),
    "left at the end of a loop, parameters that nobody uses": Case(
        model=BRANCHES, iterate="last", one_block=True, accumulate=2, ddp={"find_unused_parameters": True},
        counts=((3, 0), (4, 0)),
    ),
    "a path that only a dummy takes, in a window with data": Case(
        model=BRANCHES, optimizer="sgd", iterate="empty", accumulate=2, ddp={"find_unused_parameters": True},
        counts=((4, 3),),
    ),
    "a plain loop after a break, weights": Case(
        model=MODEL, iterate="last", one_block=True, plain_last=True, stop=3, weighted=True, initial=True,
        counts=((5, 2, 3), (0, 5, 3)),
    ),
    "buffers of a rank that comes back": Case(
        model=Recipe((("batch norm",),)), iterate="empty", one_block=True, counts=((0, 2, 0), (5, 1, 0))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(pool: Pool, name: str) -> None:
    check(pool, replace(FOUND[name], rate=0.01))


@pytest.mark.timeout(600 + 5 * SOAK)
@settings(
    max_examples=SOAK or 12,
    derandomize=not SOAK,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
@given(case=cases())
def test_equals_one_process(pool: Pool, case: Case) -> None:
    known = failures.get(repr(case))
    if known is not None:
        raise known
    if first_failure and time.monotonic() - first_failure[0] > SHRINK_SECONDS:
        return  # small enough
    try:
        check(pool, case, timeout=HANG_SECONDS)
    except AssertionError as error:
        first_failure.append(time.monotonic())
        failures[repr(case)] = error
        raise
