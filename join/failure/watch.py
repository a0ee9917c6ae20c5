"""Thread of a process group that reads the messages of other ranks: :class:`Watch`.

A store that cannot be reached blocks its callers for minutes. So the main thread of a rank never reads a board that is
in a store. It asks the watch, and waits for a limited time. While the main thread is blocked in a collective, the watch
answers for its rank.

On an accelerator, a collective does not break when another rank is gone. The device waits, and so does a thread that
reads a tensor from it. So the watch acts by itself. A second after it has seen that a rank has failed, or has ended
without leaving the block, it aborts the operations of this process on its devices, and closes gloo's connections in the
group. The main thread then continues, and finds the cause when it reaches its next header::

    rank that fails                      every other rank                       its watch
    ---------------                      ----------------                       ---------
    posts a note, or its process ends    reads its loss from a device that      sees the note, or that the process
                                         waits for the rank that failed         has ended
                                         .                                      a second later: aborts
                                         continues with invalid values; waits
                                         for its next header, and reads the
                                         notes: PeerError

A group has one watch, with one connection to its store. The thread starts with a block, sleeps between blocks, and ends
after a while without one. In a process that was forked from a rank, a watch does nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from weakref import WeakSet

from join.collectives import Collective
from join.collectives._torch_private import Aside, awaited
from join.collectives.board import Board, Note, Progress
from join.collectives.timeouts import TIMEOUTS
from join.failure.wait import Wait

_logger = logging.getLogger("join")
_watches: WeakSet[Watch] = WeakSet()


@dataclass(frozen=True)
class News:
    """Result of reading the board.

    Attributes:
        notes: The notes of other ranks.
        progress: The progress of other ranks, by rank.
        ended: The other ranks whose processes are known to have ended.
    """

    notes: list[Note] = field(default_factory=list[Note])
    progress: dict[int, Progress] = field(default_factory=dict[int, Progress])
    ended: list[int] = field(default_factory=list[int])


@dataclass(eq=False)
class Watched:
    """One block of a group, as its watch knows it.

    Attributes:
        number: The number of the block, positive and equal on all ranks.
        wait: The clock of waits of this rank.
        progress: Returns the progress of this rank. It is called in the thread of the watch.
        abort: Aborts the operations that this rank may wait for, on devices and over gloo's connections, and returns
            whether this process has groups on devices. It is called in the thread of the watch once another rank has
            failed, and again until the block is left.
        on_fork: Called in a process that is forked from this one while the block is open.
        news: Result of the last look at the board.
        failed: Whether the board cannot be reached any more.
        aborted_for: The news that made the watch abort operations of this rank on a device; ``None`` without any.
        own: The last note of this rank.
    """

    number: int
    wait: Wait
    progress: Callable[[], Progress] = Progress
    abort: Callable[[], bool] = bool
    on_fork: Callable[[], object] = bool
    news: News = field(default_factory=News)
    failed: bool = False
    aborted_for: News | None = None
    is_open: bool = True
    posted: Progress = field(default_factory=Progress)
    own: Note | None = None
    wanted: int = 0  # the number of looks that were requested
    looked: int = 0  # the number of these that were made
    is_rung: bool = False
    is_done: bool = False  # for the thread: whether the other ranks can read that this rank has left the block
    lost_since: float = float("inf")  # the time at which the watch saw that another rank has failed

    @property
    def is_lost(self) -> bool:
        """Whether another rank has failed, and this one should have found that by itself."""
        return time.monotonic() - self.lost_since >= TIMEOUTS.abort


def watch_of(collective: Collective) -> Watch:
    """Return the watch of a group."""
    kept = collective.kept
    if kept.watch is None:
        kept.watch = Watch(collective.board)
    return kept.watch


class Watch:
    """Thread that reads the board of a group at intervals, or when it is asked to, while a block is open.

    Args:
        open_board: Returns the board for the first block.
    """

    def __init__(self, open_board: Callable[[], Board]) -> None:
        self.board = open_board()
        """The board that it reads."""
        self._older = list[Board]()  # that other ranks may still read in this block
        self.block = Watched(0, Wait(1), is_open=False, is_done=True)
        """The open block, or the last one."""
        self._thread: threading.Thread | None = None  # which reads the board; another one may still wait for a store
        self.is_fork = False
        """Whether this process was forked from the rank, which has the thread and the connections."""
        self._others = set(range(self.board.world_size)) - {self.board.rank}  # in a fork, none
        self._is_asleep = False
        self._changed = threading.Condition()
        self._telling = threading.Lock()  # held while progress is written to a board in memory
        _watches.add(self)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def begin(
        self,
        progress: Callable[[], Progress],
        abort: Callable[[], bool] = bool,
        on_fork: Callable[[], object] = bool,
    ) -> None:
        """Begin to watch the next block, unless one is open. :class:`Watched` documents the arguments."""
        if self.block.is_open or self.is_fork:
            return
        number = self.block.number + 1
        self._older, self.board.block = [], number
        wait = Wait(self.board.world_size)
        self.block = Watched(number, wait, progress, abort, on_fork)  # at last, for an exception in these lines
        if self._others:
            with self._changed:
                self._wake()

    def use(self, board: Board) -> None:
        """Read this board from now on, if its class differs from the current one.

        A new thread reads it, since the connection to the store of the current one may take seconds.
        """
        if not self._others or type(board) is type(self.board):
            return
        board.block = self.block.number
        self._older, self.board = [self.board], board
        with self._changed:
            self._start()

    def end(self) -> None:
        """Stop watching, and tell the other ranks that this one has left the block."""
        block, board = self.block, self.board
        block.is_open = False
        block.progress, block.abort, block.on_fork = Progress, bool, bool  # they refer to the process group
        if not self._others:
            return
        if board.outlives:  # the thread is not woken up, because that would take as long as a short block
            with self._telling:
                board.tell(block.posted._replace(done=True), block.number)
                block.is_done = True
            return
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: block.is_done or block.failed, TIMEOUTS.look)  # a store may block it

    def refresh(self, seconds: float, *, ring: bool = False) -> bool:
        """Read the board, and return whether that was possible within ``seconds``.

        Args:
            seconds: The longest time to wait.
            ring: Whether to ask the other ranks for their progress.
        """
        block = self.block
        if not self._others:
            return not self.is_fork
        with self._changed:
            block.is_rung |= ring
            block.wanted += 1
            wanted = block.wanted
            self._wake()
            self._changed.notify_all()
            self._changed.wait_for(lambda: block.looked >= wanted or block.failed, seconds)
            return block.looked >= wanted

    def post(self, note: Note, seconds: float) -> None:
        """Post a note, and try to wait until the other ranks can read it even if this process ends."""
        if not self._others:
            return
        deadline, block, boards = time.monotonic() + seconds, self.block, [self.board, *self._older]
        block.own = note
        posting, *_ = [Aside(partial(board.post, note, block.number), or_here=True) for board in boards]
        with suppress(Exception):
            posting.wait(timedelta(seconds=seconds))
        while not self.board.outlives and self.refresh(max(deadline - time.monotonic(), 0.0)):
            heard = {rank for rank, progress in block.news.progress.items() if progress.heard}
            gone = {note.rank for note in block.news.notes} | set(block.news.ended)
            if self._others <= heard | gone or time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def exit(self) -> None:
        """Let the thread end, because the interpreter shuts down."""
        if self._others:  # a fork has no thread, and another one may have held the lock
            with self._changed:
                self._thread = None
                self._changed.notify_all()

    def become_fork(self) -> None:
        """Do nothing from now on, since this process is a fork of the rank; a process without other ranks goes on."""
        if self._others:
            self.is_fork, self._others = True, set()
            if self.block.is_open:
                self.block.on_fork()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Start the thread, or wake it up if it sleeps between blocks; the caller holds the condition."""
        if self._thread is None or not self._thread.is_alive():
            self._start()
        elif self._is_asleep or not self.board.outlives:
            self._changed.notify_all()

    def _start(self) -> None:
        name = f"join watch of rank {self.board.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        awaited.add(self._thread)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be had: failures show when collectives break
            if not self.block.failed:
                _logger.warning("rank %d cannot watch the other ranks: %s", self.board.rank, error)
            self._thread, self.block.failed = None, True

    def _is_needed(self) -> bool:
        """Return whether the thread that calls this should continue."""
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        while self._is_needed():
            with self._changed:
                self._is_asleep = True
                self._changed.wait_for(lambda: not self._is_needed() or not self.block.is_done, TIMEOUTS.idle)
                self._is_asleep = False
                if self.block.is_done:  # nothing is written at exit, since the board may have failed
                    if self._is_needed():
                        self._thread = None
                    return
                block = self.block
            try:
                self._look_until_the_end(block)
            except Exception as error:  # the store is gone, with the process that hosted it
                self._go_without_board(block, error)
            if self._is_needed():
                with self._changed:
                    block.is_done = True
                    self._changed.notify_all()

    def _go_without_board(self, block: Watched, error: Exception) -> None:
        _logger.info("rank %d cannot read the messages of other ranks: %r", self.board.rank, error)
        with self._changed:
            if not self._is_needed():
                return
            block.failed = True
            self._changed.notify_all()
            is_over = self._changed.wait_for(lambda: not (block.is_open and self._is_needed()), TIMEOUTS.abort)
        if not is_over and self.board.of_ranks:
            self._abort_for(block, News())

    def _look_until_the_end(self, block: Watched) -> None:
        is_posting, beat = False, 0
        board = self.board
        while block.is_open and self._is_needed():
            with self._changed:
                wanted, rings = block.wanted, block.is_rung
            if rings and not is_posting:
                board.ring()
            ended = board.ended()  # is read before the notes, which an ended rank has then posted
            is_posting = is_posting or bool(ended) or board.is_rung()
            own = block.wait.look(block.progress, is_asked=is_posting)
            if own is not None and self._is_needed():
                beat += 1
                block.news = _read(board, ended)
                block.posted = own._replace(heard=len(block.news.notes), beat=beat)
                with self._telling if board.outlives else nullcontext():  # a store may block its callers
                    if block.is_open:
                        board.tell(block.posted, block.number)
                self._act_on_news(block)
            with self._changed:
                block.looked = wanted
                self._changed.notify_all()
                if block.wanted == wanted and block.is_open and self._is_needed():
                    self._changed.wait(block.wait.interval)
        if not (board.outlives or block.is_open):
            board.tell(block.posted._replace(done=True), block.number)

    def _act_on_news(self, block: Watched) -> None:
        """Abort the operations of this rank if it has not found the failure of another rank after a while.

        Without a failure, explain a long wait.
        """
        news = block.news
        if not (news.notes or news.ended):
            block.lost_since = float("inf")
            return block.wait.explain(self.board, block.posted, news.progress)
        block.lost_since = min(block.lost_since, time.monotonic())
        if block.is_lost:
            self._abort_for(block, news)
            if not news.notes and block.own is None:  # some ranks may not see that a process has ended
                block.own = Note(self.board.rank, news.ended[0], "", text_of_gone(news.ended))
                self.board.post(block.own, block.number)

    def _abort_for(self, block: Watched, news: News) -> None:
        if block.abort():
            block.aborted_for = block.aborted_for or news


def _read(board: Board, ended: list[int]) -> News:
    notes = [note for note in board.notes() if note.rank != board.rank]
    progress = {rank: posted for rank, posted in board.progress().items() if rank != board.rank}
    return News(notes, progress, [rank for rank in ended if rank not in progress or not progress[rank].done])


def text_of_gone(ranks: list[int]) -> str:
    """Return the text about ranks whose processes are gone. An empty list means that the store is gone, too."""
    gone = f"rank {ranks[0]} is gone" if len(ranks) == 1 else f"ranks {ranks} are gone"
    if not ranks:
        gone = "another rank is gone, together with the store of the process group"
    #: If memory has run out, the kernel's log says so. After that, restart all processes from a checkpoint.
    return (
        f"{gone}, without an exception that other ranks could read. Its process was killed, ended by os._exit, lost its"
        " connection, or never entered the block. Look for the reason in its output and in the kernel's log. If it"
        " aborted, PYTHONFAULTHANDLER=1 adds its line to the output. [J064]"
    )


@atexit.register
def _exit() -> None:
    for watch in list(_watches):
        watch.exit()


def _become_fork() -> None:
    for watch in list(_watches):
        watch.become_fork()


os.register_at_fork(after_in_child=_become_fork)
