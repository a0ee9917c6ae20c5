"""Lines between machines: messages over their own TCP connections, in logarithmically many hops.

Gloo's all-reduce passes through all ranks twice, however small the sum. Here, each rank knows the sum of two ranks
after one message, of four ranks after the next, and so on. Of ``N`` ranks, rank ``r`` holds the sum over a *window*,
the ``m`` ranks up to ``r`` (counted in a circle), and ``m`` grows bit by bit from 1 to ``N``::

    rank r sends                                rank r receives, and knows then
    ------------                                -------------------------------
    its window of m, to rank r+m                the window of rank r-m: a window of 2m
    its own number, to rank r+2m (at once)      the number of rank r-2m: a window of 2m+1, if the next bit of N is 1

That is ``floor(log2 N)`` hops, each of which waits for the one before: 9 for 1,000 ranks, 13 for 10,000. All ranks do
the same. A rank connects only with the ranks that it sends to, at most twice as many as hops, and with the ranks that
send to it. Nothing grows with ``N``, except gathered data.

A rank sends its first messages when it starts an operation. A thread, which sleeps until a message arrives, does the
rest, so the numbers pass through while the ranks compute. The connections of a rank close when its process ends: a rank
that waits for a message from it finds that out, and the other ranks learn it from a note.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from operator import add
from typing import Any, Generic, NamedTuple, cast

from typing_extensions import final, override

from join.collectives.base import Collective, Fold, Gather, Line, RollCall, Sum, V
from join.collectives.board import printable
from join.collectives.broken import CALL_THE_SAME, BrokenCollective
from join.collectives.handshake import SWITCH, Connections, GaveUp, addresses_within, meet
from join.collectives.plain import Exact, as_exact, exact, packed, unpacked
from join.collectives.timeouts import TIMEOUTS

_logger = logging.getLogger("join")
_FRAME = struct.Struct("<BIQ")  # before each message: the line, the count of its sum, and its bytes
_LARGEST = 1 << 26  # bytes of a message
_FLUSH_SECONDS = 2.0  # the longest time in which a rank sends its last messages before it closes its connections
_FALLBACK = (
    "Headers are all-reduces of the process group, which are slower than messages, because not all ranks can connect"
    " with each other: %s. Let ranks reach each other's TCP ports, set GLOO_SOCKET_IFNAME to the interface that reaches"
    " the other machines, or set %s=0 on all ranks."
)


class Round(NamedTuple):
    """Message that each rank sends and receives in a sum.

    Attributes:
        distance: The distance from the sending rank to the receiving rank.
        is_window: Whether the message is the sum over the sender's window, or only its own number.
    """

    distance: int
    is_window: bool


@cache
def rounds_of(world_size: int) -> list[Round]:
    """Return the messages of a sum, in the order in which a rank needs them."""
    rounds: list[Round] = []
    window = 1
    for bit in f"{world_size:b}"[1:]:
        rounds.append(Round(window, is_window=True))
        if bit == "1":
            rounds.append(Round(2 * window, is_window=False))
        window = 2 * window + int(bit)
    return rounds


# -- connections -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Peer:
    """Connection to another rank or from another rank, with messages in one direction."""

    connection: socket.socket
    distance: int
    rank: int
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    is_closed: bool = False


def connect(collective: Collective, timeout: float, limit: float | None = None, host: str = "") -> Mesh | None:
    """Connect each rank with the ranks that it sends to. All ranks call this. Return ``None`` on all if one fails.

    Args:
        collective: The ranks.
        timeout: Seconds before a sum fails.
        limit: Seconds for connecting, if they are less than ``Timeouts.connect``.
        host: The host that keeps the store of the ranks, if it is known.
    """
    mesh, why = None, ""
    try:
        distances = {distance for distance, _ in rounds_of(collective.world_size)}
        seconds = min(TIMEOUTS.connect, limit or TIMEOUTS.connect)
        mesh = Mesh(collective, *meet(collective, distances, addresses_within(seconds, host), seconds), timeout)
    except (GaveUp, OSError) as error:  # such as too many open files
        why = str(error)
    if collective.reduce_boolean_decision(mesh is not None):
        return mesh
    if mesh is not None:
        mesh.close()
    reasons: list[str] = collective.all_gather_object(why, plain=True)
    if collective.rank == 0:
        level = logging.INFO if all(SWITCH in reason for reason in reasons) else logging.WARNING
        texts = [f"rank {rank}: {printable(reason)}" for rank, reason in enumerate(reasons) if reason]
        _logger.log(level, _FALLBACK, "; ".join(texts), SWITCH)
    return None


@final
class Mesh:
    """Connections of a rank with the ranks that it exchanges messages with, and the operations that run on them.

    Args:
        collective: The ranks.
        inward: The connections to the ranks that send to this one, by distance.
        outward: The connections to the ranks that this rank sends to, by distance.
        timeout: Seconds before a sum fails.
    """

    def __init__(self, collective: Collective, inward: Connections, outward: Connections, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = collective.rank, collective.world_size, timeout
        self.rounds = rounds_of(self.world_size)
        self.counts: dict[int, int] = {}
        """Number of operations that this rank has started, by line."""
        self.lock = threading.Lock()
        """Held by a thread that sends or handles received messages."""
        self.inward, self._outward = (
            {
                distance: _Peer(each, distance, (self.rank + distance * sign) % self.world_size)
                for distance, each in connections.items()
            }
            for sign, connections in ((-1, inward), (1, outward))
        )
        self.arrived: dict[tuple[int, int, int], bytes] = {}
        """Received messages that no operation has used yet, by line, count and distance."""
        self.running: dict[tuple[int, int], _Fold[Any]] = {}
        """Running operations, by line and count."""
        self._process, self._selector = os.getpid(), selectors.DefaultSelector()
        for peer in (*self.inward.values(), *self._outward.values()):
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name=f"join messages of rank {self.rank}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            for key in list(self._selector.get_map().values()):
                cast("socket.socket", key.fileobj).close()
            raise GaveUp(str(error)) from error

    def send(self, line: int, count: int, distance: int, data: bytes) -> None:
        """Send a message, or the part of it that can be sent now. The caller holds the lock."""
        peer = self._outward[distance]
        peer.unsent += _FRAME.pack(line, count, len(data)) + data
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        while peer.unsent and not peer.is_closed:
            try:
                del peer.unsent[: peer.connection.send(peer.unsent)]
            except BlockingIOError:
                self._selector.modify(peer.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
                return
            except OSError:  # the peer has ended; an operation that needs a message from it fails by itself
                return

    def close(self) -> None:
        """Send the remaining messages, close the connections, and end the thread."""
        if os.getpid() != self._process:  # in a fork, the connections belong to the parent
            return
        deadline = time.monotonic() + _FLUSH_SECONDS
        while time.monotonic() < deadline and any(
            peer.unsent and not peer.is_closed for peer in self._outward.values()
        ):
            time.sleep(0.01)
        for peer in (*self.inward.values(), *self._outward.values()):
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        while self._selector.get_map():
            for key, events in self._selector.select():
                peer: _Peer = key.data
                with self.lock:
                    if events & selectors.EVENT_WRITE:
                        self._selector.modify(peer.connection, selectors.EVENT_READ, peer)
                        self._flush(peer)
                    if events & selectors.EVENT_READ:
                        self._receive(peer)
        self._selector.close()

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:  # the peer has reset the connection
            data = b""
        peer.received += data
        while len(peer.received) >= _FRAME.size:
            line, count, size = _FRAME.unpack_from(peer.received)
            end = _FRAME.size + size
            if size > _LARGEST:
                data = b""
            if len(peer.received) < end or not data:
                break
            self.arrived[line, count, peer.distance] = bytes(peer.received[_FRAME.size : end])
            del peer.received[:end]
            if (fold := self.running.get((line, count))) is not None:
                fold.advance()
        if not data:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            peer.is_closed = True
            for fold in list(self.running.values()):
                fold.advance()


# -- lines -------------------------------------------------------------------------------------------------------------


class _Fold(Generic[V]):
    """Operation that combines the values of all ranks as messages arrive.

    It keeps the order of the ranks in the circle. ``combine`` gets what has been received, and a value.
    """

    def __init__(self, mesh: Mesh, line: int, own: V, combine: Callable[[Any, V], V]) -> None:
        self._mesh, self._line, self._combine = mesh, line, combine
        self.value, self._at = own, 0
        self._failure: BrokenCollective | None = None
        self._waits_since: float | None = None
        self._is_done = threading.Lock()  # held until the operation is done
        self._is_done.acquire()
        data = packed(own)
        self.nbytes = len(data)
        with mesh.lock:
            self._count = mesh.counts[line] = mesh.counts.get(line, 0) + 1 & 0xFFFFFFFF
            mesh.running[line, self._count] = self
            for distance, is_window in mesh.rounds:
                if not is_window or distance == 1:
                    mesh.send(line, self._count, distance, data)
            self.advance()

    def advance(self) -> None:
        """Use the messages that have arrived, and send the next ones. The caller holds the mesh's lock."""
        mesh, key = self._mesh, (self._line, self._count)
        while self._at < len(mesh.rounds) and self._failure is None:
            distance = mesh.rounds[self._at].distance
            data = mesh.arrived.pop((*key, distance), None)
            if data is not None:
                try:
                    self.value = self._combine(unpacked(data), self.value)
                    self._at += 1
                    if self._at < len(mesh.rounds) and mesh.rounds[self._at].is_window:
                        mesh.send(*key, mesh.rounds[self._at].distance, packed(self.value))
                except Exception as error:  # which would end the thread
                    self._failure = BrokenCollective(f"the messages of the ranks cannot be combined: {error!r}")
            elif (peer := mesh.inward[distance]).is_closed:
                text = f"the process of rank {peer.rank} has ended, or has left the group"
                self._failure = BrokenCollective(text, [peer.rank])
            else:
                return
        del mesh.running[key]
        self._is_done.release()

    def is_completed(self) -> bool:
        """Return whether all ranks have sent their values, or one of them cannot."""
        return not self._is_done.locked()

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Wait for all ranks.

        Raises:
            RuntimeError: If ``timeout`` expires first. You may then wait again.
            BrokenCollective: If a rank is gone, or does not arrive within the time limit of the group.
        """
        now, longest = time.monotonic(), self._mesh.timeout
        self._waits_since = self._waits_since or now
        left = self._waits_since + longest - now
        limit = left if timeout is None else min(timeout.total_seconds(), left)
        if not self._is_done.acquire(timeout=max(limit, 0.0)):
            if limit != left:
                raise RuntimeError(f"Waiting for all ranks timed out after {limit:g} s. {CALL_THE_SAME} [J503]")
            with self._mesh.lock:
                if self._is_done.locked():  # the operation may have completed since
                    self._failure = BrokenCollective(f"timed out after {longest:g} s: some rank did not arrive")
                    self.advance()
            return self.wait()
        self._is_done.release()
        if self._failure is not None:
            raise self._failure
        return True


@final
class _Sum(_Fold[int]):
    def total(self) -> int:
        self.wait()
        return self.value


@final
class _FloatSum(_Fold[Exact]):
    def total(self) -> float:
        self.wait()
        return float(self.value)


@final
class _Gather(_Fold[bytes]):
    def rows(self) -> list[bytes]:
        self.wait()
        size = len(self.value) // self._mesh.world_size
        first = size * (self._mesh.rank + 1)
        value = self.value[-first:] + self.value[:-first]  # in the order of the circle, this rank is the last
        return [value[begin : begin + size] for begin in range(0, len(value), size)]


@final
class _RollCall(Generic[V]):
    """Roll call over a mesh, with one operation for each call."""

    def __init__(self, mesh: Mesh, line: int, fold: Fold[V]) -> None:
        self._mesh, self._line, self._fold = mesh, line, fold
        self._last: Any = None
        self.nbytes = 0

    def call(self, number: int, /) -> None:
        own = self._fold.of(number, self._mesh.rank)
        self._work = work = _Fold(self._mesh, self._line, own, self._combined)
        self.wait, self.is_completed, self.nbytes = work.wait, work.is_completed, work.nbytes

    def _combined(self, received: Any, other: V) -> V:
        return self._fold.combined(self._fold.restored(received), other)

    def result(self) -> V:
        self.wait()
        if self._last != self._work.value:
            self._last = self._work.value
        return self._last


@final
class MessageLine(Line):
    """Line of this number over a mesh."""

    depth = 2

    def __init__(self, mesh: Mesh, number: int) -> None:
        self._mesh, self._number = mesh, number

    @override
    def sum(self, number: int, bits: int) -> Sum[int]:
        return _Sum(self._mesh, self._number, number, add)

    @override
    def sum_float(self, number: float) -> Sum[float]:
        return _FloatSum(self._mesh, self._number, exact(number), lambda received, other: as_exact(received) + other)

    @override
    def roll_call(self, largest: int, fold: Fold[V]) -> RollCall[V]:
        return _RollCall(self._mesh, self._number, fold)

    @override
    def gather(self, data: bytes) -> Gather:
        return _Gather(self._mesh, self._number, data, add)
