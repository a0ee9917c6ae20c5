"""Values that a step logs only for some batches: all ranks reduce the same ones, over the batches that have them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

import torch

from tests.ending import Ending
from tests.integrations.lightning.training import Case, Module, batch, loader_of, quiet, trainer_of

COUNTS = (4, 2)
REDUCTIONS: dict[str, Any] = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}


def keys_of(rank: int, step: int) -> list[str]:
    """The classes in a batch: each rank has its own order, and some steps have none."""
    return [["a", "b"], ["b"], ["c", "a"], []][step] if rank == 0 else [["b", "a"], [], ["a"], []][step]


def value_of(rank: int, step: int, key: str) -> float:
    return float(1 + rank + 2 * step + 10 * "abc".index(key))


class Classes(Module):
    """Logs a value for each class in a batch."""

    def __init__(self, case: Case, rank: int, how: dict[str, Any]) -> None:
        super().__init__(case)
        self.rank, self.how = rank, how
        self.steps: list[dict[str, float]] = []

    def log_all(self, index: int) -> None:
        step = min(index, COUNTS[self.rank] - 1)  # a dummy is the last batch
        for key in keys_of(self.rank, step):
            value = torch.tensor(value_of(self.rank, step, key))
            self.log(key, value, sync_dist=True, batch_size=len(batch(self.rank, step)[0]), **self.how)

    def training_step(self, data: Any, index: int) -> torch.Tensor:
        if self.how["on_step"]:
            self.log_all(index)
        return super().training_step(data, index)

    def validation_step(self, data: Any, index: int) -> None:
        self.log_all(index)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append({key: float(value) for key, value in self.trainer.callback_metrics.items()})


def fit(rank: int, how: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, float]]:
    quiet(rank)
    case = Case(kind="sized", counts=COUNTS, epochs=1)
    module, loaders = Classes(case, rank, how), [loader_of("sized", rank, COUNTS[rank]) for _ in range(2)]
    trainer = trainer_of(case)
    trainer.fit(module, *loaders[: 1 if how["on_step"] else 2])
    return module.steps, {key: float(value) for key, value in trainer.callback_metrics.items()}


def reduced(name: str, steps: range) -> dict[str, float]:
    """The same in one process."""
    found: dict[str, list[tuple[float, int]]] = {}
    for step in steps:
        for rank in (rank for rank in (0, 1) if step < COUNTS[rank]):
            for key in keys_of(rank, step):
                found.setdefault(key, []).append((value_of(rank, step, key), len(batch(rank, step)[0])))
    if name == "mean":
        return {key: sum(v * n for v, n in each) / sum(n for _, n in each) for key, each in found.items()}
    return {key: {"sum": sum, "max": max, "min": min}[name](v for v, _ in each) for key, each in found.items()}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_in_a_step(ending: Ending, name: str) -> None:
    expected, last = [], {}
    for step in range(max(COUNTS)):
        last = last | reduced(name, range(step, step + 1))
        expected.append(last)
    for steps, _ in ending.run(fit, {"on_step": True, "on_epoch": False, "reduce_fx": name}, ranks=2):
        assert steps == [pytest.approx(each) for each in expected]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_in_a_validation(ending: Ending, name: str) -> None:
    for _, found in ending.run(fit, {"on_step": False, "on_epoch": True, "reduce_fx": name}, ranks=2):
        assert found == pytest.approx(reduced(name, range(max(COUNTS))))


def test_in_a_step_and_its_epoch(ending: Ending) -> None:
    for steps, found in ending.run(fit, {"on_step": True, "on_epoch": True, "reduce_fx": "mean"}, ranks=2):
        assert {key: found[f"{key}_epoch"] for key in "abc"} == pytest.approx(reduced("mean", range(max(COUNTS))))
        assert steps[2]["a_step"] == pytest.approx(reduced("mean", range(2, 3))["a"])
