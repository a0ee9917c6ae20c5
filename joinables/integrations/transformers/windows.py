"""The batches of an epoch in windows of accumulation, all ranks in the same one: :class:`Windows`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from join import Join

LABELS = "labels", "shift_labels"
NOT_COUNTED = -100


class Windows:
    """An epoch's windows on this rank, filled up with dummies.

    A step of ``Join.iterate`` is a window, so a roll call is held for each optimizer step. Dummies come first in a
    window: the last micro-batch is the one whose backward reduces, so it should be a real one.

    Args:
        join: the block of the epoch.
        batches: those of this rank.
        size: how many make a window.
        without_tokens: whether labels of dummies are taken away, since tokens are counted.
    """

    def __init__(self, join: Join, batches: Iterator[Any], size: int, *, without_tokens: bool) -> None:
        self._join = join
        self._dummy_of: Callable[[Any], Any] = without_labels if without_tokens else lambda batch: batch
        self._windows = join.iterate(_windows(batches, size), dummy=lambda window: [self._dummy_of(window[-1])])
        self._dummies_left = 0
        """How many of the micro-batches to come, in the window under way, are dummies."""
        self.is_dummy = False
        """Whether the micro-batch under way is one."""
        self._left_out = 0
        self.is_left_out = False
        """Whether the micro-batch under way is a dummy on all ranks, and nobody runs it."""
        self.batches_of_all_ranks = 0
        """How many micro-batches of the window are real, on all ranks together."""

    def next(self, size: int) -> list[Any]:
        """The next window, of ``size`` micro-batches; empty if no rank has one."""
        window = next(self._windows, None)
        if window is None:
            return []
        batches = [] if self._join.shadowing else window[:size]
        numbers = torch.zeros(size + 1, dtype=torch.long)  # of ranks that have so many
        numbers[len(batches)] = 1
        self._join.collective.all_reduce(numbers).wait()
        self.batches_of_all_ranks = int((numbers * torch.arange(size + 1)).sum())
        self._dummies_left, self._left_out = size - len(batches), size - int(numbers.nonzero().max())
        if self._dummies_left:
            batches = [self._dummy_of(window[-1])] * self._dummies_left + batches
        return batches

    def begin(self) -> None:
        """A micro-batch begins."""
        self.is_dummy = self._dummies_left > 0
        self.is_left_out = self._left_out > 0
        self._dummies_left -= self.is_dummy
        self._left_out -= self.is_left_out


def _windows(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while window := list(islice(batches, size)):
        yield window


def without_labels(batch: Any) -> Any:
    """The batch with labels that count nowhere; the one given is not changed."""
    changed = copy.copy(batch)
    for name in LABELS:
        if name in batch and isinstance(batch[name], torch.Tensor):
            changed[name] = torch.full_like(batch[name], NOT_COUNTED)
    return changed
