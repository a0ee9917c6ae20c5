"""A line between the ranks of one machine, through memory that they share: :class:`SharedMemoryLine`.

A small all-reduce over sockets costs a rank system calls and switches between threads, at every step. Here it is a few
stores to memory, and a few loads when the sum is read. Nobody is woken up: a rank that has to wait looks again and
again, at intervals that grow with the time it has waited.

A rank has four places for its numbers and uses them in turn, so it may write the next one while others still read the
last. A number takes as many cells of 64 bits as it needs; each holds 32 bits of it and the count of the sum that it is
for, and is written at once, so no sum relies on the order in which others see cells change. (``Line.watch`` does: who
sees a note takes the sums before it for seen, as they are on x86.)

Every rank holds a lock on a byte of the file for as long as its process lives; whoever waits for long tries the locks
of those that it waits for. The file has lost its name by the time the line is used, so nothing is left of it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from typing_extensions import override

from join.collectives.base import Collective
from join.collectives.line import Line, Sum

SWITCH = "JOIN_SHARED_MEMORY"
"""The environment variable that is 0 where headers are to go over the process group."""

_FOLDER = Path("/dev/shm")  # it must be memory: on a disk, every change would be written to it sooner or later
_PLACES = 4
_CELLS = 64  # of a place; a longer number goes over the group
_NOTES = 32  # that are kept of a rank, of two cells each; they are behind its places
_CELLS_OF_RANK = _PLACES * _CELLS + 2 * _NOTES
_BITS = 32  # of a cell are the number's; the others tell what it is for
_LOW = (1 << _BITS) - 1
_LONGEST_PAUSE, _PAUSE = 1e-3, 1 / 16  # seconds, and the share of the time waited so far
_WITHOUT_PAUSE = 1e-4  # seconds in which a rank that waits only lets others run
_LOOK_SECONDS = 0.25  # how often a rank that waits looks whether the others are alive, and what they do


class Segment:
    """The memory of one line.

    Args:
        file: the open file, in which this rank's byte is locked; it is closed with the segment.
        rank: this rank.
        world_size: the number of ranks.
        patience: seconds after which a sum that does not come is an error.
    """

    def __init__(self, file: int, rank: int, world_size: int, patience: float) -> None:
        self.rank, self.world_size, self.patience = rank, world_size, patience
        self.count = 0
        """How many sums this rank has started."""
        self.look: Callable[[], None] | None = None
        """Called now and then by a rank that waits."""
        weakref.finalize(self, os.close, file)
        self._file = file
        self.cells = memoryview(mmap.mmap(file, self.size_for(world_size))).cast("Q")

    @staticmethod
    def size_for(world_size: int) -> int:
        """Bytes of a segment."""
        return world_size * _CELLS_OF_RANK * 8

    def give(self, number: int, width: int) -> int:
        """Store this rank's number for the next sum, in so many cells; the count of the sum."""
        count = self.count = self.count + 1
        self.store(self.rank * _CELLS_OF_RANK + count % _PLACES * _CELLS, number, width, count)
        return count

    def add(self, total: int, first: int, width: int, count: int) -> tuple[int, int]:
        """Add what the other ranks have given to a sum, from rank ``first`` on, as far as it is there.

        Returns:
            The total, and the first rank whose number is not in it; the world size if there is none.
        """
        cells, tag, place = self.cells, count & _LOW, count % _PLACES * _CELLS
        for rank in range(first, self.world_size):
            if rank == self.rank:
                continue
            number, begin = 0, rank * _CELLS_OF_RANK + place
            for at in range(begin + width - 1, begin - 1, -1):
                cell = cells[at]
                if cell & _LOW != tag:
                    return total, rank
                number = number << _BITS | cell >> _BITS
            total += number
        return total, self.world_size

    def ahead(self, rank: int, count: int) -> int:
        """By how many sums a rank's number in the place of a sum is later than that, as far as can be told."""
        return self.cells[rank * _CELLS_OF_RANK + count % _PLACES * _CELLS] - count & _LOW

    def note(self, rank: int, number: int) -> int:
        """The first cell of a rank's note."""
        return rank * _CELLS_OF_RANK + _PLACES * _CELLS + 2 * (number % _NOTES)

    def store(self, cell: int, number: int, width: int, count: int) -> None:
        """Write a number into so many cells, with what it is for.

        Args:
            cell: the first.
            number: the number.
            width: how many cells.
            count: what it is for.
        """
        cells, tag = self.cells, count & _LOW
        for at in range(cell, cell + width):
            cells[at] = (number & _LOW) << _BITS | tag
            number >>= _BITS

    def load(self, cell: int, count: int) -> int | None:
        """A number of two cells that was stored; ``None`` if it is for something else, or is just being written."""
        low, high, tag = self.cells[cell], self.cells[cell + 1], count & _LOW
        return None if low & _LOW != tag or high & _LOW != tag else high - tag | low >> _BITS

    def has_ended(self, rank: int) -> bool:
        """Whether the process of another rank is gone."""
        return _can_lock(self._file, rank, keep=False)


class SharedMemoryLine(Line):
    """Sums through shared memory.

    Args:
        segment: the memory.
        otherwise: makes the line for numbers that are too long.
    """

    keeps_notes = True

    def __init__(self, segment: Segment, otherwise: Callable[[], Line]) -> None:
        self._segment, self._otherwise = segment, otherwise
        self._notes = segment.note(segment.rank, 0)

    @override
    def sum(self, number: int, bits: int, seconds: float | None = None) -> Sum:
        width = -(-bits // _BITS)
        return _Sum(self._segment, number, width) if width <= _CELLS else self._otherwise().sum(number, bits, seconds)

    @override
    def note(self, number: int, value: int) -> None:
        self._segment.store(self._notes + 2 * (number % _NOTES), value, 2, number)

    @override
    def noted(self, rank: int, number: int) -> int | None:
        return self._segment.load(self._segment.note(rank, number), number)

    @override
    def watch(self, look: Callable[[], None] | None) -> None:
        self._segment.look = look

    @override
    def restart(self) -> None:
        segment = self._segment
        segment.count = 0
        for cell in range(segment.rank * _CELLS_OF_RANK, (segment.rank + 1) * _CELLS_OF_RANK):
            segment.cells[cell] = 0

    @override
    def lost(self) -> list[int]:
        segment = self._segment
        return [rank for rank in range(segment.world_size) if rank != segment.rank and segment.has_ended(rank)]


class _Sum:
    """One sum under way."""

    def __init__(self, segment: Segment, number: int, width: int) -> None:
        self._segment, self._total, self._width = segment, number, width
        self._count = segment.give(number, width)
        self._next = 0  # the first rank whose number is not in the total
        self._failure = ""
        self.nbytes = 8 * width

    def is_completed(self) -> bool:
        """Whether all ranks have given their numbers, or will not."""
        segment = self._segment
        if self._next < segment.world_size and not self._failure:
            self._total, self._next = segment.add(self._total, self._next, self._width, self._count)
            if self._next < segment.world_size:
                self._look_for_failure()
        return self._next == segment.world_size or bool(self._failure)

    def total(self) -> int:
        """The sum."""
        return self._total

    def _look_for_failure(self) -> None:
        """A rank's number is not there: that of a later sum may be in its place."""
        if 0 < self._segment.ahead(self._next, self._count) < _LOW // 2:
            self._failure = f"rank {self._next} has gone on without this rank {self._segment.rank}"

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
        except Exception:  # of what it saw: that may come behind this sum, if it is done by now
            if not self.is_completed():
                raise


def connect(collective: Collective, patience: float) -> Segment | None:
    """Connect all ranks through memory; ``None`` on all of them if one cannot be reached so.

    Args:
        collective: the ranks, all of which call this.
        patience: as for :class:`Segment`.
    """
    rank, world_size = collective.rank, collective.world_size
    path: str = collective.broadcast_object(_new_file(world_size) if rank == 0 else "", 0)
    file = _open(path, rank)
    all_have_it = collective.reduce_boolean_decision(file is not None)
    if rank == 0 and path:
        Path(path).unlink()
    if file is None or not all_have_it:
        if file is not None:
            os.close(file)
        return None
    return Segment(file, rank, world_size, patience)


def _new_file(world_size: int) -> str:
    """Make the file; empty if that is impossible."""
    path = _FOLDER / f"join-{secrets.token_hex(16)}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return ""
    try:
        os.posix_fallocate(file, 0, Segment.size_for(world_size))  # where memory is short, this says so
    except OSError:
        path.unlink()
        return ""
    finally:
        os.close(file)
    return str(path)


def _open(path: str, rank: int) -> int | None:
    """Open the file and lock this rank's byte of it; ``None`` if it is not there, or not wanted."""
    if not path or os.environ.get(SWITCH) == "0":
        return None
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    if _can_lock(file, rank, keep=True):
        return file
    os.close(file)
    return None


def _can_lock(file: int, rank: int, *, keep: bool) -> bool:
    """Lock a rank's byte, unless another process has; let go of it at once, or keep it."""
    import fcntl  # Windows has none, but no such file either

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError:
        return False
    if not keep:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, rank)
    return True
