"""Lines between the ranks of one machine, through memory that they share: :class:`SharedMemoryLine`.

A small all-reduce over sockets costs a rank system calls and switches between threads, at every step. Here it is a few
stores to memory, and a few loads when the sum is read; a roll call needs no sum, each rank reads the answers of the
others. Nobody is woken up: a rank that has to wait looks again and again, at intervals that grow with the time it has
waited.

No sum relies on the order in which others see memory change (``join.collectives.segment``). ``Line.watch`` does: who
sees a note takes the sums before it for seen, as they are on x86.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import final

from typing_extensions import override

from join.collectives.line import Line, Sum
from join.collectives.roll_call import RollCall, SummedRollCall
from join.collectives.segment import BITS, CELLS, LOW, NOTES, PLACES, Segment

_TAG_BITS = 12  # of a note's cell: the last ones of its number
_TAG = (1 << _TAG_BITS) - 1
_LONGEST_PAUSE, _PAUSE = 1e-3, 1 / 16  # seconds, and the share of the time waited so far
_WITHOUT_PAUSE = 1e-4  # seconds in which a rank that waits only lets others run
_LOOK_SECONDS = 0.25  # how often a rank that waits looks whether the others are alive, and what they do


class SharedMemoryLine(Line):
    """Sums and roll calls through shared memory.

    Args:
        segment: the memory.
        otherwise: makes the line for numbers that are too long.
    """

    keeps_notes = True

    def __init__(self, segment: Segment, otherwise: Callable[[], Line]) -> None:
        self._segment, self._otherwise = segment, otherwise
        self._notes = [segment.notes(rank) for rank in range(segment.world_size)]
        self._own_notes = self._notes[segment.rank]

    @override
    def sum(self, number: int, bits: int, seconds: float | None = None) -> Sum:
        width = -(-bits // BITS)
        return _Sum(self._segment, number, width) if width <= CELLS else self._otherwise().sum(number, bits, seconds)

    @override
    def roll_call(self, largest: int) -> RollCall:
        if largest <= LOW:
            return _RollCall(self._segment)
        return SummedRollCall(self, self._segment.rank, self._segment.world_size, largest)

    @override
    def note(self, number: int, value: int) -> None:
        self._own_notes[number % NOTES] = value << _TAG_BITS | number & _TAG

    @override
    def noted(self, rank: int, number: int) -> int | None:
        cell = self._notes[rank][number % NOTES]
        return cell >> _TAG_BITS if cell and (cell ^ number) & _TAG == 0 else None

    @override
    def watch(self, look: Callable[[], None] | None) -> None:
        self._segment.look = look

    @override
    def restart(self) -> None:
        self._segment.restart()

    @override
    def lost(self) -> list[int]:
        return [rank for rank in self._segment.others if self._segment.has_ended(rank)]


class _Arrivals:
    """What the ranks give to one count.

    Args:
        segment: the memory.
        width: how many cells of a place it takes.
    """

    def __init__(self, segment: Segment, width: int) -> None:
        self._segment, self._width = segment, width
        self._count = 0
        self._numbers = [0] * segment.world_size
        self._next = 0  # the first rank whose number was not read
        self._failure = ""
        self.nbytes = 8 * width

    def is_completed(self) -> bool:
        """Whether all ranks have given theirs, or will not."""
        segment = self._segment
        if self._next < segment.world_size and not self._failure:
            self._next = self._read(self._next)
            if self._next < segment.world_size and 0 < segment.ahead(self._next, self._count) < LOW // 2:
                self._failure = f"rank {self._next} has gone on without this rank {segment.rank}"
        return self._next == segment.world_size or bool(self._failure)

    def _read(self, first: int) -> int:
        """Read the numbers of the other ranks, from ``first`` on, as far as they are there.

        Returns:
            The first rank whose number is not; the world size if there is none.
        """
        segment, count = self._segment, self._count
        cells, tag, firsts = segment.cells, count & LOW, segment.places[count % PLACES]
        for rank in segment.others:
            if rank < first:
                continue
            number, begin = 0, firsts[rank]
            for at in range(begin + self._width - 1, begin - 1, -1):
                cell = cells[at]
                if cell & LOW != tag:
                    return rank
                number = number << BITS | cell >> BITS
            self._numbers[rank] = number
        return segment.world_size

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Wait for all ranks.

        Raises:
            RuntimeError: if they do not come in time, after which waiting again is allowed; or if one of them is gone.
        """
        if not self.is_completed():
            self._wait(self._segment.patience if timeout is None else timeout.total_seconds())
        if self._failure:
            raise RuntimeError(self._failure)
        return True

    def _wait(self, limit: float) -> None:
        started, looked = time.monotonic(), 0.0
        while not self.is_completed():
            waited = time.monotonic() - started
            if waited > limit:
                raise RuntimeError(f"timed out after {limit:g} s: rank {self._next} did not come")
            if waited - looked > _LOOK_SECONDS:
                looked = waited
                # It may have given its number as its last act.
                if self._segment.has_ended(self._next) and not self.is_completed():
                    self._failure = f"the process of rank {self._next} has ended, or has left the group"
                elif self._segment.look is not None:
                    self._look(self._segment.look)
            time.sleep(0.0 if waited < _WITHOUT_PAUSE else min(waited * _PAUSE, _LONGEST_PAUSE))

    def _look(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception:  # of what it saw: that may come behind this count, if it is done by now
            if not self.is_completed():
                raise


@final
class _Sum(_Arrivals):
    """One sum."""

    def __init__(self, segment: Segment, number: int, width: int) -> None:
        super().__init__(segment, width)
        self._numbers[segment.rank] = number
        self._count = segment.give(number) if width == 1 else segment.give_long(number, width)

    def total(self) -> int:
        """The sum."""
        return sum(self._numbers)


@final
class _RollCall(_Arrivals, RollCall):
    """Roll calls in which an answer is one cell."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment, 1)
        self._answers: list[int] = []
        self._told: list[list[tuple[int, int]]] = []  # by place: all cells, and what is in them but for the count

    @override
    def call(self, mine: int, seconds: float | None = None) -> None:
        self._numbers[self._segment.rank] = mine
        self._count = self._segment.give(mine)
        self._next, self._failure = 0, ""

    @override
    def repeats(self) -> bool:
        repeats = bool(self._told)
        if repeats:
            cells, tag = self._segment.cells, self._count & LOW
            for at, told in self._told[self._count % PLACES]:
                repeats &= cells[at] == told | tag
        return repeats

    @override
    def answers(self) -> list[int]:
        if self._numbers != self._answers:
            self._answers = list(self._numbers)
            told = [number << BITS for number in self._numbers]
            self._told = [list(zip(places, told, strict=True)) for places in self._segment.places]
        return self._answers
