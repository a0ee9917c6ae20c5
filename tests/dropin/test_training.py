"""DDP and ZeRO on uneven inputs, in loops written for torch's ``Join``, compared with one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.dropin.either import either, libraries, run
from tests.harness import Pool
from tests.training import (
    DDP,
    TOLERANCE,
    Case,
    Data,
    Model,
    Optimizer,
    Step,
    accumulating,
    assert_same,
    branch_of,
    build,
    flat_state,
    full_state,
    loss_of,
    optimizer_of,
    reference,
    wrapped,
)
from tests.versions import OWN_BUFFERS

EVEN = ((2, 2, 2), (3, 3, 3))
ZEROS = "a rank without data steps its shard on old gradients, or on none"


SGD = Optimizer("plain sgd", decay=1.0)  # without state
ZERO = Optimizer(decay=1.0, zero=True)


@dataclass(frozen=True)
class Listed:
    """A loop over DDP, and what ``Join`` is told of it. An optimizer that has state is sharded, or is listed, too."""

    case: Case = field(default_factory=lambda: Case(optimizer=SGD))
    optimizer: bool = False
    reverse: bool = False  # the list
    enable: bool = True
    throw: bool = False
    wrong: str = ""  # what torch's does otherwise
    hangs: bool = False

    @property
    def trained(self) -> Case:
        """What all ranks come to: to as many batches, where one that runs out ends the block for all."""
        if not self.throw:
            return self.case
        counts = tuple((min(epoch),) * len(epoch) for epoch in self.case.data.counts)
        return replace(self.case, data=Data(counts))


WRONG_BUFFERS = "buffers are those of the last rank with data, and under DDP of the first"
CASES = {
    "uneven": Listed(),
    "uneven, initial world size": Listed(Case(optimizer=SGD, step=Step(initial=True))),
    "even": Listed(Case(optimizer=SGD, data=Data(EVEN))),
    "even, initial world size": Listed(Case(optimizer=SGD, data=Data(EVEN), step=Step(initial=True))),
    "even, not enabled": Listed(Case(optimizer=SGD, data=Data(EVEN)), enable=False),
    "nothing at all": Listed(Case(optimizer=SGD, data=Data(((0, 0, 0), (0, 2, 0), (0, 0, 0))))),
    "throw": Listed(Case(optimizer=SGD, data=Data(((2, 4, 3), (0, 1, 2), (2, 2, 2)))), throw=True),
    "views": Listed(Case(wrapper=DDP({"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5}), optimizer=SGD)),
    "unused": Listed(Case(Model("branches"), DDP({"find_unused_parameters": True}), SGD)),
    "unused, initial world size": Listed(
        Case(Model("branches"), DDP({"find_unused_parameters": True}), SGD, step=Step(initial=True))
    ),
    "local steps": Listed(Case(optimizer=SGD, data=Data(((0, 4, 2), (2, 0, 4))), step=Step(accumulate=2))),
    "local steps, initial world size": Listed(
        Case(optimizer=SGD, data=Data(((0, 4, 2), (2, 0, 4))), step=Step(accumulate=2, initial=True))
    ),
    "local steps, out amid a window": Listed(
        Case(optimizer=SGD, data=Data(((0, 4, 1), (3, 0, 4))), step=Step(accumulate=2)),
        wrong="what a rank has accumulated when it runs out is lost",
    ),
    "buffers": Listed(Case(Model("norm"), optimizer=SGD), wrong=WRONG_BUFFERS),
    "even, buffers": Listed(Case(Model("norm"), optimizer=SGD, data=Data(EVEN)), wrong=WRONG_BUFFERS),
    "zero, even": Listed(Case(optimizer=ZERO, data=Data(EVEN))),
    "zero": Listed(Case(optimizer=ZERO, data=Data(((1, 3, 2), (2, 1, 3)))), wrong=ZEROS),
    "zero, without data": Listed(Case(optimizer=ZERO), wrong=ZEROS),
    "zero before its module": Listed(
        Case(optimizer=ZERO), reverse=True, wrong="shadowed steps of ZeRO count as a rank's own", hangs=True
    ),
    "evaluation in the loop": Listed(
        Case(optimizer=SGD, step=Step(evaluates=True)),
        wrong="a forward without a backward is shadowed with one, which nobody runs",
        hangs=True,
    ),
    "adam in the list": Listed(
        Case(optimizer=Optimizer(decay=1.0)), optimizer=True, wrong="a stock optimizer cannot be listed"
    ),
}


ROWS: list[Any] = [
    pytest.param(listed, *row.values, id=f"{name}: {row.id}", marks=row.marks)
    for name, listed in CASES.items()
    for row in libraries(listed.wrong)
]


def train(rank: int, library: Any, listed: Listed) -> tuple[dict[str, torch.Tensor], list[str]]:
    case = listed.case
    ddp, told = wrapped(case.model, case.wrapper), []
    optimizer = optimizer_of(case.optimizer, ddp)
    joinables = [ddp, optimizer] if case.optimizer.zero or listed.optimizer else [ddp]
    if listed.reverse:
        joinables.reverse()
    for epoch, counts in enumerate(case.data.counts):
        try:
            with library.Join(joinables, listed.enable, listed.throw, divide_by_initial_world_size=case.step.initial):
                for step in range(counts[rank]):
                    data = case.data.batch(rank, epoch, step)
                    if case.step.evaluates and (rank + step) % 2:
                        with torch.no_grad():
                            ddp(data[0])
                    sync = (step + 1) % case.step.accumulate == 0
                    if step % case.step.accumulate == 0:
                        optimizer.zero_grad()
                    with accumulating(ddp, case.wrapper, sync=sync):
                        loss_of(ddp, case, epoch, branch_of(rank, step), data).backward()
                    if sync:
                        optimizer.step()
        except RuntimeError as error:
            told.append(str(error))
    return flat_state(ddp.module.state_dict(), full_state(optimizer)), told


def compared(listed: Listed, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's state; and the optimizer's, where it is to be the same on all ranks."""
    parts = ("0.", "1.state.") if listed.case.optimizer.zero or listed.optimizer else ("0.",)
    return {path: value for path, value in state.items() if path.startswith(parts)}


@pytest.mark.parametrize(("listed", "library"), ROWS)
def test_equals_one_process(pool: Pool, listed: Listed, library: str) -> None:
    expected = compared(listed, reference(listed.trained))
    states = run(pool, library, train, listed, hangs=listed.hangs)
    for state, told in states:
        assert_same(compared(listed, state), compared(listed, states[0][0]))
        assert_same(compared(listed, state), expected, TOLERANCE)
        assert len(told) == sum(listed.throw and max(counts) > min(counts) for counts in listed.case.data.counts)


WITH_OWN_BUFFERS = Listed(Case(Model("norm"), DDP(OWN_BUFFERS), SGD))


def with_own_buffers(model: Model, data: Data) -> list[dict[str, torch.Tensor]]:
    """What each rank ends with where none takes over another's buffers; all in one process."""
    models = [build(model.kind) for _ in range(data.ranks)]
    for epoch, counts in enumerate(data.counts):
        for step in range(max(counts)):
            active = [rank for rank in range(data.ranks) if counts[rank] > step]
            gradients: list[Any] = []
            for rank in active:
                x, y = data.batch(rank, epoch, step)
                loss = ((models[rank](x) - y) ** 2).mean()
                gradients.append(torch.autograd.grad(loss, list(models[rank].parameters())))
            means = [sum(each) / len(active) for each in zip(*gradients, strict=True)]
            for each in models:
                with torch.no_grad():
                    for parameter, mean in zip(each.parameters(), means, strict=True):
                        parameter -= 0.05 * mean
    return [flat_state(each.state_dict()) for each in models]


@either()
def test_buffers_of_ones_own(pool: Pool, library: str) -> None:
    states = run(pool, library, train, WITH_OWN_BUFFERS)
    expected = with_own_buffers(WITH_OWN_BUFFERS.case.model, WITH_OWN_BUFFERS.case.data)
    for (state, _), alone in zip(states, expected, strict=True):
        assert_same(compared(WITH_OWN_BUFFERS, state), alone, TOLERANCE)
