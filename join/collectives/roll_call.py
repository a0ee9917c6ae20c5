"""One small number of every rank, told to all ranks: :class:`RollCall`, and :class:`SummedRollCall` over any line."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, final

from typing_extensions import override

from join.collectives.work import Work

if TYPE_CHECKING:
    from join.collectives.control_line import Line


class RollCall(Work, Protocol):
    """Calls the roll over and over; as a :class:`Work` it is the last call."""

    nbytes: int
    """What a rank gives to a call, in bytes."""

    def call(self, mine: int) -> None:
        """Start a call, in which this rank answers ``mine``; the one before must be done."""
        ...

    def repeats(self) -> bool:
        """Whether the call is done, and says what :meth:`answers` said last; ``False`` where that costs to find out."""
        ...

    def answers(self) -> list[int]:
        """What each rank answered, by rank, after the call is done; the same list as long as that repeats."""
        ...


@final
class SummedRollCall(RollCall):
    """Each call is one sum, of which each rank fills bits of its own: of 62 bits for 31 ranks and numbers up to 3.

    Args:
        line: connects the ranks.
        rank: this rank.
        world_size: their number.
        largest: the largest number a rank may answer.
    """

    def __init__(self, line: Line, rank: int, world_size: int, largest: int) -> None:
        self._line, self._size, self._world_size = line, largest.bit_length(), world_size
        self._shift, self._bits = rank * self._size, world_size * self._size
        self._last = -1  # what was read, and what it says: that repeats
        self._answers: list[int] = []
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
    def repeats(self) -> bool:
        return False

    @override
    def answers(self) -> list[int]:
        total = self._sum.total()
        if total != self._last:
            mask = (1 << self._size) - 1
            self._answers = [total >> self._size * rank & mask for rank in range(self._world_size)]
            self._last = total
        return self._answers
