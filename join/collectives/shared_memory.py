"""Lines and a board between the ranks of one machine, through memory that they share: :func:`connect`.

A small all-reduce over sockets costs a rank system calls and switches between threads, at every step. Here it is a few
stores to memory, and a few loads when the sum is read; a roll call needs no sum, each rank reads the answers of the
others. Nobody is woken up: a rank that has to wait looks again and again, at intervals that grow with the time it has
waited.

Cells are 64 bits, each of which is written at once, so that a number is whole wherever it is seen. That what its rank
has written before it, such as a note on the board, is then seen, too, holds on x86 only; elsewhere this is not used,
though no sum relies on it. In a lane a rank has four places for its numbers and uses them in turn, so it may write the
next one while others still read the last; each cell holds 32 bits of a number and the count that it is for. Behind the
lanes are the rank's messages for the board.

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
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Generic, NamedTuple

from typing_extensions import final, override

from join.collectives._torch_private import profiled
from join.collectives.base import SUMS, Collective, FloatSum, Fold, Gather, Line, RollCall, Sum, V, folded
from join.collectives.board import Board, Kind
from join.collectives.broken import BrokenCollective
from join.collectives.timeouts import timeouts

SWITCH = "JOIN_SHARED_MEMORY"
"""The environment variable that is 0 where headers are to go over the process group."""

_LANES = SUMS + 1
PLACES = 4
"""How many numbers of a rank a lane holds: each is written to the place of the oldest."""
CELLS = 80
"""How many cells a place has. A number that needs more goes over the process group."""
BITS = 32
"""How many bits of a cell hold a part of the number; the others hold the count."""
LOW = (1 << BITS) - 1
_CELLS_OF_RANK = _LANES * PLACES * CELLS
_SLOTS: dict[Kind, int] = {"note": 16384, "progress": 2048}  # bytes for a rank's messages
_HEAD = "=IIQ"  # before each: its length, its checksum, and the number of the block
_BELL = 8  # bytes
_ORDERED = ("x86_64", "AMD64")  # processors on which a rank that sees a cell has seen what was written before it

_LONGEST_PAUSE, _PAUSE = 1e-3, 1 / 16  # seconds, and the share of the time waited so far
_WITHOUT_PAUSE = 1e-4  # seconds in which a rank that waits only lets others run


# -- the memory --------------------------------------------------------------------------------------------------------


class Segment:
    """The memory that all ranks share: an open file, in which this rank's byte is locked, and which it closes."""

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
        """Bytes of a segment."""
        return world_size * (_CELLS_OF_RANK * 8 + sum(_SLOTS.values())) + _BELL

    def has_ended(self, rank: int) -> bool:
        """Whether the process of another rank is gone."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


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


def obstacle_found() -> str:
    """Why ranks on this machine cannot share memory: like :func:`obstacle`, but makes and opens some, and frees it."""
    if why := obstacle():
        return why
    try:
        made = _made(2)
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


# -- lines -------------------------------------------------------------------------------------------------------------


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


class SharedMemoryLine(Line):
    """Sums and roll calls through a lane of shared memory; ``otherwise`` makes the line for numbers too long for it."""

    def __init__(self, lane: Lane, otherwise: Callable[[], Line]) -> None:
        self._lane, self._otherwise = lane, otherwise

    @override
    def sum(self, number: int, bits: int) -> Sum:
        width = -(-bits // BITS)
        if width > CELLS:
            return self._otherwise().sum(number, bits)
        work = _Sum(self._lane, width)
        work.call(number)
        return work

    @override
    def sum_float(self, number: float) -> FloatSum:
        work = _FloatSum(self._lane, 2)
        work.call(*struct.unpack("Q", struct.pack("d", number)))
        return work

    @override
    def roll_call(self, largest: int, fold: Fold[V]) -> RollCall[V]:
        width = -(-largest.bit_length() // BITS)
        if width > CELLS:
            return self._otherwise().roll_call(largest, fold)
        return _RollCall(self._lane, width, fold)

    @override
    def gather(self, data: bytes) -> Gather:
        width = -(-8 * len(data) // BITS)
        if width > CELLS:
            return self._otherwise().gather(data)
        work = _Gather(self._lane, width, len(data))
        work.call(int.from_bytes(data, "little"))
        return work

    @override
    def restart(self) -> None:
        lane = self._lane
        lane.count, first = 0, lane.places[0][lane.rank]
        for cell in range(first, first + PLACES * CELLS):
            lane.cells[cell] = 0


class _Numbers:
    """The numbers that all ranks give for one count of a lane, in ``width`` cells each, as they arrive.

    Every call of a function counts here, since a step runs with empty caches.
    """

    def __init__(self, lane: Lane, width: int) -> None:
        self._lane, self._width = lane, width
        self.nbytes = 8 * width

    def call(self, number: int, /) -> None:
        """Give this rank's number; those of the others are awaited from now on."""
        lane = self._lane
        count = self._count = lane.count = lane.count + 1
        self._numbers = [0] * lane.world_size
        self._numbers[lane.rank] = number
        first = lane.places[count % PLACES][lane.rank]
        for cell in range(first, first + self._width):
            lane.cells[cell] = (number & LOW) << BITS | count & LOW
            number >>= BITS
        self._others = iter(lane.others)
        self._missing = next(self._others, None)  # the first rank whose number was not read
        self._failure: BrokenCollective | None = None
        self._waits_since: float | None = None

    def is_completed(self) -> bool:
        """Whether all ranks have given theirs, or will not."""
        lane, count = self._lane, self._count
        cells, tag, firsts = lane.cells, count & LOW, lane.places[count % PLACES]
        while (rank := self._missing) is not None and self._failure is None:
            number, first = 0, firsts[rank]
            for cell in range(first + self._width - 1, first - 1, -1):
                value = cells[cell]
                if value & LOW != tag:
                    if 0 < (cells[first] - count & LOW) < LOW // 2:  # it is newer
                        self._failure = BrokenCollective(f"rank {rank} has gone on without this rank {lane.rank}")
                    return self._failure is not None
                number = number << BITS | value >> BITS
            self._numbers[rank] = number
            self._missing = next(self._others, None)
        return True

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Wait for all ranks.

        Raises:
            RuntimeError: if they do not come in time, after which waiting again is allowed.
            BrokenCollective: if one of them is gone, or does not come within the time limit of the group.
        """
        if self._missing is not None and not self.is_completed():
            started, limit = time.monotonic(), self._lane.timeout if timeout is None else timeout.total_seconds()
            self._waits_since = self._waits_since or started
            while not self.is_completed():
                with profiled("wait for rank", self._missing):
                    self._wait_for_missing(started, limit)
        if self._failure is not None:
            raise self._failure
        return True

    def _wait_for_missing(self, started: float, limit: float) -> None:
        """Wait until the missing rank comes, or does not by ``limit`` seconds after ``started``."""
        lane, rank, looked = self._lane, self._missing, 0.0
        assert rank is not None and self._waits_since is not None
        while self._missing == rank and not self.is_completed():
            now = time.monotonic()
            waited = now - started
            if waited >= min(looked + timeouts().look, limit):
                looked, ended = waited, self._ended()
                if self.is_completed() or self._missing != rank:
                    return
                if ended:
                    self._failure = BrokenCollective(
                        f"the process of rank {ended[0]} has ended, or has left the group", ended
                    )
                elif now - self._waits_since > lane.timeout:
                    self._failure = BrokenCollective(f"timed out after {lane.timeout:g} s: rank {rank} did not come")
                elif waited >= limit:
                    raise RuntimeError(
                        f"timed out after {limit:g} s: rank {rank} did not come; see what it does, or allow more"
                        " time [J039]"
                    )
            time.sleep(0.0 if waited < _WITHOUT_PAUSE else min(waited * _PAUSE, _LONGEST_PAUSE))

    def _ended(self) -> list[int]:
        """The ranks that have not given their number, and whose processes are gone."""
        lane, tag = self._lane, self._count & LOW
        last = [first + self._width - 1 for first in lane.places[self._count % PLACES]]
        missing = [rank for rank in lane.others if lane.cells[last[rank]] & LOW != tag]
        ended = [rank for rank in missing if lane.has_ended(rank)]
        return [rank for rank in ended if lane.cells[last[rank]] & LOW != tag]  # else that was its last act


@final
class _RollCall(_Numbers, Generic[V]):
    """One roll call, again and again."""

    def __init__(self, lane: Lane, width: int, fold: Fold[V]) -> None:
        super().__init__(lane, width)
        self._fold, self._folded = fold, list[int]()
        self._result: V

    def result(self) -> V:
        """What all ranks answered, folded."""
        if self._numbers != self._folded:
            self._folded, self._result = self._numbers, folded(self._fold, self._numbers)
        return self._result


@final
class _Sum(_Numbers):
    """One sum."""

    def total(self) -> int:
        """The sum."""
        return sum(self._numbers)


@final
class _FloatSum(_Numbers):
    """One sum of floating-point numbers, of which each rank adds up the same bits in the same order."""

    def total(self) -> float:
        """The sum."""
        return sum(struct.unpack(f"{len(self._numbers)}d", struct.pack(f"{len(self._numbers)}Q", *self._numbers)))


@final
class _Gather(_Numbers):
    """Some bytes of each rank."""

    def __init__(self, lane: Lane, width: int, size: int) -> None:
        super().__init__(lane, width)
        self._size = size

    def rows(self) -> list[bytes]:
        """What each rank gave."""
        return [number.to_bytes(self._size, "little") for number in self._numbers]


# -- the board ---------------------------------------------------------------------------------------------------------


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
