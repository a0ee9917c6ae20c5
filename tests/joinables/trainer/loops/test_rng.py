"""A glance at the generators sees every change, and costs little where there is none."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from joinables.trainer.loops import rng

np: Any = pytest.importorskip("numpy")


def same(seen: Any) -> bool:
    kind, words, *rest = np.random.get_state()
    return seen[0] == kind and (seen[1] == words).all() and list(seen[2:]) == rest


def test_a_glance_sees_every_change_of_numpy() -> None:
    kept = np.random.get_state()
    changes = [
        lambda: None,
        np.random.rand,
        lambda: np.random.rand(624),  # leaves the position as it was
        np.random.randn,  # draws two and keeps one
        np.random.randn,  # takes the one that was kept
        lambda: np.random.seed(3),
        lambda: np.random.set_state(kept),
    ]
    for change in changes * 2:
        change()
        assert same(rng.glance()["numpy"])


def test_a_glance_costs_little_where_nothing_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.seed(0)
    first = rng.glance()["numpy"]
    monkeypatch.delattr(np.random, "get_state")
    assert rng.glance()["numpy"] is first


def test_going_on_from_what_was_seen() -> None:
    def draw() -> list[Any]:
        return [random.random(), random.gauss(0.0, 1.0), torch.rand(()).item(), np.random.rand(), np.random.randn()]

    draw()
    seen = rng.glance()
    drawn = draw()
    rng.restore(rng.capture(seen))
    assert draw() == drawn
