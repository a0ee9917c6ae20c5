"""One rank's row of a report, :class:`RankReport`; the times of its steps are counted in bins.

So any run takes as little room. Bins are as wide as a third of what they hold (eight to a decade), from 0.1 ms to
100 s; the first and the last one take what is beyond.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

PER_DECADE = 8
_SHORTEST = 1e-4  # seconds
_DECADES = 6

BINS = PER_DECADE * _DECADES
EDGES = tuple(_SHORTEST * 10 ** (edge / PER_DECADE) for edge in range(BINS + 1))
"""Where the bins begin and end, in seconds; bin ``i`` lies between ``EDGES[i]`` and ``EDGES[i + 1]``."""

_PACKED = struct.Struct(f"<2q3d2q{BINS}I")


@dataclass(frozen=True)
class RankReport:
    """One rank's row.

    Attributes:
        rank: the rank in the group.
        steps: bursts that this rank announced, of the joinable that announced most. In a block whose loops over
            ``Join.iterate`` announced none, such as an evaluation: the batches that it had there.
        shadowed: bursts of other ranks that it shadowed, likewise; or the dummies that it had.
        joined_at: seconds from entering the block to running out of inputs.
        ended_at: seconds from entering the block until all ranks had run out.
        idle: seconds of waiting for headers as a joined rank.
        headers: how many headers it sent.
        header_bytes: their size in bytes.
        step_times: how many of ``steps`` took how long, from one to the next (the first: from entering), counted in the
            bins of :data:`EDGES`; only those that were announced are timed.
    """

    rank: int
    steps: int
    shadowed: int
    joined_at: float
    ended_at: float
    idle: float
    headers: int
    header_bytes: int
    step_times: tuple[int, ...]

    def packed(self) -> bytes:
        """The row without its rank, to be sent."""
        _, *values, step_times = vars(self).values()  # in the order above
        return _PACKED.pack(*values, *step_times)

    @classmethod
    def of(cls, rank: int, data: bytes) -> RankReport:
        """Return the row that this rank has packed."""
        values = _PACKED.unpack(data)
        fields: Any = rank, *values[:-BINS], values[-BINS:]
        return cls(*fields)
