"""Random models, trained in random ways on random numbers of batches: always what one process gets, never a hang.

``make soak`` draws hundreds of them, other ones each time. It prints a case that failed: put it into ``FOUND`` below,
and leave it there once it is mended.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests.grammar import Chain, Leaf, Recipe, recipes
from tests.pool import Pool
from tests.training import Case, Sharded, check
from tests.versions import GATHERS_WHAT_IS_USED_AGAIN

CaseT = TypeVar("CaseT", bound=Case)

SOAK = int(os.environ.get("SOAK", "0"))
HANG_SECONDS = 60.0
"""For a training that takes less than one, where the machine has much else to do."""
SHRINK_SECONDS = 120.0
"""From the first failure on: a rank that failed costs seconds, and one that hangs costs more."""

failures: dict[str, str] = {}
first_failure: dict[bool, float] = {}


@st.composite
def counts(draw: st.DrawFn, most: int = 3) -> tuple[tuple[int, ...], ...]:
    """Numbers of batches by epoch and rank, of which there are at most ``most``; mostly a rank has none somewhere."""
    ranks = draw(st.integers(2, most))
    epoch = st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks)
    epochs = draw(st.lists(epoch, min_size=1, max_size=2))
    if draw(st.integers(0, 4)):
        draw(st.sampled_from(epochs))[draw(st.integers(0, ranks - 1))] = 0
    return tuple(map(tuple, epochs))


@st.composite
def cases(draw: st.DrawFn, *, replay: bool = False) -> Case:
    recipe = draw(recipes(branches=not replay))  # a branch that is replayed counts as used
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
        zero=draw(st.booleans()),
        zero_views=draw(st.booleans()),
        hook=draw(st.sampled_from(["", "", "allreduce"])),
        ddp=ddp,
        counts=draw(counts()),
        replay=replay,
        synchronised=replay and recipe.has("batch norm") and draw(st.booleans()),
        **draw(LOOPS),
    )
    return legal(case, has_buffers=recipe.has("batch norm"))


@st.composite
def sharded(draw: st.DrawFn) -> Sharded:
    # Not branches: ranks that take different ones would issue different collectives, also without Join.
    recipe = draw(recipes(branches=False))
    assume(GATHERS_WHAT_IS_USED_AGAIN or not (recipe.has("again") and recipe.has("checkpoint")))
    # What is shared by two parts must be a part itself.
    parts = [(Leaf,), (Leaf, Chain)] if recipe.has("again") else [(), (Leaf,), (Chain,), (Leaf, Chain)]
    case = Sharded(
        model=recipe,
        replicas=draw(st.integers(1, 2)),
        reshard=draw(st.sampled_from([None, True, False])),
        units=draw(st.sampled_from(parts)),
        syncs=draw(st.sampled_from(["reduces when it steps", "reduces each time", "all-reduces when it steps"])),
        counts=draw(counts(most=4)),
        synchronised=recipe.has("batch norm") and draw(st.booleans()),
        **draw(LOOPS),
    )
    return legal_sharded(case)


LOOPS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "optimizer": st.sampled_from(["sgd", "adam", "adamw"]),
        "rate": st.just(0.01),
        "initial": st.booleans(),
        "clip": st.booleans(),
        "accumulate": st.integers(1, 3),
        "to_none": st.booleans(),
        "zero_every": st.sampled_from([1, 1, 2, 3]),
        "weighted": st.booleans(),
        "declared": st.booleans(),
        "iterate": st.sampled_from(["", "empty", "last"]),
        "lookahead": st.integers(1, 3),
        "until": st.sampled_from(["all", "all", "first"]),
        "stop": st.sampled_from([None, None, 1, 2, 3]),
        "one_block": st.booleans(),
        "plain_last": st.booleans(),
        "forwards": st.integers(1, 2),
        "evaluates": st.booleans(),
    }
)


def legal_loop(case: CaseT) -> CaseT:
    """The case without what cannot be together in a loop, whatever the module."""
    if not case.iterate:
        case = replace(case, lookahead=1, until="all", stop=None, one_block=False, plain_last=False)
    return replace(case, plain_last=False) if case.declared else case


def legal_declared(case: CaseT) -> CaseT:
    """The case without what cannot be declared of a module that is replayed."""
    if case.declared and not case.iterate:
        # A step is one forward, one backward and one optimizer step.
        case = replace(case, accumulate=1, forwards=1, evaluates=False, to_none=True, zero_every=1)
    return case


def legal_synchronised(case: CaseT) -> CaseT:
    """The case without what cannot be together where ranks compute together."""
    if case.synchronised:
        case = replace(case, weighted=False, iterate="empty" if case.iterate else "")
    return case


def with_full_windows(case: CaseT) -> CaseT:
    """The case with numbers of batches that leave no window of accumulation open."""
    k = case.accumulate
    if k == 1:
        return case
    epochs = [[min(count, max(epoch) - max(epoch) % k) for count in epoch] for epoch in case.counts]
    if case.until == "first":
        epochs = [[count - count % k for count in epoch] for epoch in epochs]
    return replace(case, stop=None if case.stop is None else k, counts=tuple(map(tuple, epochs)))


def legal_sharded(case: Sharded) -> Sharded:
    """The case without what cannot be together where ranks without data replay."""
    case = legal_loop(case)
    if case.ranks % 2:
        case = replace(case, replicas=1)
    if case.replicas == 1 and case.syncs == "all-reduces when it steps":
        case = replace(case, syncs="reduces when it steps")
    case = legal_synchronised(legal_declared(case))
    k = case.accumulate
    if k > 1 and case.syncs == "reduces each time":
        # The mean over a window is not the mean of means, but where all are over as many.
        full = tuple(tuple(count - count % k for count in epoch) for epoch in case.counts)
        case = replace(case, weighted=False, counts=full)
    return with_full_windows(case)  # FSDP keeps what it has not reduced yet, whatever becomes of ``grad``


def legal(case: Case, *, has_buffers: bool) -> Case:
    """The case without what cannot be together."""
    case = legal_loop(case)
    if case.replay:
        # Ranks may compute together: they cannot weigh, and the mean is made of all that is in ``grad``.
        case = replace(legal_synchronised(legal_declared(case)), weighted=False, zero_every=1)
    if case.synchronised:
        case = with_full_windows(case)  # forwards of the others count for buffers
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
    if has_buffers and not case.synchronised:
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
FOUND: dict[str, Case] = {
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
    "kept gradients of a rank whose shards have no rows": Sharded(
        model=Recipe((), entry="embedding"), units=(), accumulate=2, syncs="reduces each time", counts=((0, 0, 0, 4),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(pool: Pool, name: str) -> None:
    check(pool, replace(FOUND[name], rate=0.01))


few_or_many = settings(
    max_examples=SOAK or 8,
    derandomize=not SOAK,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


def check_once(pool: Pool, case: Case) -> None:
    """Check a case that was not found to fail yet, while there is time for it."""
    replays = case.replay or isinstance(case, Sharded)
    known = failures.get(repr(case))
    if known is not None:
        raise AssertionError(known)
    if time.monotonic() - first_failure.get(replays, math.inf) > SHRINK_SECONDS:
        return  # small enough
    try:
        check(pool, case, timeout=HANG_SECONDS)
    except AssertionError as error:
        first_failure.setdefault(replays, time.monotonic())
        failures[repr(case)] = str(error)
        raise


@pytest.mark.timeout(600 + 5 * SOAK)
@few_or_many
@given(case=cases())
def test_equals_one_process(pool: Pool, case: Case) -> None:
    check_once(pool, case)


@pytest.mark.timeout(600 + 5 * SOAK)
@few_or_many
@given(case=st.one_of(sharded(), sharded(), cases(replay=True)))
def test_equals_one_process_where_ranks_without_data_replay(pool: Pool, case: Case) -> None:
    check_once(pool, case)
