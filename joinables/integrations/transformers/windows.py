"""The micro-batches of an epoch in windows of accumulation, all ranks in the same one: :class:`Windows`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from join import Join

LABELS = "labels", "shift_labels"
NOT_COUNTED = -100


class Windows:
    """An epoch's windows on this rank, filled up with dummies, all of one size; iterated over, the one under way.

    A micro-batch is a step of ``Join.iterate``, begun when it is asked for; those that follow in its window are known
    by then.

    Args:
        join: the block of the epoch.
        size: how many micro-batches make a window.
        without_tokens: whether labels of dummies are taken away, since tokens are counted.
    """

    def __init__(self, join: Join, size: int, *, without_tokens: bool) -> None:
        self.join, self._size, self._without_tokens = join, size, without_tokens
        self._steps: Iterator[Any] | None = None  # before the first
        self._first: list[Any] = []  # the first micro-batch of the window, if there is any

    def begin(self, batches: Iterator[Any]) -> list[Any]:
        """Begin the next window: what it has on this rank, or one dummy; empty if no rank has anything.

        Args:
            batches: this rank's, the same iterator in all windows.
        """
        if self._steps is None:
            dummy = without_labels if self._without_tokens else "last"
            self._steps = iter(self.join.iterate(batches, dummy=dummy, window=self._size, fill_window=True))
        self._first = list(islice(self._steps, 1))
        return self._first + ([] if self.join.shadowing else self.join.pending[: self._size - 1])

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        assert self._steps is not None
        yield from self._first
        yield from islice(self._steps, self._size - 1)

    def end(self) -> None:
        """Go through the rest of a window in which the trainer has stopped."""
        while self._steps is not None and not self.join.ends_window:
            next(self._steps)


def without_labels(batch: Any) -> Any:
    """The batch with labels that count nowhere; the one given is not changed."""
    changed = copy.copy(batch)
    for name in LABELS:
        if name in batch and isinstance(batch[name], torch.Tensor):
            changed[name] = torch.full_like(batch[name], NOT_COUNTED)
    return changed
