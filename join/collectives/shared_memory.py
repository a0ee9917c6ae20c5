"""Lines and a board for ranks on one machine, through memory that they share: :func:`opened`.

For a small all-reduce over sockets, each rank pays for system calls and thread switches at every step. Here, a sum
takes a few stores to memory, and a few loads when it is read. No rank is woken up. A rank that has to wait polls, at
intervals that grow with the time it has waited.

Cells have 64 bits and are written atomically, so a reader never sees half a number. On x86, a reader that sees a cell
also sees everything that the rank wrote before it, such as a note on the board. Other processors do not ensure this
order and do not use this module, although no sum relies on the order. In a lane, a rank has four places for its numbers
and uses them in turn, so it may write the next number while others still read the last one. Each cell has 32 bits of a
number and the count of the operation that the number is for. Behind the lanes are the messages of the ranks for the
board.

The memory has no name. Rank 0 creates it, and the others open it through rank 0's process, which only the same user can
do. So no memory is left behind, whenever a process ends. Every rank holds a lock on one byte of it as long as its
process lives. A rank that has waited for a while tests the locks of the ranks that it waits for.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import secrets
import struct
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from typing_extensions import final, override

from join.collectives._torch_private import profiled
from join.collectives.board import Board, Kind
from join.collectives.broken import BrokenCollective, timed_out
from join.collectives.line import SUMS, Line, Sum
from join.collectives.timeouts import TIMEOUTS
from join.collectives.version import VERSION

V = TypeVar("V")

SWITCH = "JOIN_SHARED_MEMORY"
"""Environment variable that is 0 if headers should be sent over the process group."""

_LANES = SUMS + 1
PLACES = 4
"""Number of places for numbers of a rank in a lane. Each number is written over the oldest one."""
CELLS = 80
"""Number of cells of a place. A number that needs more cells is sent over the process group."""
BITS = 32
"""Number of bits of a cell that hold a part of the number. The other bits hold the count."""
LOW = (1 << BITS) - 1
_CELLS_OF_RANK = _LANES * PLACES * CELLS
_SLOTS: dict[Kind, int] = {"note": 16384, "progress": 4096}  # bytes for a rank's messages
_HEAD = "=IIQ"  # before each message: its length, its checksum, and the number of the block
_BELL = 8  # bytes
_ORDERED = ("x86_64", "AMD64")  # processors on which all earlier writes of a rank are visible with a cell

_LONGEST_PAUSE, _PAUSE = 2e-3, 1 / 8  # seconds, and the share of the time waited so far
_WITHOUT_PAUSE = 1e-4  # seconds in which a waiting rank yields the processor but does not sleep


# -- the memory --------------------------------------------------------------------------------------------------------


class Segment:
    """Memory that all ranks share. It owns an open file, in which this rank's byte is locked, and closes the file."""

    def __init__(self, file: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.others = [other for other in range(world_size) if other != rank]
        weakref.finalize(self, os.close, file)
        self._file = file
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self.memory = mmap.mmap(file, self.size_for(world_size))
        self.cells = memoryview(self.memory)[: world_size * _CELLS_OF_RANK * 8].cast("Q")

    @staticmethod
    def size_for(world_size: int) -> int:
        """Return the size of a segment in bytes."""
        return world_size * (_CELLS_OF_RANK * 8 + sum(_SLOTS.values())) + _BELL

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of another rank has ended."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


class _Address(NamedTuple):
    """Address of rank 0's memory: the machine, the process, the number of its file, and the name of the file."""

    machine: str
    process: int
    file: int
    name: str

    @property
    def path(self) -> str:
        return f"/proc/{self.process}/fd/{self.file}"


def opened(rank: int, world_size: int, share: Callable[[Any], Any]) -> Segment | None:
    """Return memory of all ranks; ``None`` if this rank cannot open it. All ranks call this, and vote afterwards.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        share: Returns the argument of rank 0 on all ranks, which is sent as JSON.
    """
    created: _Address | None = None
    if rank == 0 and not obstacle():
        with suppress(OSError):
            created = _create(world_size)
    received: list[Any] | None = share(created)
    address = None if received is None else _Address(*received)
    if address is None or _rank_here.setdefault(address.name, rank) != rank:
        return None
    # Rank 0 uses the file that it has created, because closing a second one would release its lock.
    file = address.file if rank == 0 else _open(address)
    with suppress(OSError):
        return None if file is None else Segment(file, rank, world_size)


_rank_here: dict[str, int] = {}
"""The rank of this process, by the name of a memory. Threads of a process share none, since a process has the locks."""


def _here() -> str:
    """Return a text that is equal for processes with the same version of this library on this machine.

    The processes of two containers have different texts, because they see each other under different numbers.

    Raises:
        OSError: If this is not Linux.
    """
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{VERSION} {machine} {os.readlink('/proc/self/ns/pid')}"


def obstacle() -> str:
    """Return the reason why this process should not share memory with others, in half a sentence; "" if it may."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 forbids it"
    if platform.machine() not in _ORDERED:
        return f"ranks rely on the order in which they see memory change, which {platform.machine()} does not ensure"
    return ""


def obstacle_found() -> str:
    """Return the reason why ranks on this machine cannot share memory, after trying to create, open and free some."""
    if why := obstacle():
        return why
    try:
        created = _create(2)
    except OSError as error:
        return f"there is no memory for it: {error}"
    file = _open(created)
    os.close(created.file)
    if file is None:
        return f"processes cannot open each other's files by names such as {created.path}"
    os.close(file)
    return ""


def _create(world_size: int) -> _Address:
    """Create the memory.

    Raises:
        OSError: If that is impossible.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    name = f"join-{secrets.token_hex(16)}"
    file = os.memfd_create(name)
    try:
        os.fchmod(file, 0o600)
        os.posix_fallocate(file, 0, Segment.size_for(world_size))  # raises if memory is short
        return _Address(_here(), os.getpid(), file, name)
    except OSError:
        os.close(file)
        raise


def _open(address: _Address) -> int | None:
    """Open the memory of rank 0. Return its file, or ``None`` if it cannot be opened or should not be."""
    try:
        # On another machine, the same path may be an unrelated file.
        if obstacle() or _here() != address.machine or address.name not in os.readlink(address.path):
            return None
        return os.open(address.path, os.O_RDWR)
    except OSError:
        return None


# -- lines -------------------------------------------------------------------------------------------------------------


class Lane:
    """Memory of the line of this number.

    If other ranks have not written their numbers after ``timeout`` seconds, it fails.
    """

    def __init__(self, segment: Segment, number: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = segment.rank, segment.world_size, timeout
        self.cells, self.others, self.has_ended = segment.cells, segment.others, segment.has_ended
        self.count = 0
        """Number of operations that this rank has started."""
        self.last: _Numbers[Any] | None = None
        """The last operation that this rank has started."""
        self.late: list[_Numbers[Any]] = []
        """Earlier operations that this rank has not read, such as the sums of weighted modules in one backward."""
        begin = number * PLACES * CELLS
        firsts = range(begin, begin + self.world_size * _CELLS_OF_RANK, _CELLS_OF_RANK)
        self.places = [[first + place * CELLS for first in firsts] for place in range(PLACES)]
        """First cell of each rank, by place."""


class SharedMemoryLine(Line):
    """Line over a lane of shared memory. ``fallback`` makes the line for numbers that are too long for a lane."""

    def __init__(self, lane: Lane, fallback: Callable[[], Line]) -> None:
        self._lane, self._fallback = lane, fallback

    @override
    def sum(self, number: int, bits: int) -> Sum[int]:
        width = -(-bits // BITS)
        if width > CELLS:
            return self._fallback().sum(number, bits)
        return _Numbers(self._lane, width, number, sum)

    @override
    def sum_float(self, number: float) -> Sum[float]:
        (bits,) = struct.unpack("Q", struct.pack("d", number))
        return _Numbers(self._lane, 2, bits, _sum_of_floats)

    @override
    def gather(self, data: bytes) -> Sum[list[bytes]]:
        width = -(-8 * len(data) // BITS)
        if width > CELLS:
            return self._fallback().gather(data)
        number, size = int.from_bytes(data, "little"), len(data)
        return _Numbers(self._lane, width, number, lambda numbers: [each.to_bytes(size, "little") for each in numbers])


def _sum_of_floats(numbers: list[int]) -> float:
    """Return the sum of floating-point numbers. Each rank adds the same bits in the same order."""
    return sum(struct.unpack(f"{len(numbers)}d", struct.pack(f"{len(numbers)}Q", *numbers)))


@final
class _Numbers(Sum[V], Generic[V]):
    """Numbers of all ranks for one count of a lane, in ``width`` cells each, which are read as they arrive.

    This class makes as few function calls as it can, because each of them costs more in a step, whose caches are cold.

    Args:
        lane: The lane, into which this rank's number is written at once.
        width: The number of cells.
        number: The number of this rank.
        read: Makes the sum of the numbers of all ranks, in rank order.
    """

    def __init__(self, lane: Lane, width: int, number: int, read: Callable[[list[int]], V]) -> None:
        self._lane, self._width, self._read, self.nbytes = lane, width, read, 8 * width
        # When this number is written, no rank needs the number in its place: whoever has started the operation before
        # this one has read all that were complete by then.
        last, lane.last = lane.last, self
        if last is not None and last.missing is not None:
            lane.late.append(last)
        if lane.late:
            lane.late = [late for late in lane.late if not late.is_completed()]
        count = self._count = lane.count = lane.count + 1
        self._numbers = [0] * lane.world_size
        self._numbers[lane.rank] = number
        first = lane.places[count % PLACES][lane.rank]
        for cell in range(first, first + width):
            lane.cells[cell] = (number & LOW) << BITS | count & LOW
            number >>= BITS
        self._others = iter(lane.others)
        self.missing = next(self._others, None)  # the first rank whose number has not been read
        self._failure: BrokenCollective | None = None
        self._waits_since: float | None = None

    def is_completed(self) -> bool:
        """Return whether all ranks have written their numbers, or one of them cannot."""
        lane, count = self._lane, self._count
        cells, tag, firsts = lane.cells, count & LOW, lane.places[count % PLACES]
        while (rank := self.missing) is not None and self._failure is None:
            number, first = 0, firsts[rank]
            for cell in range(first + self._width - 1, first - 1, -1):
                value = cells[cell]
                if value & LOW != tag:
                    if 0 < (cells[first] - count & LOW) < LOW // 2:  # the cell is for a later operation
                        self._failure = BrokenCollective(f"rank {rank} has continued without this rank {lane.rank}")
                    return self._failure is not None
                number = number << BITS | value >> BITS
            self._numbers[rank] = number
            self.missing = next(self._others, None)
        return True

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Wait for all ranks.

        Raises:
            RuntimeError: If ``timeout`` expires first. You may then wait again.
            BrokenCollective: If a rank is gone, or does not arrive within the time limit of the group.
        """
        started, limit = time.monotonic(), self._lane.timeout if timeout is None else timeout.total_seconds()
        self._waits_since = self._waits_since or started
        while self.missing is not None and self._failure is None:
            with profiled("wait for rank", self.missing):
                self._wait_for_missing(started, limit)
        if self._failure is not None:
            raise self._failure
        return True

    def _wait_for_missing(self, started: float, limit: float) -> None:
        """Wait until the missing rank has written its number, or ``limit`` seconds after ``started`` have passed."""
        lane, rank, look, last_look = self._lane, self.missing, TIMEOUTS.look, 0.0
        assert rank is not None and self._waits_since is not None
        last_cell, value = lane.places[self._count % PLACES][rank] + self._width - 1, -1
        while self.missing == rank and self._failure is None:
            if lane.cells[last_cell] != value:  # otherwise is_completed would find what it found before
                value = lane.cells[last_cell]
                if self.is_completed():
                    return
            now = time.monotonic()
            waited = now - started
            if waited >= min(last_look + look, limit):
                last_look, ended = waited, self._ended()
                if self.is_completed() or self.missing != rank:
                    return
                if ended:
                    self._failure = BrokenCollective(
                        f"the process of rank {ended[0]} has ended, or has left the group", ended
                    )
                elif now - self._waits_since > lane.timeout:
                    self._failure = BrokenCollective(f"timed out after {lane.timeout:g} s: rank {rank} did not arrive")
                elif waited >= limit:
                    raise timed_out(f"rank {rank}", limit)
            time.sleep(0.0 if waited < _WITHOUT_PAUSE else min(waited * _PAUSE, _LONGEST_PAUSE))

    @override
    def total(self) -> V:
        """Return the sum."""
        if self._failure is not None:
            raise self._failure
        return self._read(self._numbers)

    def _ended(self) -> list[int]:
        """Return the ranks that have not written their numbers and whose processes have ended."""
        lane, tag = self._lane, self._count & LOW
        last = [first + self._width - 1 for first in lane.places[self._count % PLACES]]
        missing = [rank for rank in lane.others if lane.cells[last[rank]] & LOW != tag]
        ended = [rank for rank in missing if lane.has_ended(rank)]
        return [rank for rank in ended if lane.cells[last[rank]] & LOW != tag]  # it may have written it just before


# -- the board ---------------------------------------------------------------------------------------------------------


@final
class SharedBoard(Board):
    """Board in shared memory. Each rank has a place for each kind of message.

    A message has a checksum, because another rank may read it during a write.
    """

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment.rank, segment.world_size)
        self._segment, self._memory = segment, segment.memory
        self._begin = self.world_size * _CELLS_OF_RANK * 8
        self._bell = len(self._memory) - _BELL

    def _slot(self, kind: Kind, rank: int) -> tuple[int, int]:
        """Return the limits of the place for a message."""
        offset = 0 if kind == "note" else self.world_size * _SLOTS["note"]
        begin = self._begin + offset + rank * _SLOTS[kind]
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
    def _put(self, kind: Kind, text: str, block: int) -> None:
        begin, end = self._slot(kind, self.rank)
        data = text.encode()
        head = struct.pack(_HEAD, len(data), zlib.crc32(data), block)
        assert len(head) + len(data) <= end - begin
        self._memory[begin : begin + len(head) + len(data)] = head + data

    @override
    def _messages(self, kind: Kind) -> list[str]:
        messages: list[str] = []
        for rank in range(self.world_size):
            begin, end = self._slot(kind, rank)
            size, checksum, block = struct.unpack_from(_HEAD, self._memory, begin)
            begin += struct.calcsize(_HEAD)
            data = self._memory[begin : min(begin + size, end)]
            if data and block == self.block and zlib.crc32(data) == checksum:
                messages.append(data.decode())
        return messages
