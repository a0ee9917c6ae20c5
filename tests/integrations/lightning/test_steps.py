"""The number of steps that a trainer will make, as users' hooks ask for it before the first one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

from tests.ending import Ending
from tests.integrations.lightning.training import Case, Module, loader_of, quiet, trainer_of


class Asking(Module):
    """Asks where Lightning's documentation does, and in a hook before that."""

    def __init__(self, case: Case, hook: str) -> None:
        super().__init__(case)
        self.hook, self.answer = hook, None

    def ask(self, hook: str) -> None:
        if hook == self.hook:
            self.answer = self.trainer.estimated_stepping_batches, self.trainer.num_training_batches

    def setup(self, stage: str) -> None:
        self.ask("setup")

    def configure_optimizers(self) -> Any:
        self.ask("configure_optimizers")
        return super().configure_optimizers()


def fit(rank: int, case: Case, hook: str, options: dict[str, Any]) -> tuple[Any, int]:
    quiet(rank)
    module, trainer = Asking(case, hook), trainer_of(case, **options)
    trainer.fit(module, loader_of(case.kind, rank, case.counts[rank]))
    return module.answer, trainer.global_step


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers"])
@pytest.mark.parametrize(
    ("case", "options", "steps", "batches"),
    [
        (Case(kind="sized"), {}, 10, 5),
        (Case(kind="sized", counts=(0, 3), accumulate=2), {}, 4, 3),
        (Case(kind="sized", max_steps=7), {}, 7, 5),
        (Case(kind="sized"), {"limit_train_batches": 0.5}, 4, 2),
        (Case(max_steps=7), {}, 7, float("inf")),
    ],
)
def test_it_is_known_on_all_ranks(
    ending: Ending, hook: str, case: Case, options: dict[str, Any], steps: int, batches: float
) -> None:
    assert ending.run(fit, case, hook, options, ranks=2) == [((steps, batches), steps)] * 2
