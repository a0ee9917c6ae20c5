"""Connections between ranks: who gets one, who does not, and what ranks do that cannot connect."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import pytest

from join import Join
from join.collectives import Collective, Line, collective_of
from join.collectives import handshake as module
from join.collectives.base import GroupLine
from join.collectives.handshake import GaveUp, Place
from join.collectives.messages import MessageLine
from join.collectives.version import VERSION
from join.rounds import Answers, Share, Shares
from tests.ending import Ending
from tests.join.counter import Counter
from tests.pool import Pool
from tests.shorter import using

KEY = b"k" * 32


@contextmanager
def noted() -> Iterator[list[str]]:
    """The warnings that this rank logs."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("join")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def done(work: Any) -> Any:
    work.wait()
    return work


def sums(line: Line, ranks: int) -> None:
    assert done(line.sum(1, 5)).total() == ranks


# -- strangers ---------------------------------------------------------------------------------------------------------

STRANGERS = {
    "silent": (160, b""),
    "garbage": (20, b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n" * 3),
    "half": (20, b"joinab"),
}


def beside_strangers(rank: int, kind: str) -> None:
    """They are there before any rank."""
    held: list[socket.socket] = []
    number, words = STRANGERS[kind]
    create = socket.create_server

    def create_and_fill(*args: Any, **named: Any) -> socket.socket:
        listener = create(*args, **named)
        for _ in range(number):
            stranger = socket.socket(listener.family)
            held.append(stranger)
            stranger.setblocking(False)
            with suppress(OSError):
                stranger.connect(("127.0.0.1", listener.getsockname()[1]))
                stranger.send(words)
        return listener

    with mock.patch.object(socket, "create_server", create_and_fill):
        line = collective_of(None).line()
    assert isinstance(line, MessageLine)
    sums(line, 3)
    for stranger in held:
        stranger.close()


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_cost_nothing(pool: Pool, kind: str) -> None:
    pool.run(beside_strangers, kind, ranks=3, over_group=True, timeout=30)


# -- programs that take part in the exchange ---------------------------------------------------------------------------


class Two:
    """Two ranks without a process group: where each of them listens, and how their meetings end."""

    def __init__(self) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.places: list[Place] = [listener.getsockname() for listener in self.listeners]
        self.ends: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self, rank: int, places: list[Place], limit: float = 20.0) -> None:
        """Let a rank meet the other one, with these places."""
        thread = threading.Thread(target=self._run, args=(rank, places, limit))
        self._threads.append(thread)
        thread.start()

    def _run(self, rank: int, places: list[Place], limit: float) -> None:
        rows = [["", "here", [place], "", ""] for place in places]
        with self.listeners[rank] as listener:
            try:
                self.ends[rank] = module._Meeting(rank, rows, KEY, {1}).run({self.places[rank]: listener}, limit)
            except GaveUp as error:
                self.ends[rank] = str(error)

    def finish(self) -> dict[int, Any]:
        """How the meetings have ended: the two connections, or the reason."""
        for thread in self._threads:
            thread.join(30)
        for end in self.ends.values():
            for connection in () if isinstance(end, str) else (end[0][1], end[1][1]):
                connection.close()
        return self.ends


@pytest.fixture
def two() -> Two:
    return Two()


def replies(place: Place, *words: Callable[[bytes], bytes]) -> bytes:
    """What comes after these words to a listening rank, each of which depends on all that has come so far."""
    come = b""
    with suppress(ConnectionError), socket.create_connection(place) as stranger:
        stranger.settimeout(20)
        for word in words:
            stranger.sendall(word(come))
            come += stranger.recv(64)
    return come


def hello(rank: int = 0, expected: int = 1, nonce: bytes = b"n" * 32) -> Callable[[bytes], bytes]:
    return lambda _: module._HELLO.pack(module._CONSTANT, rank, expected, nonce)


def proof(come: bytes, key: bytes, role: bytes = b"connects", place: Place = ("127.0.0.1", 1)) -> bytes:
    meeting = module._Meeting(0, [], key, set())
    return meeting._proof(role, 0, 1, b"n" * 32 + come[:32], place)


def test_who_is_no_rank_is_turned_away(two: Two) -> None:
    """After all of them, the other rank still finds its place."""
    two.start(1, two.places)
    place = two.places[1]
    recorded = proof(replies(place, hello()), KEY, place=place)  # right, for another nonce
    for words in (hello(expected=0), hello(rank=1), hello(rank=7), lambda _: b"x" * 48):
        assert replies(place, words) == b""
    for word in (
        lambda _: recorded,
        lambda come: come[32:64],  # the listening rank's own
        lambda come: proof(come, b"another key" * 3, place=place),
        lambda come: proof(come, KEY, b"listens", place=place),
        lambda come: proof(come, KEY),  # for another address
    ):
        assert len(replies(place, hello(), word)) == 64
    two.start(0, two.places)
    ends = two.finish()
    assert [type(end) for end in ends.values()] == [tuple, tuple], ends


def test_a_rank_that_was_dropped_as_a_stranger_calls_again(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, dropped = module._Meeting._answer, list[int]()

    def answers(self: Any, connection: socket.socket, place: Place) -> Any:
        exchange = answer(self, connection, place)
        if self._rank == 1 and not dropped:
            dropped.append(1)
            yield next(exchange)
            next(exchange)  # which sends the proof of rank 1
            return
        yield from exchange

    monkeypatch.setattr(module._Meeting, "_answer", answers)
    for rank in (0, 1):
        two.start(rank, two.places)
    assert not any(isinstance(end, str) for end in two.finish().values()) and dropped


def test_a_place_that_closes_all_connections_is_called_at_intervals(two: Two) -> None:
    calls = list[int]()

    def close_all() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                two.listeners[1].accept()[0].close()
                calls.append(1)

    closing = threading.Thread(target=close_all)
    closing.start()
    two.start(0, two.places, limit=1.0)
    assert "did not connect" in two.finish()[0] and 1 < len(calls) < 100
    two.listeners[1].shutdown(socket.SHUT_RDWR)
    closing.join(30)
    two.listeners[1].close()


def test_a_name_server_that_does_not_answer_holds_up_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(module, "own_addresses", lambda host: answers.wait(30))
    assert module.addresses_within(0.1) == ["127.0.0.1"]
    answers.set()


def pass_on(listener: socket.socket, place: Place, heard: list[bytes]) -> None:
    """Pass all words between whoever connects and the rank that listens at a place."""
    with suppress(OSError):
        while True:
            caller, _ = listener.accept()
            with caller, socket.create_connection(place) as called:
                while (words := caller.recv(64)) and not called.sendall(words):
                    heard.append(words)
                    caller.sendall(called.recv(64))


def answer(listener: socket.socket, answers: Callable[[bytes], bytes], heard: list[bytes]) -> None:
    with suppress(OSError):
        while True:
            caller, _ = listener.accept()
            with caller:
                caller.settimeout(20)
                while words := caller.recv(64):
                    heard.append(words)
                    caller.sendall(answers(words))


@pytest.mark.parametrize("how", ["welcomes", "reflects", "passes on"])
def test_an_impostor_is_left_and_learns_nothing(two: Two, how: str) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers = {"welcomes": lambda words: b"\1" * 64, "reflects": lambda words: (words * 2)[16:80]}
        todo = (
            (pass_on, (listener, two.places[1], heard))
            if how == "passes on"
            else (answer, (listener, answers[how], heard))
        )
        thread = threading.Thread(target=todo[0], args=todo[1], daemon=True)
        thread.start()
        two.start(1, two.places)
        two.start(0, [two.places[0], listener.getsockname()])
        ends = two.finish()
    assert ends[0].startswith("rank 1 cannot be reached (127.0.0.1 port ") and "another program answers" in ends[0]
    assert ends[1] == "" or "Connection refused" in ends[1]  # the first one has given up
    assert len(heard) == 1 and len(heard[0]) == module._HELLO.size and KEY[:8] not in heard[0]


# -- ranks that cannot connect -----------------------------------------------------------------------------------------


def falls_back(rank: int, patches: Callable[[int], Any], told: str, limits: dict[str, float]) -> None:
    """All ranks use the group, and the first one says why, once."""
    with noted() as warnings, using(**limits), patches(rank):
        line = collective_of(None).line()
        assert isinstance(line, GroupLine)
        sums(line, 3)
        collective_of(None).line()
    assert len(warnings) == (rank == 0 and told != "")
    assert all(told in text for text in warnings), warnings


def off(rank: int) -> Any:
    return mock.patch.dict(os.environ, {module.SWITCH: "0"} if rank == 1 else {})


def off_everywhere(rank: int) -> Any:
    return off(1)


def elsewhere(rank: int) -> Any:
    """It has only a loopback address, on another machine."""
    return mock.patch.object(module, "machine", mock.Mock(return_value=f"machine {rank == 1}"))


def without_files(rank: int) -> Any:
    """It can listen, and then open nothing."""
    too_many = OSError(24, "Too many open files")
    return mock.patch.object(module._Meeting, "_call", side_effect=too_many) if rank == 1 else mock.patch("os.getcwd")


@contextmanager
def offering(rank: int, *, refuses: bool) -> Iterator[None]:
    """Rank 1 offers places where others do not reach it: as behind a firewall that rejects, or that drops."""
    create = socket.create_server

    class Elsewhere(socket.socket):
        def getsockname(self) -> Place:
            with create(("127.0.0.1", 0)) as unused:
                place: Place = unused.getsockname()
            if not refuses:
                held.append(create(place))
            return place

    held: list[socket.socket] = []
    offer = mock.Mock(side_effect=lambda *args, **named: Elsewhere(fileno=create(*args, **named).detach()))
    with mock.patch.object(socket, "create_server", offer) if rank == 1 else nullcontext():
        yield
    for silent in held:
        silent.close()


refusing, dropping = partial(offering, refuses=True), partial(offering, refuses=False)
CASES: dict[str, tuple[Callable[[int], Any], str, dict[str, float]]] = {
    "off": (off, "rank 1: JOIN_MESSAGES=0 forbids it", {"connect": 1e6}),
    "off everywhere": (off_everywhere, "", {"connect": 1e6}),
    "elsewhere": (elsewhere, "rank 0: rank 1 cannot be reached (it listens only on its own machine)", {"connect": 1e6}),
    "without files": (without_files, "rank 1: [Errno 24] Too many open files", {"connect": 1e6}),
    "refusing": (refusing, "Connection refused", {"connect": 1e6}),
    "dropping": (dropping, "did not connect within 2 s", {"connect": 2.0}),  # either end may say so first
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_cannot_connect_say_so_once(pool: Pool, case: str) -> None:
    """They do so at once, if one of them knows; else when the time is over."""
    pool.run(falls_back, *CASES[case], ranks=3, over_group=True, timeout=40)


def enters(rank: int) -> None:
    with using(connect=1e6), dropping(rank), Join([counter := Counter(collective_of(None))], timeout=2.0):
        for _ in range(rank):
            counter()
    assert counter.total == 1


def test_the_timeout_of_a_block_is_kept(pool: Pool) -> None:
    pool.run(enters, ranks=2, over_group=True, timeout=40)


def interrupted(rank: int) -> None:
    if rank == 0:
        run = module._Meeting.run

        def runs(*args: Any) -> Any:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            return run(*args)

        mock.patch.object(module._Meeting, "run", runs).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with using(connect=1e6), dropping(rank):
        collective_of(None).line()


def test_an_interrupt_ends_it(ending: Ending) -> None:
    first, _ = ending.ends(interrupted, ranks=2, over_group=True, limit=40)
    assert first.error == "KeyboardInterrupt"


# -- versions ----------------------------------------------------------------------------------------------------------


def unlike(rank: int) -> None:
    with mock.patch.object(module, "VERSION", "9.9" if rank == 1 else VERSION), pytest.raises(RuntimeError) as caught:
        collective_of(None).line()
    own, other = (f"joinables {version} with message format 2" for version in (VERSION, "9.9"))
    assert f"(rank 0: {own}; rank 1: {other}; rank 2: {own})" in str(caught.value)


def test_unlike_versions_are_refused_on_all_ranks(pool: Pool) -> None:
    pool.run(unlike, ranks=3, over_group=True)


class Evil:
    def __reduce__(self) -> Any:
        return os.putenv, ("EVIL", "1")


def pickles(rank: int) -> None:
    """Rank 1 sends a pickle, as an earlier version did; nothing unpickles it."""
    collective: Collective = collective_of(None)
    if rank == 1:
        with pytest.raises(pickle.UnpicklingError):
            collective.all_gather_object(Evil())
    else:
        with mock.patch.object(pickle, "loads", side_effect=AssertionError), pytest.raises(RuntimeError, match="J571"):
            collective.all_gather_object([1], plain=True)


def test_a_pickle_is_not_read(pool: Pool) -> None:
    pool.run(pickles, ranks=2)


def sends_all_kinds(rank: int) -> None:
    collective: Collective = collective_of(None)
    with mock.patch.multiple(pickle, loads=mock.Mock(side_effect=AssertionError), dumps=mock.DEFAULT):
        line = collective.line()
        sums(line, 3)
        assert done(line.sum_float(0.1 * rank)).total() == pytest.approx(0.3)
        assert done(line.gather(b"%d" % rank)).rows() == [b"0", b"1", b"2"]
        roll_call = line.roll_call((1 << 90) - 1, Shares(4, weighs=True))
        (weight,) = struct.unpack("<Q", struct.pack("<d", 0.1))
        roll_call.call((weight << 4 | 1) << 16 if rank else 0)
        assert done(roll_call).result() == Answers(0, [Share(2, 1, 2 * Fraction(0.1))])


@pytest.mark.parametrize("over_group", [False, True])
def test_lines_need_no_pickle(pool: Pool, over_group: bool) -> None:
    pool.run(sends_all_kinds, ranks=3, over_group=over_group)


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the interfaces that gloo is told, or those on the route to the store."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing,lo")
    assert module.own_addresses("192.0.2.1")[0] == "127.0.0.1"
    assert set(module.own_addresses()) <= {"127.0.0.1", "::1"}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    assert module.own_addresses() == ["127.0.0.1"]
    assert module.own_addresses("::1")[-2:] in (["::1", "127.0.0.1"], ["127.0.0.1"])


def listens(rank: int) -> list[str]:
    found: list[str] = []
    create = socket.create_server

    def noting(address: Any, **named: Any) -> socket.socket:
        found.append(address[0])
        return create(address, **named)

    with mock.patch.object(socket, "create_server", noting):
        collective_of(None).line()
    return found


def test_no_rank_listens_on_all_interfaces(pool: Pool) -> None:
    for found in pool.run(listens, ranks=2, over_group=True):
        assert found == module.own_addresses() and "" not in found and "0.0.0.0" not in found
