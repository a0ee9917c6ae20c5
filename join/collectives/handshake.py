"""Connections between the ranks of a group, which prove to each other that they belong to the group: :func:`meet`.

Each rank listens on its own addresses only, and sends them to the other ranks with a random token, by an all-gather of
the group. The tokens and addresses of all ranks make the key of the group, which is never sent. All connections are
made at the same time, and each end proves that it has the key::

    rank that connects, to each address at once         rank that listens
    -------------------------------------------         -----------------
    hello: its rank, the rank that it expects, a nonce
                                                        a nonce of its own, and its proof
    its proof, on connections with a right one
                                                        keeps the first connection with a right
                                                        proof, and says so in one byte
    keeps the connection

A proof is an HMAC over the role of its sender, both ranks, both nonces, and the address that was offered. So a recorded
or reflected message proves nothing, nor does a program that passes messages on from another address.

A stranger costs nothing: a connection that proves nothing is only dropped, the oldest first if there are many. If a
rank cannot meet all others, it closes its connections. The ranks at their other ends then give up, too, and close
theirs, so that no rank waits for the time limit if another one knows the reason. After that, all ranks vote.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias

from join.collectives._torch_private import Aside
from join.collectives.base import Collective
from join.collectives.plain import as_json
from join.collectives.store import machine
from join.collectives.version import VERSION

SWITCH = "JOIN_MESSAGES"
"""Environment variable that is 0 if a rank should open no connections for messages."""
FORMAT = 2
"""Number of the format of the messages. All ranks need the same."""

Place: TypeAlias = tuple[str, int]
"""Address and port on which a rank listens."""

_LOOPBACK, _INTERFACES = "127.0.0.1", "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # asks for the IPv4 address of an interface
_LINK_LOCAL = "20"  # the scope of IPv6 addresses that another machine cannot use without an interface
_HELLO = struct.Struct("<8sII32s")  # a constant, the rank that connects, the rank that it expects, and a nonce
_CONSTANT = b"joinable"
_BYTES = 32  # of a nonce, and of a proof
_MOST_STRANGERS = 128  # connections that neither end has proven
_KEEPS = b"k"  # the answer of a rank that listens, for a connection that it keeps
_NO_PROOF = "another program answers"
_BACKLOG = 1024
_PAUSE = 0.05  # seconds, before a rank calls again a place that has closed a connection


class GaveUp(Exception):
    """This rank cannot connect with all ranks. The text is the reason, or "" if only another rank knows it."""


Row: TypeAlias = list[Any]
"""Message of each rank to all ranks, before they connect. It has five parts:

- the version, which each version sends first
- a text that is equal on ranks which reach each other by the loopback interface
- the places where the rank listens
- a random part of the key of the group
- the reason why the rank cannot connect with others, or ""
"""
Connections: TypeAlias = dict[int, socket.socket]
"""Connections by the distance from the rank that connects to the rank that listens."""


def meet(
    collective: Collective, distances: Set[int], addresses: Sequence[str], seconds: float
) -> tuple[Connections, Connections]:
    """Connect this rank with the ranks at these distances before and after it. All ranks call this.

    Args:
        collective: The ranks.
        distances: The distances, equal on all ranks.
        addresses: The addresses of this rank.
        seconds: The longest time to connect, after the ranks have exchanged their addresses.

    Returns:
        The connections of the ranks before this one, and the connections to the ranks after it.

    Raises:
        RuntimeError: On every rank, if they have different versions of this library.
        GaveUp: If this rank cannot connect with all of them. Other ranks may not raise it.
    """
    with ExitStack() as closing:
        listeners, is_off = dict[Place, socket.socket](), os.environ.get(SWITCH) == "0"
        for address in () if is_off else addresses:
            with suppress(OSError):
                listener = socket.create_server((address, 0), family=_family(address), backlog=_BACKLOG)
                listeners[address, listener.getsockname()[1]] = closing.enter_context(listener)
        why = "" if listeners else f"{SWITCH}=0 forbids it" if is_off else f"it cannot listen on {', '.join(addresses)}"
        release = f"joinables {VERSION} with message format {FORMAT}"
        here = machine("net") if sys.platform == "linux" else socket.gethostname()
        row: Row = [release, here, list(listeners), secrets.token_hex(), why]
        rows: list[Row] = collective.all_gather_object(row, plain=True)
        if any(theirs != release for theirs, *_ in rows):
            texts = "; ".join(f"rank {rank}: {theirs}" for rank, (theirs, *_) in enumerate(rows))
            raise RuntimeError(
                f"The ranks run different versions of this library ({texts}), and their messages may differ. Install"
                " the same version on all ranks. [J570]"
            )
        if any(obstacle for *_, obstacle in rows):
            raise GaveUp(why)
        meeting = _Meeting(collective.rank, rows, sha256(as_json(rows)).digest(), distances)
        return meeting.run(listeners, seconds)


def addresses_within(seconds: float, host: str = "") -> list[str]:
    """Return :func:`own_addresses`; if a name server does not answer within so many seconds, the loopback address."""
    with suppress(RuntimeError):  # it takes too long, or there is no thread for it
        looking = Aside(partial(own_addresses, host))
        looking.wait(timedelta(seconds=seconds))
        return looking.result
    return [_LOOPBACK]


def own_addresses(host: str = "") -> list[str]:
    """Return the addresses where other ranks may reach this machine.

    These are the addresses of the interfaces in ``GLOO_SOCKET_IFNAME``, or of the interface on the route to the store,
    or of the host's name; and the loopback address, for ranks of the same machine.

    Args:
        host: The address or name of the host that keeps the store; by default, ``MASTER_ADDR``.
    """
    if names := os.environ.get(_INTERFACES, ""):
        found = [address for name in names.split(",") for address in _addresses_of(name)]
    else:
        host = host or os.environ.get("MASTER_ADDR", "")
        found = [*_on_route_to(host)] or [*_on_route_to(socket.gethostname())]
    return list(dict.fromkeys([*found, _LOOPBACK]))


def _addresses_of(interface: str) -> Iterator[str]:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # it may have none
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        yield socket.inet_ntoa(answer[20:24])
    with suppress(OSError):  # the kernel may have no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope != _LINK_LOCAL:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _on_route_to(host: str) -> Iterator[str]:
    """Yield the addresses of this machine on the routes to a host. Nothing is sent."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM) if host else ():
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                yield probe.getsockname()[0]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _text_of(places: Sequence[Place]) -> str:
    return ", ".join(f"{address} port {port}" for address, port in places)


# -- connecting --------------------------------------------------------------------------------------------------------


class _Meeting:
    """Connections of this rank while they are made, all at the same time and by one selector.

    A generator handles each of them. It yields the event that it waits for, and ends when its connection is useless.
    """

    def __init__(self, rank: int, rows: Sequence[Row], key: bytes, distances: Set[int]) -> None:
        self._rank, self._rows, self._key, self._distances = rank, rows, key, distances
        self._inward: Connections = {}
        self._outward: Connections = {}
        self._errors: dict[int, list[str]] = {}  # by the distance of a rank, one for each useless place
        self._strangers: dict[socket.socket, None] = {}  # connections from somewhere, the oldest first
        self._again: list[tuple[float, int, Place]] = []  # calls to repeat: when, the distance, the place
        self._proven: set[int] = set()  # distances of ranks that have proven that they have the key
        self._selector = selectors.DefaultSelector()

    def run(self, listeners: Mapping[Place, socket.socket], limit: float) -> tuple[Connections, Connections]:
        """Return the connections from other ranks, and the connections to other ranks.

        Raises:
            GaveUp: If not all connections can be made within ``limit`` seconds.
        """
        deadline, kept = time.monotonic() + limit, list[socket.socket]()
        try:
            for place, listener in listeners.items():
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, self._accept(listener, place))
            for distance in self._distances:
                self._check(distance)
                for place in self._places_of(distance):
                    self._call(distance, place)
            while min(len(self._inward), len(self._outward)) < len(self._distances):
                if (left := deadline - time.monotonic()) <= 0:
                    raise GaveUp(f"{self._missing()} did not connect within {limit:g} s")
                due = [call for call in self._again if call[0] <= time.monotonic()]
                self._again = [call for call in self._again if call not in due]
                for _, distance, place in due:
                    if distance not in self._outward:
                        self._call(distance, place)
                for key, _ in self._selector.select(min(left, _PAUSE) if self._again else left):
                    connection: Any = key.fileobj
                    if connection.fileno() < 0:  # it was closed since
                        continue
                    if (event := next(key.data, None)) is None:
                        self._close(connection)
                    else:
                        self._selector.modify(connection, event, key.data)
            kept += *self._inward.values(), *self._outward.values()
            return self._inward, self._outward
        finally:
            for key in list(self._selector.get_map().values()):
                if key.fileobj not in kept:
                    self._close(key.fileobj)
            self._selector.close()

    def _close(self, connection: Any) -> None:
        self._strangers.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _places_of(self, distance: int) -> list[Place]:
        """Return the places of the rank after this one at a distance, as far as this machine may reach them."""
        _, machine, places, *_ = self._rows[(self._rank + distance) % len(self._rows)]
        is_here = machine == self._rows[self._rank][1]
        return [(address, port) for address, port in places if is_here or not ip_address(address).is_loopback]

    def _missing(self) -> str:
        ahead, behind = self._distances - self._outward.keys(), self._distances - self._inward.keys()
        distances = sorted(ahead | {len(self._rows) - distance for distance in behind})
        return ", ".join(map(self._name, distances))

    def _name(self, distance: int) -> str:
        return f"rank {(self._rank + distance) % len(self._rows)} at {_text_of(self._places_of(distance))}"

    def _check(self, distance: int) -> None:
        """Raise if the rank after this one at a distance has no place that is left to try."""
        errors = self._errors.setdefault(distance, [])
        if len(errors) == len(self._places_of(distance)):
            other, why = (self._rank + distance) % len(self._rows), "; ".join(errors)
            if distance in self._proven:  # that rank has given up since, and knows why
                raise GaveUp("")
            raise GaveUp(f"rank {other} cannot be reached ({why or 'it listens only on its own machine'})")

    # -- both ends ----------------------------------------------------------------------------------------------------

    def _call(self, distance: int, place: Place) -> None:
        connection = socket.socket(_family(place[0]))
        connection.setblocking(False)
        code = connection.connect_ex(place)
        self._selector.register(connection, selectors.EVENT_WRITE, self._prove(connection, distance, place, code))

    def _prove(self, connection: socket.socket, distance: int, place: Place, code: int) -> Generator[int]:
        """Exchange proofs with the rank after this one at a distance, which listens at a place."""
        try:
            if code in (0, errno.EINPROGRESS):
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            other, nonce = (self._rank + distance) % len(self._rows), secrets.token_bytes(_BYTES)
            connection.sendall(_HELLO.pack(_CONSTANT, self._rank, other, nonce))
            answer = yield from _received(connection, 2 * _BYTES)
            about = self._rank, other, nonce + answer[:_BYTES], place
            self._compare(answer[_BYTES:], b"listens", *about)
            self._proven.add(distance)
            if distance in self._outward:
                return
            connection.sendall(self._proof(b"connects", *about))
            yield from _received(connection, len(_KEEPS))
            self._outward[distance] = connection
            yield selectors.EVENT_READ
            raise ConnectionResetError
        except (ConnectionResetError, BrokenPipeError):  # that rank has too many strangers, or has given up
            if self._outward.get(distance, connection) is connection:
                self._outward.pop(distance, None)
                self._again.append((time.monotonic() + _PAUSE, distance, place))
        except OSError as error:
            self._errors[distance].append(f"{_text_of([place])}: {error.strerror}")
            if distance not in self._outward:
                self._check(distance)

    def _accept(self, listener: socket.socket, place: Place) -> Generator[int]:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:  # it has gone already, or there are too many open files
                is_full = error.errno in (errno.EMFILE, errno.ENFILE)
                if is_full and not self._strangers:
                    raise
            else:
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ, self._answer(connection, place))
                self._strangers[connection] = None
                is_full = len(self._strangers) > _MOST_STRANGERS
            if is_full:
                self._close(next(iter(self._strangers)))
            yield selectors.EVENT_READ

    def _answer(self, connection: socket.socket, place: Place) -> Generator[int]:
        """Exchange proofs with a rank before this one, which connects to a place of this rank."""
        with suppress(OSError, struct.error):
            hello = yield from _received(connection, _HELLO.size)
            constant, other, expected, nonce = _HELLO.unpack(hello)
            distance = (self._rank - other) % len(self._rows)
            if (constant, expected) != (_CONSTANT, self._rank) or distance not in self._distances:
                return
            own_nonce = secrets.token_bytes(_BYTES)
            about = other, self._rank, nonce + own_nonce, place
            connection.sendall(own_nonce + self._proof(b"listens", *about))
            self._compare((yield from _received(connection, _BYTES)), b"connects", *about)
            if self._inward.setdefault(distance, connection) is connection:
                del self._strangers[connection]
                connection.sendall(_KEEPS)
                yield selectors.EVENT_READ
                raise GaveUp("")  # the other rank has closed the connection

    def _proof(self, role: bytes, connects: int, listens: int, nonces: bytes, place: Place) -> bytes:
        about = struct.pack("<8sII64s", role, connects, listens, nonces) + _text_of([place]).encode()
        return hmac.digest(self._key, about, "sha256")

    def _compare(self, proof: bytes, *about: Any) -> None:
        if not hmac.compare_digest(proof, self._proof(*about)):
            raise OSError(errno.ECONNREFUSED, _NO_PROOF)


def _received(connection: socket.socket, size: int) -> Generator[int, None, bytes]:
    """Receive so many bytes."""
    data = b""
    while len(data) < size:
        yield selectors.EVENT_READ
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data
