"""Lines that sum one number of each rank, or gather one: :class:`Line`, :class:`GroupLine`, :class:`RollCall`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
from typing_extensions import final, override

from join.collectives.work import Work

if TYPE_CHECKING:
    from join.collectives.base import Collective

HEADERS, ROLL_CALLS, BARRIERS, SUMS = range(4)
"""The lines of a group: of headers, of the roll calls of loops in lockstep, of barriers in them, and of sums."""
_WORD_BITS = 63  # the sign stays free


class Sum(Work, Protocol):
    """A sum under way."""

    nbytes: int
    """Bytes that each rank sends."""

    def total(self) -> int:
        """The sum, once it is there."""
        ...


class FloatSum(Work, Protocol):
    """A sum of floating-point numbers under way."""

    def total(self) -> float:
        """The sum, once it is there; the same on all ranks, to the bit."""
        ...


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


class Line(ABC):
    """Sums numbers over the ranks of a group, one at a time: each sum is done before the next is started."""

    @abstractmethod
    def sum(self, number: int, bits: int) -> Sum:
        """Start summing a number over all ranks.

        Args:
            number: this rank's; neither it nor the sum is negative.
            bits: how many the number has at most, and the sum, too; the same on all ranks.
        """

    @abstractmethod
    def sum_float(self, number: float) -> FloatSum:
        """Start summing a floating-point number of 64 bits over all ranks."""

    @abstractmethod
    def roll_call(self, largest: int) -> RollCall:
        """A roll call whose answers are at most ``largest``. Each call of it counts as one sum of this line."""

    def restart(self) -> None:
        """Take back what this rank gave to sums that others may not have come to.

        All ranks call it where nothing is under way, and meet afterwards, before they use the line.
        """


class GroupLine(Line):
    """A control line over a collective: each sum is an all-reduce, in one order with all others on it."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    @override
    def sum(self, number: int, bits: int) -> Sum:
        # Of several words, all but the last need room for what is to be carried.
        size = _WORD_BITS if bits <= _WORD_BITS else _WORD_BITS - self._collective.world_size.bit_length()
        mask = (1 << size) - 1
        words = torch.tensor([number >> shift & mask for shift in range(0, bits, size)])
        return _GroupSum(self._collective.all_reduce(words), words, size)

    @override
    def sum_float(self, number: float) -> FloatSum:
        total = torch.tensor(number, dtype=torch.float64)
        return _GroupFloatSum(self._collective.all_reduce(total), total)

    @override
    def roll_call(self, largest: int) -> RollCall:
        return SummedRollCall(self, self._collective.rank, self._collective.world_size, largest)


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


class _GroupWork:
    """An all-reduce of this tensor."""

    def __init__(self, work: Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor, self.is_completed = work, tensor, work.is_completed

    def wait(self, *timeout: timedelta) -> bool:
        return self._work.wait(*timeout)


class _GroupSum(_GroupWork):
    """An all-reduce of words of some bits each."""

    def __init__(self, work: Work, words: torch.Tensor, size: int) -> None:
        super().__init__(work, words)
        self._size, self.nbytes = size, words.nbytes

    def total(self) -> int:
        return sum(word << place * self._size for place, word in enumerate(cast("list[int]", self._tensor.tolist())))


class _GroupFloatSum(_GroupWork):
    """An all-reduce of one number."""

    def total(self) -> float:
        return self._tensor.item()
