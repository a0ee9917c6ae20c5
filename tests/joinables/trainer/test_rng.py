"""Generators go on from where they were captured."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from joinables.trainer import rng
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import trainer

np: Any = pytest.importorskip("numpy")


def test_going_on_from_a_captured_state() -> None:
    def draw() -> list[Any]:
        return [random.random(), random.gauss(0.0, 1.0), torch.rand(()).item(), np.random.rand(), np.random.randn()]

    draw()
    state = rng.capture()
    drawn = draw()
    rng.restore(state)
    assert draw() == drawn


def test_numpy_begins_with_the_whole_seed() -> None:
    drawn = [rng.seed_all(seed) or np.random.rand() for seed in (5, 7, 2**32 + 5)]
    assert drawn[0] == drawn[2] != drawn[1]


def draws(rank: int) -> float:
    run, drawn = trainer(seed=3), list[float]()
    module = Classifier()
    module.on_train_start = lambda: drawn.append(torch.rand(()).item())
    run.fit(module, loader(5))
    return drawn[0]


def test_ranks_draw_different_numbers(pool: Pool) -> None:
    assert len(set(pool.run(draws, ranks=2))) == 2


class Device:
    """What torch has for an accelerator, of which this process has a part or not."""

    def __init__(self, *, used: bool) -> None:
        self.is_used, self.calls = used, list[Any]()

    def is_initialized(self) -> bool:
        return self.is_used

    def get_rng_state(self) -> str:
        return "its state"

    def set_rng_state(self, state: Any) -> None:
        self.calls.append(("state", state))

    def manual_seed_all(self, seed: int) -> None:
        self.calls.append(("seed", seed))


@pytest.mark.parametrize("used", [False, True])
def test_an_accelerator_goes_on_too(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    """One that the process has not used is not used now, as its forks would suffer from, and begins with the seed."""
    parent, worker = Device(used=used), Device(used=False)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setattr("torch.get_device_module", lambda *_: parent)
    state = rng.capture()
    assert state.get("accelerator") == ("its state" if used else None)
    monkeypatch.setattr("torch.get_device_module", lambda *_: worker)
    rng.start_from(state)
    assert worker.calls == [("state", "its state") if used else ("seed", torch.initial_seed())]
