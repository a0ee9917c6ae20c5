"""Lines between the ranks of one machine, through memory that they share: :class:`SharedMemoryLine`.

A small all-reduce over sockets costs a rank system calls and switches between threads, at every step. Here it is a few
stores to memory, and a few loads when the sum is read; a roll call needs no sum, each rank reads the answers of the
others. Nobody is woken up: a rank that has to wait looks again and again, at intervals that grow with the time it has
waited.

No sum relies on the order in which others see memory change (``join.collectives.shared_memory.segment``).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import final

from typing_extensions import override

from join.collectives._torch_private import profiled
from join.collectives.broken import BrokenCollective
from join.collectives.control_line import FloatSum, Line, RollCall, Sum, SummedRollCall
from join.collectives.shared_memory.segment import BITS, CELLS, LOW, PLACES, Lane
from join.collectives.timeouts import timeouts

_LONGEST_PAUSE, _PAUSE = 1e-3, 1 / 16  # seconds, and the share of the time waited so far
_WITHOUT_PAUSE = 1e-4  # seconds in which a rank that waits only lets others run


class SharedMemoryLine(Line):
    """Sums and roll calls through a lane of shared memory; ``otherwise`` makes the line for numbers too long for it."""

    def __init__(self, lane: Lane, otherwise: Callable[[], Line]) -> None:
        self._lane, self._otherwise = lane, otherwise

    @override
    def sum(self, number: int, bits: int) -> Sum:
        width = -(-bits // BITS)
        return _Sum(self._lane, number, width) if width <= CELLS else self._otherwise().sum(number, bits)

    @override
    def sum_float(self, number: float) -> FloatSum:
        return _FloatSum(self._lane, number)

    @override
    def roll_call(self, largest: int) -> RollCall:
        width = -(-largest.bit_length() // BITS)
        if width <= CELLS:
            return _RollCall(self._lane, width)
        return SummedRollCall(self, self._lane.rank, self._lane.world_size, largest)

    @override
    def restart(self) -> None:
        self._lane.restart()


class _Arrivals:
    """The numbers that all ranks give for one count of a lane, in ``width`` cells each, as they arrive."""

    def __init__(self, lane: Lane, width: int) -> None:
        self._lane, self._width = lane, width
        self.nbytes = 8 * width
        self._numbers = [0] * lane.world_size

    def _give(self, number: int) -> None:
        """Give this rank's number, and wait for those of the others."""
        lane = self._lane
        self._numbers[lane.rank] = number
        self._count = lane.give(number) if self._width == 1 else lane.give_long(number, self._width)
        self._next = 0  # the first rank whose number was not read
        self._failure: BrokenCollective | None = None
        self._waits_since: float | None = None

    def is_completed(self) -> bool:
        """Whether all ranks have given theirs, or will not."""
        lane = self._lane
        if self._next < lane.world_size and self._failure is None:
            self._next = self._read(self._next)
            if self._next < lane.world_size and 0 < lane.ahead(self._next, self._count) < LOW // 2:
                self._failure = BrokenCollective(f"rank {self._next} has gone on without this rank {lane.rank}")
        return self._next == lane.world_size or self._failure is not None

    def _read(self, first: int) -> int:
        """Read the numbers of others, from rank ``first`` on; the first whose is missing, or the world size."""
        lane, count = self._lane, self._count
        cells, tag, firsts = lane.cells, count & LOW, lane.places[count % PLACES]
        for rank in lane.others:
            if rank < first:
                continue
            number, begin = 0, firsts[rank]
            for at in range(begin + self._width - 1, begin - 1, -1):
                cell = cells[at]
                if cell & LOW != tag:
                    return rank
                number = number << BITS | cell >> BITS
            self._numbers[rank] = number
        return lane.world_size

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Wait for all ranks.

        Raises:
            RuntimeError: if they do not come in time, after which waiting again is allowed.
            BrokenCollective: if one of them is gone, or does not come within the time limit of the group.
        """
        if self._next < self._lane.world_size and not self.is_completed():
            started, limit = time.monotonic(), self._lane.timeout if timeout is None else timeout.total_seconds()
            self._waits_since = self._waits_since or started
            while not self.is_completed():
                with profiled("wait for rank", self._next):
                    self._wait_for(self._next, started, limit)
        if self._failure is not None:
            raise self._failure
        return True

    def _wait_for(self, rank: int, started: float, limit: float) -> None:
        """Wait until ``rank`` comes, or does not by ``limit`` seconds after ``started``."""
        looked = 0.0
        while self._next == rank and not self.is_completed():
            waited = time.monotonic() - started
            if waited >= min(looked + timeouts().look, limit):
                looked = waited
                self._see_whether_it_comes()
                if waited >= limit and self._failure is None:
                    raise RuntimeError(
                        f"timed out after {limit:g} s: rank {self._next} did not come; see what it does, or allow more"
                        " time [J039]"
                    )
            time.sleep(0.0 if waited < _WITHOUT_PAUSE else min(waited * _PAUSE, _LONGEST_PAUSE))

    def _see_whether_it_comes(self) -> None:
        rank, timeout = self._next, self._lane.timeout
        assert self._waits_since is not None
        if self._lane.has_ended(rank) and not self.is_completed():  # it may have given its number as its last act
            self._failure = BrokenCollective(f"the process of rank {rank} has ended, or has left the group", [rank])
        elif time.monotonic() - self._waits_since > timeout:
            self._failure = BrokenCollective(f"timed out after {timeout:g} s: rank {rank} did not come")


@final
class _Sum(_Arrivals):
    """One sum."""

    def __init__(self, lane: Lane, number: int, width: int) -> None:
        super().__init__(lane, width)
        self._give(number)

    def total(self) -> int:
        """The sum."""
        return sum(self._numbers)


@final
class _FloatSum(_Arrivals):
    """One sum of floating-point numbers, of which each rank adds up the same bits in the same order."""

    def __init__(self, lane: Lane, number: float) -> None:
        super().__init__(lane, 2)
        (bits,) = struct.unpack("Q", struct.pack("d", number))
        self._give(bits)

    def total(self) -> float:
        """The sum."""
        return sum(struct.unpack(f"{len(self._numbers)}d", struct.pack(f"{len(self._numbers)}Q", *self._numbers)))


@final
class _RollCall(_Arrivals, RollCall):
    """Roll calls in which an answer is some cells."""

    @override
    def call(self, mine: int) -> None:
        self._give(mine)

    @override
    def answers(self) -> list[int]:
        return list(self._numbers)
