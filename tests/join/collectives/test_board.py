"""One suite over every Board: threads, shared memory, a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from join.collectives import Collective, SingleCollective, collective_of, run_threads, shared_memory
from join.collectives.board import Board, Note, Progress, StoreBoard
from join.collectives.shared_memory import Segment, SharedBoard
from join.failure.guard import Guard
from join.failure.watch import Watch
from tests.harness import Pool, assert_soon, in_quiet
from tests.join.counter import Counting
from tests.shorter import using

RANKS = 3


def conforms(collective: Collective) -> None:
    rank, others = collective.rank, set(range(collective.world_size)) - {collective.rank}
    collective.line()
    for block in (1, 2):
        board = collective.board()
        board.block = block
        collective.barrier()
        assert (board.notes(), board.progress(), board.is_rung(), board.ended()) == ([], {}, False, [])
        collective.barrier()
        if rank == 0:
            board.ring()
        collective.barrier()
        assert board.is_rung() or not others
        for step in range(3):
            progress = Progress(headers=rank, step=step, doing="ümläut \ud800 \n" * 100, left=bool(rank))
            board.tell(progress)
            collective.barrier()
            told = board.progress()
            assert set(told) | others | {rank} == set(range(collective.world_size))
            for other in others:
                assert (told[other].headers, told[other].step, told[other].left) == (other, step, bool(other))
                assert told[other].doing.startswith("ümläut ? \n") and len(told[other].doing) <= 450
            collective.barrier()
        text = f"rank {rank} failed: " + "日本\x00" * 5000
        board.post(Note(rank, 0, "ValueError", "first"))
        board.post(Note(rank, 1, "ValueError", text))
        collective.barrier()
        for note in board.notes():
            assert (note.cause, note.kind) == (1, "ValueError")
            assert note.text.startswith(f"rank {note.rank} failed: 日本?日") and len(note.text) <= 3500
        assert {note.rank for note in board.notes()} >= others
        collective.barrier()


def over_gloo(rank: int, kind: type[Board]) -> None:
    collective = collective_of(None)
    collective.line()
    assert isinstance(collective.board(), kind)
    conforms(collective)


@pytest.mark.parametrize("over_group", [False, True])
def test_gloo(pool: Pool, over_group: bool) -> None:
    pool.run(over_gloo, StoreBoard if over_group else SharedBoard, ranks=RANKS, over_group=over_group)


@pytest.mark.parametrize("ranks", [2, 16])
def test_threads(ranks: int) -> None:
    run_threads(ranks, conforms)


def test_single() -> None:
    conforms(SingleCollective())


def test_a_message_that_is_half_written_is_not_read() -> None:
    board = SharedBoard(Segment(shared_memory._create(1).file, 0, 1))
    board.block = 1
    board.post(Note(0, 0, "ValueError", "rank 0 failed"))
    assert len(board.notes()) == 1
    begin, _ = board._slot("note", 0)
    board._memory[begin + 40] ^= 1  # where another rank has come to by now
    assert board.notes() == []


def keeps_store(rank: int) -> list[bool]:
    groups: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1, 2])]
    return [collective_of(group).board().of_ranks for group in groups if dist.get_rank(group) >= 0]


def test_which_groups_have_the_rank_that_hosts_the_store(pool: Pool) -> None:
    assert pool.run(keeps_store) == [[True, True], [True, False, True], [False, True]]


@pytest.mark.parametrize("ranks", [3, 100])
def test_a_look_is_a_few_requests_however_many_ranks_there_are(ranks: int) -> None:
    store = dist.HashStore()
    for rank in range(ranks):
        board = StoreBoard(rank, ranks, store)
        board.block = 1
        board.tell(Progress(step=rank))
    counting: Any = Counting(store)
    board = StoreBoard(0, ranks, counting)
    board.block = 1
    board.tell(Progress(step=7))
    counting.requests = 0
    assert len(board.progress()) == ranks and board.notes() == []
    assert counting.requests == 4


FOREIGN = [
    "1 5",
    "1 null",
    "1 [[[",
    "1 " + "[" * 100_000,
    '1 {"rank": 0}',
    '1 [0, 0, "ValueError", null]',
    '1 [0, "0", "ValueError", "text"]',
    '1 [7, 0, "ValueError", "text"]',
    '1 [0, 1, "ValueError"]',
    "1 [0, []]",
    "1 [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]",
    b"1 \xff\xfe",
]


@pytest.mark.parametrize("text", FOREIGN)
def test_what_another_program_writes_into_the_store_is_ignored(text: Any) -> None:
    store = dist.HashStore()
    boards = [StoreBoard(rank, 2, store) for rank in range(2)]
    for board in boards:
        board.block = 1
        board.tell(Progress(step=7))
        board.post(Note(board.rank, 0, "ValueError", "mine"))
    for kind in ("note", "progress"):
        store.set(f"board/{kind}/0", text)
    assert boards[1].notes() == [Note(1, 0, "ValueError", "mine")]
    assert boards[1].progress() == {1: Progress(step=7)}


def test_foreign_texts_are_printable() -> None:
    store = dist.HashStore()
    board = StoreBoard(0, 1, store)
    board.block = 1
    assert board.notes() == []
    store.set("board/note/0", '1 [0, 0, "E", "\\u001b[2Jgone' + "x" * 9999 + '"]')
    (note,) = board.notes()
    assert note.text.startswith("?[2Jgone") and len(note.text) <= 3400


# -- a store that does not answer --------------------------------------------------------------------------------------


class Stuck:
    """What a store is on a network that has gone: it answers nobody until a test ends."""

    times_out = threading.Event()

    def clone(self) -> Stuck:
        return self

    def check(self, keys: list[str]) -> bool:
        self.times_out.wait()
        raise dist.DistNetworkError("timed out")

    def set(self, key: str, value: str) -> None:
        self.check([key])

    def add(self, key: str, amount: int) -> int:
        return self.check([key])


class Unreachable(SingleCollective):
    """One of two ranks, with such a store."""

    world_size = 2

    def board(self) -> Board:
        store: Any = Stuck()
        return StoreBoard(0, 2, store)


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """Or it would wake up in the middle of another test."""
    Stuck.times_out.clear()
    before = threading.enumerate()
    yield
    Stuck.times_out.set()
    for thread in set(threading.enumerate()) - set(before):
        thread.join(30)
        assert not thread.is_alive()


@in_quiet
@pytest.mark.usefixtures("no_thread_stays")
def test_nobody_waits_for_a_store_that_does_not_answer() -> None:
    with using(note=0.3, cause=0.3):
        started = time.monotonic()
        guard = Guard(Unreachable(), Progress)
        guard.post(ValueError("mine"))
        guard.look_again()
        assert guard.ask(limit=0.3) == {}
        error = guard.cause_of(dist.DistBackendError("broken"))
        assert str(error).startswith("another rank is gone, together with the store of the process group")
        guard.watch.end()
        assert_soon(time.monotonic() - started, 5)


@pytest.mark.usefixtures("no_thread_stays")
def test_a_store_that_does_not_answer_blocks_no_other_board() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    stuck, answered = Watch(Unreachable().board), Watch(lambda: StoreBoard(0, 2, store))
    for watch in (stuck, answered):
        watch.begin(Progress)
    assert not stuck.refresh(0.1)
    assert answered.refresh(10.0)
    answered.end()
    stuck.end()


def test_a_watch_whose_store_is_gone_ends() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=2))
    with using(abort=0.1, idle=0.1):
        before = threading.enumerate()
        watch = Watch(lambda: StoreBoard(0, 2, client))
        watch.begin(Progress)
        assert watch.refresh(30.0)
        (thread,) = [each for each in threading.enumerate() if each not in before]
        del store
        assert not watch.refresh(30.0) and watch.block.failed
        watch.end()
        thread.join(30)
        assert not thread.is_alive()
