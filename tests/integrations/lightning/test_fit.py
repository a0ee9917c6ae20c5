from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

import torch

from tests.ending import Ending
from tests.integrations.lightning.training import (
    Case,
    Module,
    fit,
    in_one_process,
    loader_of,
    quiet,
    squared,
    trainer_of,
)

CASES = {
    "streams": Case(),
    "sized": Case(kind="sized"),
    "a rank without data": Case(counts=(0, 3)),
    "a sized one": Case(counts=(3, 0), kind="sized"),
    "even": Case(counts=(3, 3)),
    "each rank the same": Case(weigh="equal"),
    "a function": Case(weigh=squared),
    "schedulers per epoch": Case(scheduler="epoch"),
    "clipping": Case(clip=0.3),
    "max_steps": Case(max_steps=7),
    "limit": Case(limit=3, kind="sized"),
    "limit inside a window": Case(limit=3, accumulate=2),
    "accumulation": Case(accumulate=2),
    "accumulation, equal": Case(accumulate=2, weigh="equal"),
    "accumulation, an equal rank without data": Case(accumulate=2, weigh="equal", counts=(0, 5)),
    "BatchNorm on a rank without data": Case(norm=True, counts=(0, 3)),
    "BatchNorm and accumulation": Case(norm=True, counts=(0, 4), accumulate=2),
    "BatchNorm, the first rank runs out in a window": Case(norm=True, counts=(1, 4), accumulate=2),
    "validation in the middle": Case(val_counts=(0, 2), validate_every=2),
    "validation between windows": Case(val_counts=(2, 1), validate_every=2, accumulate=2, kind="sized"),
    "a window where a rank has nothing": Case(accumulate=3, counts=(7, 1), kind="sized"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_as_one_process(ending: Ending, case: Case) -> None:
    ranks = ending.run(fit, case, ranks=2)
    expected = in_one_process(case)
    for state, _ in ranks:
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)
    assert len(ranks[0][1]) == len(ranks[1][1])


def validate_in_a_window(rank: int) -> None:
    with pytest.raises(ValueError, match="Set val_check_interval to a multiple of accumulate_grad_batches"):
        fit(rank, Case(val_counts=(2, 1), validate_every=3, accumulate=2))


def test_a_validation_in_the_middle_of_a_window(ending: Ending) -> None:
    ending.run(validate_in_a_window, ranks=2)


class Stops(Module):
    """Ends the training in the middle of a window."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.should_stop = len(self.seen) == 3


def stop_in_a_window(rank: int, case: Case) -> list[torch.Tensor]:
    quiet(rank)
    module = Stops(case)
    trainer_of(case).fit(module, loader_of(case.kind, rank, case.counts[rank]))
    return module.state()


def test_a_training_that_stops_in_the_middle_of_a_window(ending: Ending) -> None:
    case = Case(accumulate=2, max_steps=1, epochs=1)
    expected = in_one_process(case)
    for state in ending.run(stop_in_a_window, replace(case, max_steps=-1), ranks=2):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)
