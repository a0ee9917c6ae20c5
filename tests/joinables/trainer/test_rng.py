"""Generators go on from where they were captured."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from joinables.trainer import rng

np: Any = pytest.importorskip("numpy")


def test_going_on_from_a_captured_state() -> None:
    def draw() -> list[Any]:
        return [random.random(), random.gauss(0.0, 1.0), torch.rand(()).item(), np.random.rand(), np.random.randn()]

    draw()
    state = rng.capture()
    drawn = draw()
    rng.restore(state)
    assert draw() == drawn
