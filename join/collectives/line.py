"""Lines, on which ranks sum a whole number, as headers do: :class:`Line`, and :class:`GroupLine` over a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import torch
from typing_extensions import override

from join.collectives.roll_call import RollCall, SummedRollCall
from join.collectives.work import Work

if TYPE_CHECKING:
    from join.collectives.base import Collective

_WORD_BITS = 63  # the sign stays free


class Sum(Work, Protocol):
    """A sum under way."""

    nbytes: int
    """What a rank gives to it, in bytes."""

    def total(self) -> int:
        """The sum, once it is there."""
        ...


class Line(ABC):
    """Connects the ranks of a group for sums. One is under way at a time: each is done before the next is started."""

    keeps_notes: ClassVar[bool] = False
    """Whether ranks can read each other's notes."""

    @abstractmethod
    def sum(self, number: int, bits: int, seconds: float | None = None) -> Sum:
        """Start summing a number over all ranks.

        Args:
            number: this rank's; neither it nor the sum is negative.
            bits: how many the number has at most, and the sum, too; the same on all ranks.
            seconds: after how long a rank that leaves gives it up, so that it does not keep its process from ending;
                ``None`` if it does not.
        """

    @abstractmethod
    def roll_call(self, largest: int) -> RollCall:
        """A roll call, in whose calls no rank answers more than ``largest``; each is as one sum."""

    def note(self, number: int, value: int) -> None:
        """Leave a note for the others, if the line keeps any; that of ``number`` is there for the next 30 or so.

        Args:
            number: counted from 1.
            value: above 0, and less than 2 to the power of 52.
        """

    def noted(self, rank: int, number: int) -> int | None:
        """A rank's note of that number; ``None`` if it has left none yet."""
        return None

    def watch(self, look: Callable[[], None] | None) -> None:
        """Have ``look`` called now and then while this rank waits for a sum, if ranks can read each other's notes.

        Args:
            look: may raise, and be called again in the next wait; ``None`` for nothing.
        """

    def restart(self) -> None:
        """Take back this rank's notes, and what it gave to sums that others may not have come to; both count anew.

        All ranks call it where nothing is under way, and meet afterwards, before they use the line.
        """

    def lost(self) -> list[int]:
        """The ranks whose processes are gone, where a sum does not fail on account of them: they had given theirs."""
        return []


class GroupLine(Line):
    """Sums are all-reduces, in the order of everything else on their collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    @override
    def sum(self, number: int, bits: int, seconds: float | None = None) -> Sum:
        # Of several words, all but the last need room for what is to be carried.
        size = _WORD_BITS if bits <= _WORD_BITS else _WORD_BITS - self._collective.world_size.bit_length()
        mask = (1 << size) - 1
        words = torch.tensor([number >> shift & mask for shift in range(0, bits, size)])
        if seconds is None:
            return _GroupSum(self._collective.all_reduce(words), words, size)
        return _GroupSum(self._collective.all_reduce_for(words, seconds), words, size)

    @override
    def roll_call(self, largest: int) -> RollCall:
        return SummedRollCall(self, self._collective.rank, self._collective.world_size, largest)


class _GroupSum:
    """An all-reduce of words of some bits each."""

    def __init__(self, work: Work, words: torch.Tensor, size: int) -> None:
        self._work, self._words, self._size = work, words, size
        self.is_completed = work.is_completed
        self.nbytes = words.nbytes

    def wait(self, *timeout: timedelta) -> bool:
        return self._work.wait(*timeout)

    def total(self) -> int:
        return sum(word << place * self._size for place, word in enumerate(cast("list[int]", self._words.tolist())))
