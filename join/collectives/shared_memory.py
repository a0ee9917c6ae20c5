"""A line between the ranks of one machine, through memory that they share: :class:`SharedMemoryLine`.

A small all-reduce over sockets costs a rank system calls and switches between threads, at every step. Here it is a few
stores to memory, and a few loads when the sum is read. Nobody is woken up: a rank that has to wait looks again and
again, at intervals that grow with the time it has waited.

A rank has four places for its numbers and uses them in turn, so it may write the next ones while others still read the
last. A number takes two cells of 64 bits; each holds 32 bits of it and the count of the sum that it is for, and is
written at once, so nothing relies on the order in which others see cells change.

Every rank holds a lock on a byte of the file for as long as its process lives; whoever waits for long tries the locks
of those that it waits for. The file has lost its name by the time the line is used, so nothing is left of it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from typing_extensions import override

from join.collectives.base import Collective
from join.collectives.line import Line, Sum

SWITCH = "JOIN_SHARED_MEMORY"
"""The environment variable that is 0 where headers are to go over the process group."""

_FOLDER = Path("/dev/shm")  # it must be memory: on a disk, every change would be written to it sooner or later
_PLACES = 4
_WORDS = 32  # the most of one sum; a longer one goes over the group
_NOTES = 32  # that are kept of a rank; they are behind its places
_CELLS = 2 * _WORDS  # of a place
_CELLS_OF_RANK = _PLACES * _CELLS + 2 * _NOTES
_HALF = 1 << 32
_LONGEST_PAUSE, _PAUSE = 1e-3, 1 / 16  # seconds, and the share of the time waited so far
_WITHOUT_PAUSE = 1e-4  # seconds in which a rank that waits only lets others run
_LOOK_SECONDS = 0.25  # how often a rank that waits looks whether the others are alive


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
        weakref.finalize(self, os.close, file)
        self._file = file
        self.cells = memoryview(mmap.mmap(file, self.size_for(world_size))).cast("Q")

    @staticmethod
    def size_for(world_size: int) -> int:
        """Bytes of a segment."""
        return world_size * _CELLS_OF_RANK * 8

    def place(self, rank: int, count: int) -> int:
        """The first cell of what a rank gives to a sum."""
        return rank * _CELLS_OF_RANK + count % _PLACES * _CELLS

    def note(self, rank: int, number: int) -> int:
        """The first cell of a rank's note."""
        return rank * _CELLS_OF_RANK + _PLACES * _CELLS + 2 * (number % _NOTES)

    def store(self, cell: int, word: int, tag: int) -> None:
        """Write a number of 63 bits at most into two cells, with 32 bits that tell what it is for."""
        high, low = divmod(word, _HALF)
        self.cells[cell], self.cells[cell + 1] = low * _HALF + tag, high * _HALF + tag

    def load(self, cell: int, tag: int) -> int | None:
        """The number in two cells; ``None`` if it is for something else, or they are just being written."""
        low, low_tag = divmod(self.cells[cell], _HALF)
        high, high_tag = divmod(self.cells[cell + 1], _HALF)
        return high * _HALF + low if low_tag == high_tag == tag else None

    def has_ended(self, rank: int) -> bool:
        """Whether the process of another rank is gone."""
        return _can_lock(self._file, rank, keep=False)


class SharedMemoryLine(Line):
    """Sums through shared memory.

    Args:
        segment: the memory.
        otherwise: makes the line for sums of too many words.
    """

    keeps_notes = True

    def __init__(self, segment: Segment, otherwise: Callable[[], Line]) -> None:
        self._segment, self._otherwise = segment, otherwise

    @override
    def sum(self, words: Sequence[int], seconds: float | None = None) -> Sum:
        if len(words) > _WORDS:
            return self._otherwise().sum(words, seconds)
        segment = self._segment
        segment.count += 1
        place = segment.place(segment.rank, segment.count)
        for index, word in enumerate(words):
            segment.store(place + 2 * index, word, segment.count % _HALF)
        return _Sum(segment, len(words), segment.count)

    @override
    def note(self, number: int, value: int) -> None:
        segment = self._segment
        segment.store(segment.note(segment.rank, number), value, number % _HALF)

    @override
    def noted(self, rank: int, number: int) -> int | None:
        return self._segment.load(self._segment.note(rank, number), number % _HALF)

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

    def __init__(self, segment: Segment, length: int, count: int) -> None:
        self._segment, self._count = segment, count
        self._totals = [0] * length
        self._next = 0  # the first rank whose numbers are not in the totals
        self._failure = ""

    def is_completed(self) -> bool:
        """Whether all ranks have given their numbers, or will not."""
        world_size = self._segment.world_size
        if self._next == world_size or self._failure:
            return True
        while self._next < world_size:
            words = self._given(self._next)
            if words is None:
                return bool(self._failure)
            self._totals = [total + word for total, word in zip(self._totals, words, strict=True)]
            self._next += 1
        return True

    def words(self) -> list[int]:
        """The sums."""
        return self._totals

    def _given(self, rank: int) -> list[int] | None:
        """A rank's numbers, if they are there."""
        segment, tag = self._segment, self._count % _HALF
        place = segment.place(rank, self._count)
        words: list[int] = []
        for index in range(len(self._totals)):
            word = segment.load(place + 2 * index, tag)
            if word is None:
                if 0 < (segment.cells[place] - tag) % _HALF < _HALF // 2:
                    self._failure = f"rank {rank} has gone on without this rank {segment.rank}"
                return None
            words.append(word)
        return words

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
                # It may have given its numbers as its last act.
                if self._segment.has_ended(self._next) and not self.is_completed():
                    self._failure = f"the process of rank {self._next} has ended, or has left the group"
            time.sleep(0.0 if waited < _WITHOUT_PAUSE else min(waited * _PAUSE, _LONGEST_PAUSE))


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
