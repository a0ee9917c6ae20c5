"""Generators go on from where they were seen."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from joinables.trainer import rng

np: Any = pytest.importorskip("numpy")


def test_going_on_from_what_was_seen() -> None:
    def draw() -> list[Any]:
        return [random.random(), random.gauss(0.0, 1.0), torch.rand(()).item(), np.random.rand(), np.random.randn()]

    draw()
    seen = rng.glance()
    drawn = draw()
    rng.restore(rng.capture(seen))
    assert draw() == drawn
