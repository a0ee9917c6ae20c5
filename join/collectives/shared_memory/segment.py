"""Memory that the ranks of one machine share: :class:`Segment`, made of a :class:`Lane` for each line, and a board.

Cells are 64 bits, each of which is written at once, so that a number is whole wherever it is seen. That what its rank
has written before it, such as a note on the board, is then seen, too, holds on x86 only; elsewhere this is not used. In
a lane a rank has four places for its numbers and uses them in turn, so it may write the next one while others still
read the last; each cell holds 32 bits of a number and the count that it is for. Behind the lanes are the rank's
messages for the board.

The memory has no name: rank 0 makes it, and the others open it through rank 0's process, which only the same user can.
So nothing is left of it, whenever a process ends. Every rank holds a lock on a byte of it for as long as its process
lives; whoever waits for long tries the locks of those that it waits for.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import secrets
import struct
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from typing_extensions import final, override

from join.collectives.base import Collective
from join.collectives.board import Board, Kind
from join.collectives.control_line import SUMS

SWITCH = "JOIN_SHARED_MEMORY"
"""The environment variable that is 0 where headers are to go over the process group."""

_LANES = SUMS + 1
PLACES = 4
"""How many numbers of a rank a lane holds: each is written to the place of the oldest."""
CELLS = 64
"""How many cells a place has. A number that needs more goes over the process group."""
BITS = 32
"""How many bits of a cell hold a part of the number; the others hold the count."""
LOW = (1 << BITS) - 1
_CELLS_OF_RANK = _LANES * PLACES * CELLS
_SLOTS: dict[Kind, int] = {"note": 16384, "told": 2048}  # bytes for a rank's messages
_HEAD = "=IIQ"  # before each: its length, its checksum, and the number of the block
_BELL = 8  # bytes
_ORDERED = ("x86_64", "AMD64")  # processors on which a rank that sees a cell has seen what was written before it


class Lane:
    """The memory of the line of this number; if others do not give theirs for ``timeout`` seconds, that is an error."""

    def __init__(self, segment: Segment, number: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = segment.rank, segment.world_size, timeout
        self.cells, self.others, self.has_ended = segment.cells, segment.others, segment.has_ended
        self.count = 0
        """How many numbers this rank has given."""
        begin = number * PLACES * CELLS
        firsts = range(begin, begin + self.world_size * _CELLS_OF_RANK, _CELLS_OF_RANK)
        self.places = [[first + place * CELLS for first in firsts] for place in range(PLACES)]
        """The first cell of each rank, by place."""

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
        """How many numbers newer than number ``count`` the one in the rank's place is, modulo 2**32; 0 for that one."""
        return self.cells[self.places[count % PLACES][rank]] - count & LOW

    def restart(self) -> None:
        """Take back all numbers that this rank has given, and count anew."""
        self.count = 0
        first = self.places[0][self.rank]
        for cell in range(first, first + PLACES * CELLS):
            self.cells[cell] = 0


class Segment:
    """The memory that all ranks share: an open file, in which this rank's byte is locked, and which it closes."""

    def __init__(self, file: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.others = [each for each in range(world_size) if each != rank]
        weakref.finalize(self, os.close, file)
        self._file = file
        self.memory = mmap.mmap(file, self.size_for(world_size))
        self.cells = memoryview(self.memory)[: world_size * _CELLS_OF_RANK * 8].cast("Q")

    @staticmethod
    def size_for(world_size: int) -> int:
        """Bytes of a segment."""
        return world_size * (_CELLS_OF_RANK * 8 + sum(_SLOTS.values())) + _BELL

    def has_ended(self, rank: int) -> bool:
        """Whether the process of another rank is gone."""
        return _can_lock(self._file, rank, keep=False)


@final
class SharedBoard(Board):
    """Messages in shared memory: each has a place of its own, and a checksum, since readers may come amid a change."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment.rank, segment.world_size)
        self._segment, self._memory = segment, segment.memory
        self._begin = self.world_size * _CELLS_OF_RANK * 8
        self._bell = len(self._memory) - _BELL

    def _slot(self, kind: Kind, rank: int) -> tuple[int, int]:
        """Where a message begins, and where it ends at most."""
        before = 0 if kind == "note" else self.world_size * _SLOTS["note"]
        begin = self._begin + before + rank * _SLOTS[kind]
        return begin, begin + _SLOTS[kind]

    @override
    def ring(self) -> None:
        self._memory[self._bell :] = self.block.to_bytes(_BELL, "little")

    @override
    def is_rung(self) -> bool:
        return int.from_bytes(self._memory[self._bell :], "little") == self.block

    @override
    def ended(self) -> list[int]:
        return [rank for rank in self._segment.others if self._segment.has_ended(rank)]

    @override
    def _put(self, kind: Kind, text: str) -> None:
        begin, end = self._slot(kind, self.rank)
        data = text.encode()
        head = struct.pack(_HEAD, len(data), zlib.crc32(data), self.block)
        assert len(head) + len(data) <= end - begin
        self._memory[begin : begin + len(head) + len(data)] = head + data

    @override
    def _found(self, kind: Kind) -> list[str]:
        found = (self._read(*self._slot(kind, rank)) for rank in range(self.world_size))
        return [text for text in found if text]

    def _read(self, begin: int, end: int) -> str:
        size, checksum, block = struct.unpack_from(_HEAD, self._memory, begin)
        begin += struct.calcsize(_HEAD)
        data = self._memory[begin : min(begin + size, end)]
        return data.decode() if block == self.block and zlib.crc32(data) == checksum else ""


class _Address(NamedTuple):
    """Where the memory of rank 0 is found: on which machine, in which process, and as which of its files."""

    machine: str
    process: int
    file: int
    name: str

    @property
    def path(self) -> str:
        return f"/proc/{self.process}/fd/{self.file}"


def connect(collective: Collective) -> Segment | None:
    """Connect all ranks, which call this, through memory; ``None`` on all of them if one cannot be reached so."""
    rank, world_size = collective.rank, collective.world_size
    made: _Address | None = None
    if rank == 0 and not obstacle():
        with suppress(OSError):
            made = _made(world_size)
    address: _Address | None = collective.broadcast_object(made, 0)
    # A second file that is closed again would let go of the lock; so rank 0 keeps the one that it has made.
    file = None if address is None else address.file if rank == 0 else _opened(address)
    segment: Segment | None = None
    if file is not None:
        _can_lock(file, rank, keep=True)
        with suppress(OSError):
            segment = Segment(file, rank, world_size)
    return segment if collective.reduce_boolean_decision(segment is not None) else None


def obstacle() -> str:
    """Why this process is not to share memory with others, in half a sentence; empty if it is."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 forbids it"
    if platform.machine() not in _ORDERED:
        return f"ranks rely on the order in which they see memory change, which {platform.machine()} does not keep"
    return ""


def obstacle_found(world_size: int) -> str:
    """Why ranks on this machine cannot share memory: like :func:`obstacle`, but makes and opens some, and frees it."""
    if why := obstacle():
        return why
    try:
        made = _made(world_size)
    except OSError as error:
        return f"there is no memory for it: {error}"
    opened = _opened(made)
    os.close(made.file)
    if opened is None:
        return f"processes cannot open each other's files by names such as {made.path}"
    os.close(opened)
    return ""


def _machine() -> str:
    """What only processes have in common that see the same processes under the same numbers."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _made(world_size: int) -> _Address:
    """Make the memory; an ``OSError`` says why that is impossible."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    name = f"join-{secrets.token_hex(16)}"
    file = os.memfd_create(name)
    try:
        os.fchmod(file, 0o600)
        os.posix_fallocate(file, 0, Segment.size_for(world_size))  # where memory is short, this says so
        return _Address(_machine(), os.getpid(), file, name)
    except OSError:
        os.close(file)
        raise


def _opened(address: _Address) -> int | None:
    """The memory of rank 0, opened; ``None`` if it is not there, or not wanted."""
    try:
        # On another machine the same path may be anything.
        if obstacle() or _machine() != address.machine or address.name not in os.readlink(address.path):
            return None
        return os.open(address.path, os.O_RDWR)
    except OSError:
        return None


def _can_lock(file: int, rank: int, *, keep: bool) -> bool:
    """Lock a rank's byte, unless another process has; let go of it at once, or keep it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError:
        return False
    if not keep:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, rank)
    return True
