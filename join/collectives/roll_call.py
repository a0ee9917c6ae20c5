"""All-gathers of one small number of each rank: :class:`RollCall`, and :class:`SummedRollCall` over control lines."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, final

from typing_extensions import override

from join.collectives.work import Work

if TYPE_CHECKING:
    from join.collectives.control_line import Line


class RollCall(Work, Protocol):
    """Gathers a small number of each rank, again and again; ``wait`` and ``is_completed`` are of the last call."""

    nbytes: int
    """Bytes that each rank sends in a call."""

    def call(self, mine: int) -> None:
        """Start a call, in which this rank answers ``mine``; the one before must be done."""
        ...

    def answers(self) -> list[int]:
        """What each rank answered, by rank, after the call is done."""
        ...


@final
class SummedRollCall(RollCall):
    """A roll call over any control line: a call is one sum, in which each rank fills bits of its own.

    For 31 ranks and answers up to 3, the largest that a rank may give, the sum has 62 bits.
    """

    def __init__(self, line: Line, rank: int, world_size: int, largest: int) -> None:
        self._line, self._size, self._world_size = line, largest.bit_length(), world_size
        self._shift, self._bits = rank * self._size, world_size * self._size
        self.nbytes = 0

    @override
    def call(self, mine: int) -> None:
        self._sum = self._line.sum(mine << self._shift, self._bits)
        self.nbytes = self._sum.nbytes

    @override
    def is_completed(self) -> bool:
        return self._sum.is_completed()

    @override
    def wait(self, *timeout: timedelta) -> bool:
        return self._sum.wait(*timeout)

    @override
    def answers(self) -> list[int]:
        total, mask = self._sum.total(), (1 << self._size) - 1
        return [total >> self._size * rank & mask for rank in range(self._world_size)]
