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

import errno
import fcntl
import os
import pickle
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, Generic, NamedTuple

from typing_extensions import final, override

from join.collectives.base import Collective, Exact, FloatSum, Fold, Gather, Line, RollCall, Sum, V, exact
from join.collectives.broken import CALL_THE_SAME, BrokenCollective

_FRAME = struct.Struct("<BIQ")  # before each message: the line, the count of its sum, and its bytes
_HELLO = struct.Struct("<16sII")  # the secret of the group, the rank that connects, and the rank that it expects
_WELCOME = b"\1"
_CONNECT_SECONDS, _MEET_SECONDS = 5.0, 20.0  # to one address, and for all connections
_FLUSH_SECONDS = 2.0  # the longest time in which a rank sends its last messages before it closes its connections
_SIOCGIFADDR = 0x8915  # asks for the address of an interface


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


def connect(collective: Collective, timeout: float) -> Mesh | None:
    """Connect each rank with the ranks that it sends to. All ranks call this. Return ``None`` on all if one fails.

    Args:
        collective: The ranks.
        timeout: Seconds after which a sum fails.
    """
    rank, world_size = collective.rank, collective.world_size
    with socket.create_server(("", 0), backlog=128) as listener:
        port: int = listener.getsockname()[1]
        rows: list[tuple[bytes, list[str], int]] = collective.all_gather_object(
            (secrets.token_bytes(16), own_addresses(), port)
        )
        secret, rounds = rows[0][0], rounds_of(world_size)
        inward: dict[int, _Peer] = {}
        outward: dict[int, _Peer] = {}
        listener.settimeout(_MEET_SECONDS)
        with ThreadPoolExecutor(1) as executor:
            accepted = executor.submit(_accept, listener, secret, rank, world_size, inward)
            try:
                for distance, _ in rounds:
                    other = (rank + distance) % world_size
                    hello = _HELLO.pack(secret, rank, other)
                    outward[distance] = _Peer(_connected(*rows[other][1:], hello), distance, other)
                accepted.result()
                is_connected = True
            except (OSError, RuntimeError):  # or there are too many threads
                is_connected = False
    if collective.reduce_boolean_decision(is_connected):
        return Mesh(collective, inward, outward, timeout)
    for peer in (*inward.values(), *outward.values()):
        peer.connection.close()
    return None


def own_addresses() -> list[str]:
    """Return the addresses by which other ranks may reach this machine, the likeliest first."""
    addresses: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
            with suppress(OSError):  # no interface has that name
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(answer[20:24]))
        with suppress(OSError):  # finds the interface on the route to MASTER_ADDR, and sends nothing
            probe.connect((os.environ.get("MASTER_ADDR", ""), 1))
            addresses.append(probe.getsockname()[0])
    with suppress(OSError):
        addresses += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys([*addresses, "127.0.0.1"]))


def _accept(listener: socket.socket, secret: bytes, rank: int, world_size: int, inward: dict[int, _Peer]) -> None:
    """Accept the connections of the ranks that send to this one."""
    missing = {distance for distance, _ in rounds_of(world_size)}
    while missing:
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT_SECONDS)
        with suppress(OSError, struct.error):  # another program may connect, too
            their_secret, other, expected = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
            distance = (rank - other) % world_size
            if their_secret == secret and expected == rank and distance in missing:
                connection.sendall(_WELCOME)
                inward[distance] = _Peer(connection, distance, other)
                missing.remove(distance)
                continue
        connection.close()


def _connected(hosts: Sequence[str], port: int, hello: bytes) -> socket.socket:
    """Return a connection to the rank that listens on one of these hosts."""
    for host in hosts:
        with suppress(OSError), ExitStack() as opened:
            connection = opened.enter_context(socket.create_connection((host, port), _CONNECT_SECONDS))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(hello)
            if connection.recv(1) == _WELCOME:
                opened.pop_all()
                return connection
    raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


@final
class Mesh:
    """Connections of a rank with the ranks that it exchanges messages with, and the operations that run on them.

    Args:
        collective: The ranks.
        inward: The connections over which other ranks send, by distance.
        outward: The connections over which this rank sends, by distance.
        timeout: Seconds after which a sum fails.
    """

    def __init__(
        self, collective: Collective, inward: dict[int, _Peer], outward: dict[int, _Peer], timeout: float
    ) -> None:
        self.rank, self.timeout = collective.rank, timeout
        self.rounds = rounds_of(collective.world_size)
        self.counts: dict[int, int] = {}
        """Number of operations that this rank has started, by line."""
        self.lock = threading.Lock()
        """Held by a thread that sends or handles received messages."""
        self.inward, self._outward = inward, outward
        self.arrived: dict[tuple[int, int, int], bytes] = {}
        """Received messages that no operation has used yet, by line, count and distance."""
        self.running: dict[tuple[int, int], _Fold[Any]] = {}
        """Running operations, by line and count."""
        self._process, self._selector = os.getpid(), selectors.DefaultSelector()
        for peer in (*inward.values(), *outward.values()):
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name=f"join messages of rank {self.rank}", daemon=True)
        self._thread.start()

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
            if len(peer.received) < end:
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

    It keeps the order of the ranks in the circle.
    """

    def __init__(self, mesh: Mesh, line: int, own: V, combine: Callable[[V, V], V]) -> None:
        self._mesh, self._line, self._combine = mesh, line, combine
        self.value, self._at = own, 0
        self._failure: BrokenCollective | None = None
        self._waits_since: float | None = None
        self._is_done = threading.Lock()  # held until the operation is done
        self._is_done.acquire()
        data = pickle.dumps(own)
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
                    self.value = self._combine(pickle.loads(data), self.value)
                    self._at += 1
                    if self._at < len(mesh.rounds) and mesh.rounds[self._at].is_window:
                        mesh.send(*key, mesh.rounds[self._at].distance, pickle.dumps(self.value))
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


def _plus(one: Any, other: Any) -> Any:
    return one + other


@final
class _FloatSum(_Fold[Exact]):
    def total(self) -> float:
        self.wait()
        return float(self.value)


@final
class _Gather(_Fold[list[bytes]]):
    def rows(self) -> list[bytes]:
        self.wait()
        first = self._mesh.rank + 1  # the rows are in the order of the circle, in which this rank is the last
        return self.value[-first:] + self.value[:-first]


@final
class _RollCall(Generic[V]):
    """Roll call over a mesh, with one operation for each call."""

    def __init__(self, mesh: Mesh, line: int, fold: Fold[V]) -> None:
        self._mesh, self._line, self._fold = mesh, line, fold
        self._last: Any = None
        self.nbytes = 0

    def call(self, number: int, /) -> None:
        own = self._fold.of(number, self._mesh.rank)
        self._work = work = _Fold(self._mesh, self._line, own, self._fold.combined)
        self.wait, self.is_completed, self.nbytes = work.wait, work.is_completed, work.nbytes

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
    def sum(self, number: int, bits: int) -> Sum:
        return _Sum(self._mesh, self._number, number, _plus)

    @override
    def sum_float(self, number: float) -> FloatSum:
        return _FloatSum(self._mesh, self._number, exact(number), _plus)

    @override
    def roll_call(self, largest: int, fold: Fold[V]) -> RollCall[V]:
        return _RollCall(self._mesh, self._number, fold)

    @override
    def gather(self, data: bytes) -> Gather:
        return _Gather(self._mesh, self._number, [data], _plus)
