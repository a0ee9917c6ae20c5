"""How long a rank's steps took: :class:`StepTimes`, counts in bins of fixed size, so that any run takes as little room.

Bins are as wide as a third of what they hold (eight to a decade), from 0.1 ms to 100 s; the first and the last one take
what is beyond.
"""

from __future__ import annotations

from bisect import bisect

PER_DECADE = 8
_SHORTEST = 1e-4  # seconds
_DECADES = 6

BINS = PER_DECADE * _DECADES
EDGES = tuple(_SHORTEST * 10 ** (edge / PER_DECADE) for edge in range(BINS + 1))
"""Where the bins begin and end, in seconds; bin ``i`` lies between ``EDGES[i]`` and ``EDGES[i + 1]``."""


class StepTimes:
    """Counts the times between the steps of one rank."""

    def __init__(self) -> None:
        self.counts = [0] * BINS
        """How many steps took how long, by bin."""
        self._last = 0.0

    @property
    def total(self) -> int:
        """How many steps were made."""
        return sum(self.counts)

    def start(self, now: float) -> None:
        """Let the first step begin at ``now``, in seconds of a monotonic clock."""
        self._last = now

    def step(self, now: float) -> None:
        """Count a step that ends at ``now``."""
        took, self._last = now - self._last, now
        self.counts[bisect(EDGES, took, 1, BINS) - 1] += 1
