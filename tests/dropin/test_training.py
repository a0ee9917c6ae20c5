"""DDP and ZeRO on uneven inputs, in loops written for torch's ``Join``, compared with one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests import training
from tests.dropin.either import either, libraries, run
from tests.models import OPTIMIZERS, TOLERANCE, assert_same, flat_state
from tests.pool import Pool
from tests.training import accumulating, branch_of, build, data_of, full_state, loss_of, reference, wrapped
from tests.versions import OWN_BUFFERS

EVEN = ((2, 2, 2), (3, 3, 3))
ZEROS = "a rank without data steps its shard on old gradients, or on none"


@dataclass(frozen=True)
class Case(training.Case):
    """A loop over DDP. Its optimizer has no state, or is sharded, or is listed, too."""

    optimizer: str = "plain sgd"
    decay: float = 1.0
    listed: bool = False
    reverse: bool = False  # the list
    enable: bool = True
    throw: bool = False
    wrong: str = ""  # what torch's does otherwise
    hangs: bool = False

    def trained(self, epoch: int) -> tuple[int, ...]:
        counts = self.counts[epoch]
        return (min(counts),) * len(counts) if self.throw else counts


CASES = {
    "uneven": Case(),
    "uneven, initial world size": Case(initial=True),
    "even": Case(counts=EVEN),
    "even, initial world size": Case(counts=EVEN, initial=True),
    "even, not enabled": Case(counts=EVEN, enable=False),
    "nothing at all": Case(counts=((0, 0, 0), (0, 2, 0), (0, 0, 0))),
    "throw": Case(throw=True, counts=((2, 4, 3), (0, 1, 2), (2, 2, 2))),
    "views": Case(ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5}),
    "unused": Case(model="branches", ddp={"find_unused_parameters": True}),
    "unused, initial world size": Case(model="branches", initial=True, ddp={"find_unused_parameters": True}),
    "local steps": Case(accumulate=2, counts=((0, 4, 2), (2, 0, 4))),
    "local steps, initial world size": Case(accumulate=2, initial=True, counts=((0, 4, 2), (2, 0, 4))),
    "local steps, out amid a window": Case(
        accumulate=2,
        counts=((0, 4, 1), (3, 0, 4)),
        wrong="what a rank has accumulated when it runs out is lost",
    ),
    "buffers": Case(model="norm", wrong="buffers are those of the last rank with data, and under DDP of the first"),
    "even, buffers": Case(
        model="norm", counts=EVEN, wrong="buffers are those of the last rank with data, and under DDP of the first"
    ),
    "zero, even": Case(optimizer="adam", zero=True, counts=EVEN),
    "zero": Case(optimizer="adam", zero=True, counts=((1, 3, 2), (2, 1, 3)), wrong=ZEROS),
    "zero, without data": Case(optimizer="adam", zero=True, wrong=ZEROS),
    "zero before its module": Case(
        optimizer="adam", zero=True, reverse=True, wrong="shadowed steps of ZeRO count as a rank's own", hangs=True
    ),
    "evaluation in the loop": Case(
        evaluates=True, wrong="a forward without a backward is shadowed with one, which nobody runs", hangs=True
    ),
    "adam in the list": Case(optimizer="adam", listed=True, wrong="a stock optimizer cannot be listed"),
}


ROWS: list[Any] = [
    pytest.param(case, *row.values, id=f"{name}: {row.id}", marks=row.marks)
    for name, case in CASES.items()
    for row in libraries(case.wrong)
]


def train(rank: int, library: Any, case: Case) -> tuple[dict[str, torch.Tensor], list[str]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp, told = wrapped(case), []
    cls, options = OPTIMIZERS[case.optimizer]
    parameters = ddp.parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, cls, **options) if case.zero else cls(parameters, **options)
    joinables = [ddp, optimizer][:: -1 if case.reverse else 1] if case.zero or case.listed else [ddp]
    for epoch, counts in enumerate(case.counts):
        try:
            with library.Join(joinables, case.enable, case.throw, divide_by_initial_world_size=case.initial):
                for step in range(counts[rank]):
                    if case.evaluates and (rank + step) % 2:
                        with torch.no_grad():
                            ddp(data_of(case, rank, epoch, step)[0])
                    sync = (step + 1) % case.accumulate == 0
                    if step % case.accumulate == 0:
                        optimizer.zero_grad()
                    with accumulating(ddp, case, sync=sync):
                        loss_of(ddp, case, branch_of(rank, step), data_of(case, rank, epoch, step)).backward()
                    if sync:
                        optimizer.step()
        except RuntimeError as error:
            told.append(str(error))
    return flat_state(ddp.module.state_dict(), full_state(optimizer)), told


def compared(case: Case, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's state; and the optimizer's, where it is to be the same on all ranks."""
    parts = ("0.", "1.state.") if case.zero or case.listed else ("0.",)
    return {path: value for path, value in state.items() if path.startswith(parts)}


@pytest.mark.parametrize(("case", "library"), ROWS)
def test_equals_one_process(pool: Pool, case: Case, library: str) -> None:
    expected = compared(case, reference(case))
    states = run(pool, library, train, case, hangs=case.hangs)
    for state, told in states:
        assert_same(compared(case, state), compared(case, states[0][0]))
        assert_same(compared(case, state), expected, TOLERANCE)
        assert len(told) == sum(case.throw and max(counts) > min(counts) for counts in case.counts)


WITH_OWN_BUFFERS = Case(model="norm", ddp=OWN_BUFFERS)


def with_own_buffers(case: Case) -> list[dict[str, torch.Tensor]]:
    """What each rank ends with where none takes over another's buffers; all in one process."""
    models = [build(case) for _ in range(case.ranks)]
    for epoch, counts in enumerate(case.counts):
        for step in range(max(counts)):
            active = [rank for rank in range(case.ranks) if counts[rank] > step]
            gradients = [
                torch.autograd.grad(loss_of(models[rank], case, 0, data_of(case, rank, epoch, step)), parameters)
                for rank in active
                for parameters in [list(models[rank].parameters())]
            ]
            means = [sum(each) / len(active) for each in zip(*gradients, strict=True)]
            for model in models:
                with torch.no_grad():
                    for parameter, mean in zip(model.parameters(), means, strict=True):
                        parameter -= 0.05 * mean
    return [flat_state(model.state_dict()) for model in models]


@either()
def test_buffers_of_ones_own(pool: Pool, library: str) -> None:
    states = run(pool, library, train, WITH_OWN_BUFFERS)
    for (state, _), expected in zip(states, with_own_buffers(WITH_OWN_BUFFERS), strict=True):
        assert_same(compared(WITH_OWN_BUFFERS, state), expected, TOLERANCE)
