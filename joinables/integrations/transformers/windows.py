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
        size: how many micro-batches make a window.
        without_tokens: whether labels of dummies are taken away, since tokens are counted.
    """

    def __init__(self, join: Join, size: int, *, without_tokens: bool) -> None:
        self.join, self._size = join, size
        self._dummy_of: Callable[[Any], Any] = without_labels if without_tokens else lambda batch: batch
        self._windows: Iterator[list[Any]] | None = None  # before the first
        # How many micro-batches of the window have begun, and how many of the first ones are dummies: on this rank, and
        # on all of them.
        self._begun = self._dummies = self._left_out = 0
        self.batches_of_all_ranks = 0
        """How many micro-batches of the window are real, on all ranks together."""

    def next(self, batches: Iterator[Any], size: int) -> list[Any]:
        """The next window, of ``size`` micro-batches; empty if no rank has one.

        Args:
            batches: this rank's, the same iterator in all windows.
            size: as many as wanted; fewer at the end of an epoch.
        """
        if self._windows is None:
            mine = _windows(batches, self._size)
            self._windows = self.join.iterate(mine, dummy=lambda window: [self._dummy_of(window[-1])])
        window = next(self._windows, None)
        if window is None:
            return []
        real = [] if self.join.shadowing else window[:size]
        numbers = torch.zeros(size + 1, dtype=torch.long)  # of ranks that have so many
        numbers[len(real)] = 1
        self.join.collective.all_reduce(numbers).wait()
        self.batches_of_all_ranks = int((numbers * torch.arange(size + 1)).sum())
        self._begun, self._dummies, self._left_out = 0, size - len(real), size - int(numbers.nonzero().max())
        return [self._dummy_of(window[-1])] * self._dummies + real if self._dummies else real

    def begin(self) -> None:
        """Count a micro-batch of the window; called when its training step begins."""
        self._begun += 1

    @property
    def is_dummy(self) -> bool:
        """Whether the micro-batch under way is a dummy on this rank."""
        return self._begun <= self._dummies

    @property
    def is_left_out(self) -> bool:
        """Whether the micro-batch under way is a dummy on all ranks, and nobody runs it."""
        return self._begun <= self._left_out


def _windows(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """The batches in lists of ``size``; the last one may be shorter."""
    while window := list(islice(batches, size)):
        yield window


def without_labels(batch: Any) -> Any:
    """The batch with labels that count nowhere; the one given is not changed."""
    changed = copy.copy(batch)
    for name in LABELS:
        if name in batch and isinstance(batch[name], torch.Tensor):
            changed[name] = torch.full_like(batch[name], NOT_COUNTED)
    return changed
