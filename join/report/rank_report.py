"""Row of a report for one rank: :class:`RankReport`. Step times are counted in bins.

The memory for the bins does not grow with the number of steps. There are eight bins to a decade, from 0.1 ms to 100 s;
the width of a bin is a third of its lower limit. The first and the last bin include times beyond these limits.
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
"""Limits of the bins in seconds. Bin ``i`` lies between ``EDGES[i]`` and ``EDGES[i + 1]``."""

_PACKED = struct.Struct(f"<2q3d2q{BINS}I")


@dataclass(frozen=True)
class RankReport:
    """Row of a report for one rank.

    Attributes:
        rank: The rank in the process group.
        steps: The number of batches that this rank had in loops over ``Join.iterate``. If the block had no such loop,
            the number of bursts, such as backwards, that this rank announced for the joinable with the most
            announcements.
        shadowed: The number of dummy batches of this rank in such loops. If the block had none, the number of bursts of
            other ranks that this rank shadowed, of the same joinable.
        joined_at: Seconds from entering the block until this rank was out of data.
        ended_at: Seconds from entering the block until all ranks were out of data.
        idle: Seconds that this rank waited for headers after it had joined.
        headers: The number of headers that this rank sent.
        header_bytes: The size of these headers in bytes.
        step_times: The times from one step to the next, and from entering to the first step, counted in the bins of
            :data:`EDGES`. Only announced steps are timed.
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
        """Return the row without its rank as bytes, to be sent to other ranks."""
        _, *values, step_times = vars(self).values()  # in the order above
        return _PACKED.pack(*values, *step_times)

    @classmethod
    def of(cls, rank: int, data: bytes) -> RankReport:
        """Return the row of ``rank`` from the bytes that :meth:`packed` made."""
        values = _PACKED.unpack(data)
        fields: Any = rank, *values[:-BINS], values[-BINS:]
        return cls(*fields)
