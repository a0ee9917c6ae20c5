"""Lines between machines: messages over TCP connections of their own, in as many hops as the logarithm of the ranks.

Gloo's all-reduce goes round all ranks twice, however little it sums. Here each rank knows, after one message, what two
ranks give, after the next what four give, and so on. Of ``N`` ranks, rank ``r`` holds the sum over a *window*, the
``m`` ranks up to ``r`` (counted in a circle), and ``m`` grows bit by bit from 1 to ``N``::

    rank r sends                                rank r receives, and knows then
    ------------                                -------------------------------
    its window of m, to rank r+m                that of rank r-m: a window of 2m
    its own number, to rank r+2m (at once)      that of rank r-2m: a window of 2m+1, if the next bit of N is 1

That is ``floor(log2 N)`` hops, each of which waits for the one before: 9 for 1,000 ranks, 13 for 10,000. All ranks do
the same, and connect only with those that they send to, at most twice as many, and that send to them. Nothing in it
grows with ``N``, but for what is gathered.

A rank sends its first messages when it gives its number. A thread does the rest, which sleeps until a message arrives,
so the numbers come through while the ranks compute. A rank that has ended closes its connections: who waits for a
message from it learns that, and the others by its note.
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
from join.collectives.broken import BrokenCollective

_FRAME = struct.Struct("<BIQ")  # before each message: the line, the count of its sum, and its bytes
_HELLO = struct.Struct("<16sII")  # the secret of the group, the rank that connects, and the one that it wants
_WELCOME = b"\1"
_CONNECT_SECONDS, _MEET_SECONDS = 5.0, 20.0  # to one address, and for all connections
_FLUSH_SECONDS = 2.0  # that a rank takes at most to send what others need, before it closes its connections
_SIOCGIFADDR = 0x8915  # asks for the address of an interface


class Round(NamedTuple):
    """A message that a rank sends and receives.

    Attributes:
        distance: from the rank that sends it to the one that receives it.
        is_window: whether it holds what the window of the sender gives, not its own number alone.
    """

    distance: int
    is_window: bool


@cache
def rounds_of(world_size: int) -> list[Round]:
    """The messages of a sum, in the order in which a rank needs them."""
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
    """A connection to a rank, or from one, over which messages go one way."""

    connection: socket.socket
    distance: int
    rank: int
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    is_closed: bool = False


def connect(collective: Collective, timeout: float) -> Mesh | None:
    """Connect all ranks, which call this, with those that they send to; ``None`` on all if that fails on one.

    Args:
        collective: the ranks.
        timeout: seconds after which a sum has failed.
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
    """Under which addresses others may reach this machine, the likeliest first."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
            with suppress(OSError):  # no interface of that name
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
        with suppress(OSError):  # the way to where ranks meet; nothing is sent
            probe.connect((os.environ.get("MASTER_ADDR", ""), 1))
            found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _accept(listener: socket.socket, secret: bytes, rank: int, world_size: int, inward: dict[int, _Peer]) -> None:
    """Wait for the ranks that send to this one."""
    missing = {distance for distance, _ in rounds_of(world_size)}
    while missing:
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT_SECONDS)
        with suppress(OSError, struct.error):  # whoever else that is
            given, other, wanted = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
            distance = (rank - other) % world_size
            if given == secret and wanted == rank and distance in missing:
                connection.sendall(_WELCOME)
                inward[distance] = _Peer(connection, distance, other)
                missing.remove(distance)
                continue
        connection.close()


def _connected(hosts: Sequence[str], port: int, hello: bytes) -> socket.socket:
    """A connection to the rank that listens there."""
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
    """The connections of a rank with those that it exchanges messages with, and what is under way on them.

    Args:
        collective: the ranks.
        inward: the connections over which others send, by distance.
        outward: those over which this rank does.
        timeout: seconds after which a sum has failed.
    """

    def __init__(
        self, collective: Collective, inward: dict[int, _Peer], outward: dict[int, _Peer], timeout: float
    ) -> None:
        self.rank, self.timeout = collective.rank, timeout
        self.rounds = rounds_of(collective.world_size)
        self.counts: dict[int, int] = {}
        """How many numbers this rank has given, by line."""
        self.lock = threading.Lock()
        """Held by whoever sends, or looks at what has arrived."""
        self.inward, self._outward = inward, outward
        self.arrived: dict[tuple[int, int, int], bytes] = {}
        """Messages that nobody has taken yet, by line, count and distance."""
        self.under_way: dict[tuple[int, int], _Fold[Any]] = {}
        """By line and count."""
        self._process, self._selector = os.getpid(), selectors.DefaultSelector()
        for peer in (*inward.values(), *outward.values()):
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name=f"join messages of rank {self.rank}", daemon=True)
        self._thread.start()

    def send(self, line: int, count: int, distance: int, data: bytes) -> None:
        """Send a message, or what of it can be sent now; the lock is held."""
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
            except OSError:  # it has ended; who needs something from it finds that out
                return

    def close(self) -> None:
        """Close the connections, once what is still to be sent is, and end the thread."""
        if os.getpid() != self._process:  # in a fork they are the parent's
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
        except OSError:  # reset
            data = b""
        peer.received += data
        while len(peer.received) >= _FRAME.size:
            line, count, size = _FRAME.unpack_from(peer.received)
            end = _FRAME.size + size
            if len(peer.received) < end:
                break
            self.arrived[line, count, peer.distance] = bytes(peer.received[_FRAME.size : end])
            del peer.received[:end]
            if (fold := self.under_way.get((line, count))) is not None:
                fold.go_on()
        if not data:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            peer.is_closed = True
            for fold in list(self.under_way.values()):
                fold.go_on()


# -- lines -------------------------------------------------------------------------------------------------------------


class _Fold(Generic[V]):
    """What all ranks give, put together by ``combine`` as messages arrive, whose order in the circle it keeps."""

    def __init__(self, mesh: Mesh, line: int, own: V, combine: Callable[[V, V], V]) -> None:
        self._mesh, self._line, self._combine = mesh, line, combine
        self.value, self._at = own, 0
        self._failure: BrokenCollective | None = None
        self._waits_since: float | None = None
        self._is_done = threading.Lock()  # which is held until it is
        self._is_done.acquire()
        data = pickle.dumps(own)
        self.nbytes = len(data)
        with mesh.lock:
            self._count = mesh.counts[line] = mesh.counts.get(line, 0) + 1 & 0xFFFFFFFF
            mesh.under_way[line, self._count] = self
            for distance, is_window in mesh.rounds:
                if not is_window or distance == 1:
                    mesh.send(line, self._count, distance, data)
            self.go_on()

    def go_on(self) -> None:
        """Take what has arrived, and send what can be sent then; the mesh's lock is held."""
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
                except Exception as error:  # else the thread would end
                    self._failure = BrokenCollective(f"what ranks sent cannot be put together: {error!r}")
            elif (peer := mesh.inward[distance]).is_closed:
                text = f"the process of rank {peer.rank} has ended, or has left the group"
                self._failure = BrokenCollective(text, [peer.rank])
            else:
                return
        del mesh.under_way[key]
        self._is_done.release()

    def is_completed(self) -> bool:
        """Whether all ranks have given theirs, or one will not."""
        return not self._is_done.locked()

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Wait for all ranks.

        Raises:
            RuntimeError: if they do not come in time, after which waiting again is allowed.
            BrokenCollective: if one of them is gone, or does not come within the time limit of the group.
        """
        now, most = time.monotonic(), self._mesh.timeout
        self._waits_since = self._waits_since or now
        left = self._waits_since + most - now
        limit = left if timeout is None else min(timeout.total_seconds(), left)
        if not self._is_done.acquire(timeout=max(limit, 0.0)):
            if limit != left:
                raise RuntimeError(
                    f"timed out after {limit:g} s: not all ranks came; see what they do, or allow more time [J503]"
                )
            with self._mesh.lock:
                if self._is_done.locked():  # else it was done meanwhile
                    self._failure = BrokenCollective(f"timed out after {most:g} s: not all ranks came")
                    self.go_on()
            return self.wait()
        self._is_done.release()
        if self._failure is not None:
            raise self._failure
        return True


@final
class _Sum(_Fold[int]):
    def total(self) -> int:
        return self.value


def _plus(one: Any, other: Any) -> Any:
    return one + other


@final
class _FloatSum(_Fold[Exact]):
    def total(self) -> float:
        return float(self.value)


@final
class _Gather(_Fold[list[bytes]]):
    def rows(self) -> list[bytes]:
        first = self._mesh.rank + 1  # they are in the order of the circle, this rank's the last
        return self.value[-first:] + self.value[:-first]


@final
class _RollCall(Generic[V]):
    """A fold for each call."""

    def __init__(self, mesh: Mesh, line: int, fold: Fold[V]) -> None:
        self._mesh, self._line, self._fold = mesh, line, fold
        self._last: Any = None
        self.nbytes = 0

    def call(self, number: int, /) -> None:
        own = self._fold.of(number, self._mesh.rank)
        self._work = work = _Fold(self._mesh, self._line, own, self._fold.combined)
        self.wait, self.is_completed, self.nbytes = work.wait, work.is_completed, work.nbytes

    def result(self) -> V:
        if self._last != self._work.value:
            self._last = self._work.value
        return self._last


@final
class MessageLine(Line):
    """The line of this number over a mesh."""

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
