"""Random models, trained in random ways on random numbers of batches: always what one process gets, never a hang.

``make soak`` draws hundreds of them, other ones each time. It prints a case that failed: put it into ``FOUND`` below,
and leave it there once it is mended.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests.grammar import Recipe, recipes
from tests.harness import ALL, Pool
from tests.training import DDP, Case, Data, Loop, Model, Optimizer, Shards, Step, check
from tests.versions import GATHERS_WHAT_IS_USED_AGAIN

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
def cases(draw: st.DrawFn) -> Case:
    recipe = draw(recipes())
    options: dict[str, Any] = {}
    if recipe.has("branch") or (recipe.has("unused") and draw(st.booleans())):
        options["find_unused_parameters"] = True
    elif recipe.has("unused") or draw(st.booleans()):
        options["static_graph"] = True
    if draw(st.booleans()):
        options["bucket_cap_mb"] = draw(st.sampled_from([1e-5, 3e-4]))
    if draw(st.booleans()):
        options["gradient_as_bucket_view"] = True
    zero = draw(st.booleans())
    # DDP itself looks for the parameters behind outputs, or learns its graph there.
    hidden = options.keys().isdisjoint({"find_unused_parameters", "static_graph"}) and draw(st.booleans())
    case = Case(
        Model(recipe, hidden=hidden),
        DDP(options, hook=draw(st.sampled_from(["", "", "allreduce"]))),
        Optimizer(
            draw(OPTIMIZERS if zero else st.one_of(OPTIMIZERS, st.just("own attributes"))),
            RATE,
            zero=zero,
            zero_views=zero and draw(st.booleans()),
        ),
        Data(draw(counts()), weighted=draw(st.booleans())),
        draw(LOOPS),
        draw(STEPS),
    )
    return legal(case, has_buffers=recipe.has("batch norm"))


@st.composite
def sharded(draw: st.DrawFn) -> Case:
    # Not branches: ranks that take different ones would issue different collectives, also without Join.
    recipe = draw(recipes(branches=False))
    assume(GATHERS_WHAT_IS_USED_AGAIN or not (recipe.has("again") and recipe.has("checkpoint")))
    # What is shared by two parts must be a part itself.
    parts = [("Leaf",), ("Leaf", "Chain")] if recipe.has("again") else [(), ("Leaf",), ("Chain",), ("Leaf", "Chain")]
    data = Data(draw(counts(most=4)), weighted=draw(st.booleans()))
    replicas = 1 if data.ranks % 2 else draw(st.integers(1, 2))
    syncs = ["reduces when it steps", "reduces each time", *(["all-reduces when it steps"] if replicas > 1 else [])]
    case = Case(
        Model(recipe, synchronised=recipe.has("batch norm") and draw(st.booleans())),
        Shards(
            replicas,
            reshard=draw(st.sampled_from([None, True, False])),
            units=draw(st.sampled_from(parts)),
            syncs=draw(st.sampled_from(syncs)),
            divides=draw(st.booleans()),
        ),
        Optimizer(draw(OPTIMIZERS), RATE),
        data,
        draw(LOOPS),
        draw(STEPS),
    )
    return legal_sharded(case)


RATE = 0.01
OPTIMIZERS = st.sampled_from(["sgd", "adam", "adamw"])


def legal_loop(loop: Loop) -> Loop:
    """The loop without what cannot be together, whatever the module."""
    return loop if loop.iterate else Loop()


LOOPS = st.builds(
    Loop,
    iterate=st.sampled_from(["", "empty", "last"]),
    lookahead=st.integers(0, 3),
    until=st.sampled_from(["all", "all", "first"]),
    stop=st.sampled_from([None, None, 1, 2, 3]),
    one_block=st.booleans(),
    plain_last=st.booleans(),
).map(legal_loop)
STEPS = st.builds(
    Step,
    initial=st.booleans(),
    accumulate=st.integers(1, 3),
    to_none=st.booleans(),
    zero_every=st.sampled_from([1, 1, 2, 3]),
    clip=st.booleans(),
    forwards=st.integers(1, 2),
    evaluates=st.booleans(),
    draws=st.booleans(),
)


def with_full_windows(case: Case) -> Case:
    """The case with numbers of batches that leave no window of accumulation open."""
    k = case.step.accumulate
    if k == 1:
        return case
    epochs = [[min(count, max(epoch) - max(epoch) % k) for count in epoch] for epoch in case.data.counts]
    if case.loop.until == "first":
        epochs = [[count - count % k for count in epoch] for epoch in epochs]
    loop = replace(case.loop, stop=None if case.loop.stop is None else k)
    return replace(case, loop=loop, data=replace(case.data, counts=tuple(map(tuple, epochs))))


def without_windows(case: Case) -> Case:
    """The case with no window of accumulation in a loop that reads nothing ahead."""
    if case.step.accumulate == 1 or case.loop.lookahead or not case.loop.iterate:
        return case
    return replace(case, loop=replace(case.loop, lookahead=1))


def legal_sharded(case: Case) -> Case:
    """The case over ``join.iterate``, without what cannot be together there."""
    shards = case.wrapper
    assert isinstance(shards, Shards)
    case = replace(case, loop=replace(case.loop, iterate=case.loop.iterate or "empty", plain_last=False))
    case = without_windows(case)
    if case.model.synchronised:
        case = replace(case, data=replace(case.data, weighted=False), loop=replace(case.loop, iterate="empty"))
    k = case.step.accumulate
    if k > 1 and shards.syncs == "reduces each time":
        # The mean over a window is not the mean of means, but where all are over as many.
        full = tuple(tuple(count - count % k for count in epoch) for epoch in case.data.counts)
        case = replace(case, data=Data(full))
    return with_full_windows(case)  # FSDP keeps what it has not reduced yet, whatever becomes of ``grad``


def legal(case: Case, *, has_buffers: bool) -> Case:
    """The case without what cannot be together."""
    ddp = case.wrapper
    assert isinstance(ddp, DDP)
    case = replace(case, step=legal_step(case.step, case.loop, ddp, zero=case.optimizer.zero))
    case = without_windows(case)
    if case.step.draws:  # no rank knows which of the last ones draws for a window that it leaves open
        case = with_full_windows(case)
    if case.loop.stop is not None:  # a loop is left between windows
        case = replace(case, loop=replace(case.loop, stop=case.loop.stop * case.step.accumulate))
    if has_buffers:
        data, loop = legal_for_buffers(case.data, case.loop, case.step.accumulate)
        case = replace(case, data=data, loop=loop)
    return case


def legal_step(step: Step, loop: Loop, ddp: DDP, *, zero: bool) -> Step:
    """The step without what cannot be in such a loop, over a module in such a DDP."""
    if loop.plain_last:
        # What the loop before left unreduced, a rank without data would not zero, and contribute.
        step = replace(step, accumulate=1)
    if loop.one_block and step.accumulate > 1:
        step = replace(step, to_none=True)  # only so can all ranks know that what was left is gone
    if step.clip:
        step = replace(step, zero_every=1)  # a rank without data does not clip what it keeps
    if "static_graph" in ddp.options:
        step = replace(step, accumulate=1)  # torch itself fails where the first backward is under no_sync
    if zero and "find_unused_parameters" in ddp.options:
        step = replace(step, to_none=True, zero_every=1)
    return step


def legal_for_buffers(data: Data, loop: Loop, accumulate: int) -> tuple[Data, Loop]:
    """Data and a loop after which buffers are those of the rank that one process takes them from."""
    # Ranks whose inputs are even end with buffers of their own, and under accumulation the first leader must last.
    epochs = [list(epoch) for epoch in data.counts]
    for epoch in epochs if accumulate > 1 else epochs[-1:]:
        epoch[0] = max(-(-max(epoch) // accumulate), 1) * accumulate
    epochs[-1][-1] = 0
    # In a plain loop after another, buffers are those of the rank that led there, and not of the lowest.
    plain_last = loop.plain_last and len(epochs) == 1
    loop = replace(loop, plain_last=plain_last, until="all", stop=loop.stop if accumulate == 1 else None)
    return replace(data, counts=tuple(map(tuple, epochs))), loop


MODEL = Recipe((("linear",),))
BRANCHES = Recipe((("linear",), ("branch", 1, (("linear",),), (("linear",),))))
UNUSED = DDP({"find_unused_parameters": True})
FOUND = {
    "kept gradients that nobody uses, weights": Case(
        Model(BRANCHES), UNUSED, data=Data(((3, 0),), weighted=True), step=Step(zero_every=3)
    ),
    "kept gradients that nobody uses, dummies": Case(
        Model(BRANCHES), UNUSED, data=Data(((3, 0),)), loop=Loop(iterate="last"), step=Step(zero_every=3)
    ),
    "left at the end of a loop, and zeroed": Case(
        Model(MODEL),
        optimizer=Optimizer("sgd"),
        data=Data(((2, 5), (6, 0))),
        loop=Loop(iterate="empty", one_block=True),
        step=Step(accumulate=2),
    ),
    "left at the end of a loop, and zeroed, weights": Case(
        Model(MODEL),
        optimizer=Optimizer("sgd"),
        data=Data(((5, 0), (4, 2)), weighted=True),
        loop=Loop(iterate="last", one_block=True),
        step=Step(accumulate=3),
    ),
    "left at the end of a loop on top of kept ones": Case(
        Model(MODEL),
        optimizer=Optimizer("sgd"),
        data=Data(((3, 5), (1, 5))),
        loop=Loop(iterate="last", one_block=True),
        step=Step(accumulate=3, zero_every=2, initial=True),
    ),
    "left at the end of a loop, parameters that nobody uses": Case(
        Model(BRANCHES),
        UNUSED,
        data=Data(((3, 0), (4, 0))),
        loop=Loop(iterate="last", one_block=True),
        step=Step(accumulate=2),
    ),
    "a path that only a dummy takes, in a window with data": Case(
        Model(BRANCHES),
        UNUSED,
        optimizer=Optimizer("sgd"),
        data=Data(((4, 3),)),
        loop=Loop(iterate="empty"),
        step=Step(accumulate=2),
    ),
    "a plain loop after a break, weights": Case(
        Model(MODEL),
        data=Data(((5, 2, 3), (0, 5, 3)), weighted=True),
        loop=Loop(iterate="last", one_block=True, plain_last=True, stop=3),
        step=Step(initial=True),
    ),
    "buffers of a rank that comes back": Case(
        Model(Recipe((("batch norm",),))),
        data=Data(((0, 2, 0), (5, 1, 0))),
        loop=Loop(iterate="empty", one_block=True),
    ),
    "kept gradients of a rank whose shards have no rows": Case(
        Model(Recipe((), entry="embedding")),
        Shards(units=(), syncs="reduces each time"),
        data=Data(((0, 0, 0, 4),)),
        loop=Loop(iterate="empty"),
        step=Step(accumulate=2),
    ),
    "frozen parameters of a module that is not sharded again after its forward": Case(
        Model(Recipe((("frozen", ("batch norm",)),)), synchronised=True),
        Shards(units=()),
        optimizer=Optimizer("sgd"),
        data=Data(((0, 2),)),
        loop=Loop(iterate="empty"),
        step=Step(evaluates=True),
    ),
    "a kept gradient of a path that nobody takes, in a bucket": Case(
        Model(BRANCHES),
        DDP({"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        optimizer=Optimizer("sgd"),
        data=Data(((0, 2),)),
        step=Step(zero_every=2),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(pool: Pool, name: str) -> None:
    case = FOUND[name]
    check(pool, replace(case, optimizer=replace(case.optimizer, rate=RATE)))


few_or_many = settings(
    max_examples=SOAK or (8 if ALL else 4),
    derandomize=not SOAK,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


def check_once(pool: Pool, case: Case) -> None:
    """Check a case that was not found to fail yet, while there is time for it."""
    text = repr(case)
    if text not in failures and time.monotonic() - first_failure.get(case.is_sharded, math.inf) <= SHRINK_SECONDS:
        try:
            check(pool, case, timeout=HANG_SECONDS)
        except AssertionError as error:
            first_failure.setdefault(case.is_sharded, time.monotonic())
            failures[text] = str(error)
    if text in failures:  # raised in one place, or Hypothesis would take a case that fails again for another failure
        raise AssertionError(f"{failures[text]}: {text}")


@few_or_many
@given(case=st.one_of(cases(), sharded()))
def test_a_case_that_is_printed_can_be_put_in_here(case: Case) -> None:
    assert eval(repr(case)) == case


@pytest.mark.timeout(600 + 5 * SOAK)
@few_or_many
@given(case=cases())
def test_equals_one_process(pool: Pool, case: Case) -> None:
    check_once(pool, case)


@pytest.mark.timeout(600 + 5 * SOAK)
@few_or_many
@given(case=sharded())
def test_sharded_equals_one_process(pool: Pool, case: Case) -> None:
    check_once(pool, case)
