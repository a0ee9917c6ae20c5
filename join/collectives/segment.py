"""Memory that the ranks of one machine share: :class:`Segment`.

It is made of cells of 64 bits, each of which is written at once, so that nothing relies on the order in which others
see cells change. A rank has four places for its numbers and uses them in turn, so it may write the next one while
others still read the last; each cell holds 32 bits of a number and the count that it is for. Behind the places are the
rank's notes, a cell each.

Every rank holds a lock on a byte of the file for as long as its process lives; whoever waits for long tries the locks
of those that it waits for. The file has lost its name by the time the memory is used, so nothing is left of it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path

from join.collectives.base import Collective

SWITCH = "JOIN_SHARED_MEMORY"
"""The environment variable that is 0 where headers are to go over the process group."""

_FOLDER = Path("/dev/shm")  # it must be memory: on a disk, every change would be written to it sooner or later
PLACES = 4
"""In which a rank's numbers lie."""
CELLS = 64
"""Of a place; a longer number goes over the group."""
NOTES = 32
"""That are kept of a rank."""
_CELLS_OF_RANK = PLACES * CELLS + NOTES
BITS = 32
"""Of a cell of a place are the number's."""
LOW = (1 << BITS) - 1
"""The others: the count."""


class Segment:
    """The memory of one line.

    Args:
        file: the open file, in which this rank's byte is locked; it is closed with the segment.
        rank: this rank.
        world_size: the number of ranks.
        patience: seconds after which something that does not come is an error.
    """

    def __init__(self, file: int, rank: int, world_size: int, patience: float) -> None:
        self.rank, self.world_size, self.patience = rank, world_size, patience
        self.count = 0
        """How many numbers this rank has given."""
        self.look: Callable[[], None] | None = None
        """Called now and then by a rank that waits."""
        weakref.finalize(self, os.close, file)
        self._file = file
        self.cells = memoryview(mmap.mmap(file, self.size_for(world_size))).cast("Q")
        firsts = range(0, world_size * _CELLS_OF_RANK, _CELLS_OF_RANK)
        self.places = [[first + place * CELLS for first in firsts] for place in range(PLACES)]
        """The first cell of each rank, by place."""
        self.others = [each for each in range(world_size) if each != rank]
        """The other ranks."""

    @staticmethod
    def size_for(world_size: int) -> int:
        """Bytes of a segment."""
        return world_size * _CELLS_OF_RANK * 8

    def give(self, number: int) -> int:
        """Store this rank's next number, in one cell; its count."""
        count = self.count = self.count + 1
        self.cells[self.places[count % PLACES][self.rank]] = number << BITS | count & LOW
        return count

    def give_long(self, number: int, width: int) -> int:
        """Store this rank's next number, in so many cells; its count."""
        count = self.count = self.count + 1
        first = self.places[count % PLACES][self.rank]
        for at in range(first, first + width):
            self.cells[at] = (number & LOW) << BITS | count & LOW
            number >>= BITS
        return count

    def ahead(self, rank: int, count: int) -> int:
        """By how many numbers what is in a rank's place for a count is later than that, as far as can be told."""
        return self.cells[self.places[count % PLACES][rank]] - count & LOW

    def notes(self, rank: int) -> memoryview:
        """The cells of a rank's notes."""
        begin = self.places[0][rank] + PLACES * CELLS
        return self.cells[begin : begin + NOTES]

    def restart(self) -> None:
        """Take back all that this rank has written, and count anew."""
        self.count = 0
        first = self.places[0][self.rank]
        for cell in range(first, first + _CELLS_OF_RANK):
            self.cells[cell] = 0

    def has_ended(self, rank: int) -> bool:
        """Whether the process of another rank is gone."""
        return _can_lock(self._file, rank, keep=False)


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
