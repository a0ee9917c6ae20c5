"""What the watching thread of a rank does by itself: it finds ranks that have ended, and aborts what waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from join import PeerError
from join.collectives import SingleCollective
from join.collectives._torch_private import Aside, wait_for_threads
from join.collectives.board import Board, Note, Progress, StoreBoard
from join.failure.guard import Guard
from join.failure.watch import Watch
from tests.shorter import using

SECONDS = 10.0  # for what comes at once, on a slow machine, too


def open_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.fixture
def store() -> dist.TCPStore:
    return open_store()


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    with using(look=0.05, beat=0.05, silent=1.0, abort=0.3):
        yield


def board(store: dist.TCPStore, rank: int, block: int = 1) -> StoreBoard:
    board = StoreBoard(rank, 3, store)
    board.block = block
    return board


def start(store: dist.TCPStore, rank: int, **options: Any) -> tuple[Watch, threading.Event]:
    aborted = threading.Event()
    watch = Watch(lambda: StoreBoard(rank, 3, store, **options))
    watch.begin(Progress, lambda: aborted.set() or True)
    return watch, aborted


def test_it_aborts_some_time_after_a_note(store: dist.TCPStore) -> None:
    watch, aborted = start(store, 0)
    assert not aborted.wait(0.5)
    began = time.monotonic()
    board(store, 1).post(Note(1, 1, "ValueError", "rank 1 failed"))
    assert aborted.wait(SECONDS) and time.monotonic() - began >= 0.3
    watch.end()
    assert watch.block.aborted_for is not None and watch.block.aborted_for.notes[0].text == "rank 1 failed"


def test_it_aborts_what_is_made_later(store: dist.TCPStore) -> None:
    watch, aborted = start(store, 0)
    board(store, 1).post(Note(1, 1, "ValueError", "rank 1 failed"))
    assert aborted.wait(SECONDS)
    aborted.clear()
    assert aborted.wait(SECONDS)
    watch.end()


def test_where_nothing_is_aborted_nothing_comes_of_it(store: dist.TCPStore) -> None:
    watch = Watch(lambda: board(store, 0))
    watch.begin(Progress)
    board(store, 1).post(Note(1, 1, "ValueError", "rank 1 failed"))
    time.sleep(1.0)
    assert watch.block.news.notes and watch.block.aborted_for is None
    watch.end()


def test_it_aborts_where_the_store_is_gone() -> None:
    store = open_store()
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    watch, aborted = start(client, 0)
    assert watch.refresh(SECONDS)
    del store
    assert aborted.wait(SECONDS) and watch.block.failed


def test_a_store_that_another_group_keeps_may_go() -> None:
    store = open_store()
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    watch, aborted = start(client, 0, of_ranks=False)
    assert watch.refresh(SECONDS)
    del store
    assert not aborted.wait(2.0) and watch.block.failed
    watch.end()


def beat(store: dist.TCPStore, rank: int, *, done: bool) -> None:
    """Live for a while as another rank, and end."""
    other = board(store, rank)
    for _ in range(10):
        other.ended()
        time.sleep(0.05)
    if done:
        other.tell(Progress(done=True))


def test_a_rank_that_says_no_more_is_gone_for_all(store: dist.TCPStore) -> None:
    """Rank 1 listens to rank 0, and rank 2, which listens to another one, learns of it by a note."""
    second, third = start(store, 1), start(store, 2)
    beat(store, 0, done=False)
    assert second[1].wait(SECONDS) and second[0].block.news.ended == [0]
    assert third[1].wait(SECONDS) and third[0].block.news.notes[0].text.startswith(
        "rank 0 is gone, without an exception"
    )
    for watch, _ in (second, third):
        watch.end()


def test_a_rank_that_has_failed_reports_no_other_one(store: dist.TCPStore) -> None:
    """Its own note says why, and a note of another rank that is gone would replace it."""
    own = Note(1, 1, "ValueError", "rank 1 failed")
    watch, aborted = start(store, 1)
    watch.post(own, 0.0)
    beat(store, 0, done=False)
    assert aborted.wait(SECONDS) and watch.refresh(SECONDS) and watch.block.news.ended == [0]
    assert board(store, 2).notes() == [own]
    watch.end()


def test_a_rank_that_ends_at_once_is_gone(store: dist.TCPStore) -> None:
    """It has said once that it lives."""
    board(store, 0).ended()
    watch, aborted = start(store, 1)
    assert aborted.wait(SECONDS) and watch.block.news.ended == [0]
    watch.end()


def test_a_rank_may_be_in_an_earlier_block(store: dist.TCPStore) -> None:
    board(store, 0, block=1).ended()
    second = board(store, 1, block=2)
    for _ in range(25):
        assert second.ended() == []
        time.sleep(0.06)


def test_ranks_that_are_suspended_together_live(store: dist.TCPStore) -> None:
    first, second = board(store, 0), board(store, 1)
    for _ in range(3):
        assert first.ended() == second.ended() == []
        time.sleep(0.06)
    time.sleep(2.0)  # twice as long as a rank may be silent
    for _ in range(5):
        assert second.ended() == []  # and the other one goes on a little later
        time.sleep(0.06)
    first.ended()
    time.sleep(0.06)
    assert second.ended() == []


def test_a_rank_that_has_left_its_block_may_end(store: dist.TCPStore) -> None:
    watch, aborted = start(store, 1)
    beat(store, 0, done=True)
    assert not aborted.wait(2.0)
    watch.end()


def test_a_rank_may_enter_late(store: dist.TCPStore) -> None:
    watch, aborted = start(store, 1)
    assert not aborted.wait(2.0) and watch.block.news.ended == []
    watch.end()


class Memory(StoreBoard):
    """A board that no rank has to wait for."""

    outlives = True


class Held(StoreBoard):
    """A board whose store does not answer while ``answers`` is not set."""

    def __init__(self, rank: int, world_size: int, store: dist.TCPStore) -> None:
        super().__init__(rank, world_size, store)
        self.answers, self.is_asked = threading.Event(), threading.Event()
        self.answers.set()

    def _put(self, kind: Any, text: str, block: int) -> None:
        if kind == "progress":
            self.is_asked.set()
            self.answers.wait(SECONDS)
        super()._put(kind, text, block)


def test_a_rank_that_has_entered_again_has_not_left(store: dist.TCPStore) -> None:
    held = Held(0, 3, store)
    watch = Watch(lambda: held)
    watch.begin(Progress)
    assert watch.refresh(SECONDS)
    held.answers.clear()
    watch.end()  # its thread says so much later
    watch.begin(Progress)
    held.answers.set()
    assert watch.refresh(SECONDS, ring=True)
    assert not any(progress.done for progress in board(store, 1, block=2).progress().values())
    watch.end()


def test_leaving_does_not_wait_for_an_older_board(store: dist.TCPStore) -> None:
    older = Held(0, 3, store)
    watch = Watch(lambda: older)
    watch.begin(Progress)
    older.answers.clear()
    board(store, 1).ring()
    assert older.is_asked.wait(SECONDS)
    watch.use(Memory(0, 3, store))
    leaving = threading.Thread(target=watch.end)
    leaving.start()
    leaving.join(SECONDS / 2)
    assert not leaving.is_alive()
    older.answers.set()


def threads_since(before: list[threading.Thread]) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each not in before]


@pytest.mark.parametrize("kind", [Memory, StoreBoard])
def test_a_group_has_one_thread_for_all_blocks(store: dist.TCPStore, kind: type[StoreBoard]) -> None:
    before = threading.enumerate()
    watch = Watch(lambda: kind(0, 3, store))
    watch.begin(Progress)
    (thread,) = threads_since(before)
    for block in range(1, 20):
        assert watch.block.number == block and watch.refresh(SECONDS)
        watch.end()
        assert board(store, 1, block).progress()[0].done
        watch.begin(Progress)
        assert threads_since(before) == [thread]
    watch.end()


def test_the_thread_ends_without_a_block(store: dist.TCPStore) -> None:
    watch = Watch(lambda: Memory(0, 3, store))
    with using(idle=0.1):
        for _ in range(2):
            before = threading.enumerate()
            watch.begin(Progress)
            (thread,) = threads_since(before)
            watch.end()
            thread.join(SECONDS)
            assert not thread.is_alive()
        watch.begin(Progress)  # it starts again
        assert watch.refresh(SECONDS)
        watch.end()


def test_nothing_is_written_at_exit(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has lost its board would say that it has left well."""
    watch, told = start(store, 0)[0], list[Progress]()
    assert watch.refresh(SECONDS)
    watch.end()
    monkeypatch.setattr(watch.board, "tell", told.append)
    watch.exit()
    assert not told


def test_at_exit_it_waits_for_what_it_posts(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process would be aborted by the answer of a store that comes while the interpreter shuts down."""
    watch, posted = start(store, 0)[0], threading.Event()
    older = watch.board
    monkeypatch.setattr(older, "post", lambda *_: time.sleep(1.0) or posted.set())
    watch.use(Memory(0, 3, store))
    watch.post(Note(0, 0, "ValueError", "rank 0 failed"), 0.0)
    watch.exit()
    wait_for_threads()
    assert posted.is_set()
    watch.end()


def test_at_exit_no_thread_reads_a_store(store: dist.TCPStore) -> None:
    before = threading.enumerate()
    watches = [start(store, 0)[0], start(store, 1)[0]]
    watches[1].end()  # its thread sleeps
    assert len(threads_since(before)) == 2
    for watch in watches:
        watch.exit()
    wait_for_threads()
    assert not threads_since(before)


def test_at_exit_it_waits_a_moment_for_what_was_given_up() -> None:
    """On a busy machine, gloo's answer comes a little late."""
    call = Aside(lambda: time.sleep(0.1))
    with pytest.raises(RuntimeError, match="timed out after 0 s"):
        call.wait(timedelta())
    wait_for_threads()
    assert call.is_completed()


def test_at_exit_it_does_not_wait_long_for_what_was_given_up() -> None:
    """Gloo may wait without a limit for a rank that is gone."""
    answers, began = threading.Event(), time.monotonic()
    call = Aside(answers.wait)
    with pytest.raises(RuntimeError, match="timed out after 0 s"):
        call.wait(timedelta())
    with using(note=4 * SECONDS):
        wait_for_threads()
    assert not call.is_completed() and time.monotonic() - began < 3 * SECONDS
    answers.set()
    assert call.wait()


def test_a_note_is_posted_at_once(store: dist.TCPStore) -> None:
    watch = Watch(lambda: Memory(0, 3, store))
    with using(look=5.0):
        watch.begin(Progress)
        watch.post(Note(0, 0, "ValueError", "rank 0 failed"), SECONDS)
        assert [note.text for note in board(store, 1).notes()] == ["rank 0 failed"]
        watch.end()


def test_a_watch_without_a_thread_has_failed(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block goes on: failures show when collectives break."""

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    watch = Watch(lambda: Memory(0, 3, store))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        watch.begin(Progress)
        assert watch.block.failed and not watch.refresh(SECONDS)
        watch.end()
    watch.begin(Progress)
    assert not watch.block.failed and watch.refresh(SECONDS)
    watch.end()


@pytest.mark.parametrize("asked", [False, True])
def test_it_says_that_its_rank_has_left(store: dist.TCPStore, asked: bool) -> None:
    """A rank that leaves the block much later is not to take it for dead."""
    watch, _ = start(store, 1)
    if asked:
        board(store, 0).ring()
        time.sleep(0.5)
    watch.end()
    assert [rank for rank, progress in board(store, 0).progress().items() if progress.done] == [1]


class OfThree(SingleCollective):
    """Rank 0 of three."""

    world_size = 3

    def __init__(self, store: dist.TCPStore) -> None:
        self._board_of_ranks = store

    def board(self) -> Board:
        return StoreBoard(0, 3, self._board_of_ranks)


def found(store: dist.TCPStore) -> PeerError:
    """The failure that rank 0 finds."""
    guard = Guard(OfThree(store), Progress)
    guard.watch.begin(Progress)
    with pytest.raises(PeerError) as caught:
        guard.look_again()
    guard.watch.end()
    return caught.value


def test_the_first_cause_is_told(store: dist.TCPStore) -> None:
    """Rank 1 has seen that rank 2 is gone before it could read why."""
    board(store, 1).post(Note(1, 2, "", "rank 2 is gone"))
    board(store, 2).post(Note(2, 2, "ValueError", "rank 2 failed: ValueError: mine"))
    error = found(store)
    assert str(error).startswith("rank 2 failed: ValueError: mine. The process group") and error.rank == 2


def test_a_cause_is_passed_on(store: dist.TCPStore) -> None:
    """Others may read the note of rank 0 alone."""
    board(store, 1).post(Note(1, 1, "ValueError", "rank 1 failed"))
    found(store)
    assert Note(0, 1, "ValueError", "rank 1 failed") in board(store, 2).notes()
