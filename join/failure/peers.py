"""A rank's view of the other ranks outside collectives: :class:`Peers` finds the rank that caused a failure.

One rule covers all failures (``join.errors`` says what users see)::

    rank that fails                                  every other rank
    ---------------                                  ----------------
    posts a note: its rank, class and text           its loop, or a collective
    sends nothing more                               waits for its next header, and reads the notes: PeerError
    raises its own exception                         .
    its process ends                                 its collective breaks; reads the notes: PeerError

If a rank fails because another rank has failed, its note names the failure of the other rank, so that all ranks find
the first cause.

A store that cannot be reached blocks its callers for minutes. So the main thread of a rank never reads the board. It
asks the thread of the block, :class:`Watch`, and waits for a limited time. While the main thread is blocked in a
collective, the watch answers for its rank.

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
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from join.collectives import Collective
from join.collectives.board import Board, Note, Progress
from join.collectives.broken import BrokenCollective, is_broken
from join.collectives.timeouts import TIMEOUTS
from join.errors import JoinError, JoinTimeoutError, PeerError, described

_logger = logging.getLogger("join")
_RANKS_AT_ONCE = 64  # with more ranks than these, each rank reads and writes the board less often
_LOST = "The process group cannot be used any more: restart from a checkpoint"


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


class _Starter(threading.Thread):
    """Thread that starts the watches of blocks that last.

    Starting and ending a thread takes longer than a short block. A process has one such thread. It is never woken up,
    because that would take as long.
    """

    def __init__(self) -> None:
        super().__init__(name="join starter", daemon=True)
        self.waiting: set[Watch] = set()
        self.start()

    @override
    def run(self) -> None:
        while True:
            time.sleep(TIMEOUTS.look)
            while self.waiting:  # without a variable for the watch, which would keep its process group alive
                with suppress(KeyError, RuntimeError):  # it has just ended, or the interpreter is being shut down
                    self.waiting.pop().start()


_starters: list[_Starter] = []


class Watch(threading.Thread):
    """Thread that reads a board at intervals, or when it is asked to.

    Args:
        board: The board of the block that begins.
        progress: Returns the progress of this rank. It is called in this thread.
        abort: Aborts the operations that this rank may wait for, on devices and over gloo's connections, and returns
            whether this process has groups on devices. It is called in this thread once another rank has failed, and
            again until the block is left.
        keeps_store: Whether one of the ranks hosts the store, so that a lost store means a lost rank.
    """

    def __init__(
        self,
        board: Board,
        progress: Callable[[], Progress],
        abort: Callable[[], bool],
        keeps_store: bool = True,
    ) -> None:
        super().__init__(name=f"join watch of rank {board.rank}", daemon=True)
        self.news = News()
        """Result of the last look at the board."""
        self.failed = False
        """Whether it cannot reach the board any more."""
        self.aborted_for: News | None = None
        """The news for which it aborted the operations of this rank on a device; ``None`` if it has not."""
        self._board, self._progress, self._abort, self._keeps_store = board, progress, abort, keeps_store
        self._posted = Progress()
        self._has_reported = False  # a process that has ended, in a note
        self._lost_since = float("inf")  # the time at which it saw that another rank has failed
        self._changed = threading.Condition()
        self._wanted = self._looked = 0  # the numbers of looks that were requested, and that were made of these
        self._note: Note | None = None  # to be posted
        self._is_rung = self._is_started = self._ends = False

    def begin(self) -> None:
        """Start the thread, or leave that to the starter if the board is in memory and works without a thread."""
        if not self._board.outlives:
            self.start()
            return
        if not (_starters and _starters[0].is_alive()):  # the process may be a fork
            _starters[:] = [_Starter()]
        _starters[0].waiting.add(self)

    @override
    def start(self) -> None:
        with self._changed:
            if not (self._is_started or self._ends):
                self._is_started = True
                super().start()
                # If the block is never left, a thread in a store may abort the interpreter when it exits.
                atexit.register(self.end)
        for starter in _starters:
            starter.waiting.discard(self)

    def refresh(self, seconds: float, *, ring: bool = False) -> bool:
        """Read the board, and return whether that was possible within ``seconds``.

        Args:
            seconds: The longest time to wait.
            ring: Whether to ask the other ranks for their progress.
        """
        self.start()
        with self._changed:
            self._is_rung |= ring
            self._wanted += 1
            wanted = self._wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._looked >= wanted or self.failed, seconds)
            return self._looked >= wanted

    def post(self, note: Note, seconds: float) -> None:
        """Post a note, and try to wait until the other ranks can read it even if this process ends."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._note = note
        others = set(range(self._board.world_size)) - {self._board.rank}
        while self.refresh(max(deadline - time.monotonic(), 0.0)) and not self._board.outlives:
            news = self.news
            heard = {rank for rank, progress in news.progress.items() if progress.heard}
            gone = {note.rank for note in news.notes} | set(news.ended)
            if others <= heard | gone or time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def end(self) -> None:
        """End the thread; called when the block ends."""
        with self._changed:
            self._ends = True
            if not self._is_started:
                self.start()  # only removes it from the starter
                self._board.tell(self._posted._replace(done=True))
                return
            self._changed.notify_all()
        atexit.unregister(self.end)
        self.join(TIMEOUTS.look)  # a store may block it
        if self.is_alive():  # the store must not answer while the interpreter shuts down
            atexit.register(self.join, TIMEOUTS.note)

    @override
    def run(self) -> None:
        try:
            self._look_until_the_end()
            self._board.tell(self._posted._replace(done=True))
        except Exception as error:  # the store is gone, with the process that hosted it
            _logger.info("rank %d cannot read the messages of other ranks: %r", self._board.rank, error)
            with self._changed:
                self.failed = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ends, TIMEOUTS.abort)
            if self._keeps_store and not self._ends:
                self._abort_for(News())

    def _look_until_the_end(self) -> None:
        is_posting, beat = False, 0
        while not self._ends:
            with self._changed:
                note, self._note = self._note, None
                wanted, rings = self._wanted, self._is_rung
            if note is not None:
                self._board.post(note)
            elif rings and not is_posting:
                self._board.ring()
            ended = self._board.ended()  # is read before the notes, which an ended rank has then posted
            is_posting = is_posting or bool(ended) or self._board.is_rung()
            if is_posting:
                beat += 1
                self.news = self._read_board(ended)
                self._posted = self._progress()._replace(heard=len(self.news.notes), beat=beat)
                self._board.tell(self._posted)
                self._abort_if_lost()
            with self._changed:
                self._looked = wanted
                self._changed.notify_all()
                if self._wanted == wanted and not self._ends:
                    self._changed.wait(TIMEOUTS.look * max(1.0, self._board.world_size / _RANKS_AT_ONCE))

    def _read_board(self, ended: list[int]) -> News:
        notes = [note for note in self._board.notes() if note.rank != self._board.rank]
        progress = {rank: posted for rank, posted in self._board.progress().items() if rank != self._board.rank}
        return News(notes, progress, [rank for rank in ended if rank not in progress or not progress[rank].done])

    def _abort_if_lost(self) -> None:
        """Abort the operations of this rank if it has not found the failure of another rank after a while."""
        news, now = self.news, time.monotonic()
        if not (news.notes or news.ended):
            self._lost_since = float("inf")
            return
        self._lost_since = min(self._lost_since, now)
        if now - self._lost_since >= TIMEOUTS.abort:
            self._abort_for(news)
            if not news.notes and not self._has_reported:  # some ranks may not see that a process has ended
                self._has_reported = True
                self._board.post(Note(self._board.rank, news.ended[0], "", _text_of_gone(news.ended)))

    def _abort_for(self, news: News) -> None:
        if self._abort():
            self.aborted_for = self.aborted_for or news


class Peers:
    """Other ranks of a block.

    Args:
        collective: The ranks.
        block: The number of the block, equal on all ranks.
        progress: Returns the progress of this rank. It is called in another thread.
    """

    def __init__(self, collective: Collective, block: int, progress: Callable[[], Progress]) -> None:
        self._rank, self._world_size = collective.rank, collective.world_size
        self._block, self._progress = block, progress
        self._beats: dict[int, tuple[int | None, float]] = {}  # the last beat of each rank, and its time
        self._abort, self._keeps_store = partial(collective.abort, connections=True), collective.keeps_store
        self._begin(collective.board())

    def _begin(self, board: Board) -> None:
        board.block = self._block
        self._board, self._watch = board, Watch(board, self._progress, self._abort, self._keeps_store)
        self._watch.begin()

    def use(self, board: Board) -> None:
        """Use another board from now on, if its class differs from the current one."""
        if type(board) is not type(self._board):
            self.end()
            self._begin(board)

    def end(self) -> None:
        """Stop the thread that watches; called when the block ends."""
        self._watch.end()

    # -- posting ------------------------------------------------------------------------------------------------------

    def post(self, error: BaseException) -> None:
        """Post a note that this rank fails with ``error``."""
        text = "\n".join([f"rank {self._rank} failed: {described(error)}", *getattr(error, "__notes__", ())])
        self._watch.post(Note(self._rank, self._rank, type(error).__name__, text), TIMEOUTS.note)

    # -- reading ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Raise the error that another rank's note describes, if there is one. This does not wait.

        Raises:
            PeerError, JoinTimeoutError: With the reason why the rank failed.
        """
        news = self._watch.news
        if news.notes or (news := self._watch.aborted_for) is not None:
            raise self._cause_in(news)

    def look_again(self) -> None:
        """Read the board again, and then do as :meth:`look` does."""
        self._watch.refresh(TIMEOUTS.note)
        self.look()

    def ask(self, *, limit: float = 0.0) -> dict[int, Progress]:
        """Return the progress of the other ranks, by rank.

        Args:
            limit: Seconds to wait until all ranks have posted their progress. With 0, the last posted progress is read
                once.
        """
        deadline = time.monotonic() + limit
        while True:
            self._watch.refresh(limit or TIMEOUTS.look, ring=True)
            others = self._watch.news.progress
            if len(others) == self._world_size - 1 or time.monotonic() >= deadline or self._watch.failed:
                return others
            time.sleep(0.01)

    def look_for_silent(self, progress: dict[int, Progress]) -> None:
        """Raise an error if another rank's process has ended, or has not posted its progress for a long time.

        Args:
            progress: The result of :meth:`ask`.

        Raises:
            PeerError: With the rank.
        """
        now, others = time.monotonic(), set(range(self._world_size)) - {self._rank}
        for rank in others:
            beat = progress[rank].beat if rank in progress else None
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
        silent = [rank for rank in others if now - self._beats[rank][1] > TIMEOUTS.silent]
        if gone := {*self._watch.news.ended, *silent}:
            raise self._gone(sorted(gone))

    # -- finding the cause --------------------------------------------------------------------------------------------

    def cause_of(self, error: BaseException) -> JoinError | None:
        """Return the error that names the rank which caused a broken collective; ``None`` if no other rank did.

        Args:
            error: Any exception that was raised on this rank.
        """
        if isinstance(error, Exception) and (news := self._watch.aborted_for) is not None:
            return self._cause_in(news)  # every later exception may be a consequence of the abort
        if not is_broken(error):
            return None
        known = set(error.ranks) if isinstance(error, BrokenCollective) else set[int]()
        before, deadline = self._watch.news.progress, time.monotonic() + TIMEOUTS.cause
        while True:
            reached = self._watch.refresh(TIMEOUTS.note, ring=True)
            news = self._watch.news
            if news.notes:
                return self._consequence(news.notes)
            gone = known.union(news.ended)
            if gone:
                return self._gone(sorted(gone))
            if not reached:
                return self._gone([])
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        alive = {rank for rank, progress in news.progress.items() if rank not in before or progress != before[rank]}
        silent = sorted(set(range(self._world_size)) - {self._rank} - alive)
        return self._gone(silent) if silent else None

    def _cause_in(self, news: News) -> JoinError:
        return self._consequence(news.notes) if news.notes else self._gone(news.ended)

    def _consequence(self, notes: list[Note]) -> JoinError:
        """Return the error of this rank, which fails because of the failures in these notes."""
        first = [note for note in notes if note.rank == note.cause] or notes
        text = "; ".join(dict.fromkeys(note.text for note in first))
        is_timeout = all(note.kind == JoinTimeoutError.__name__ for note in first)
        error = (JoinTimeoutError if is_timeout else PeerError)(f"{text}. {_LOST}")
        return self._with_cause(error, first[0].cause, first[0].kind, text)

    def _gone(self, ranks: list[int]) -> JoinError:
        """Return the error for ranks whose processes are gone. An empty list means that the store is gone, too."""
        text = _text_of_gone(ranks)
        return self._with_cause(PeerError(f"{text} {_LOST}"), ranks[0] if ranks else None, "", text)

    def _with_cause(self, error: JoinError, cause: int | None, kind: str, text: str) -> JoinError:
        if isinstance(error, PeerError):
            error.rank = cause
        if cause is not None:
            self._watch.post(Note(self._rank, cause, kind, text), TIMEOUTS.note)
        return error


def _text_of_gone(ranks: list[int]) -> str:
    gone = f"rank {ranks[0]} is gone" if len(ranks) == 1 else f"ranks {ranks} are gone"
    if not ranks:
        gone = "another rank is gone, together with the store of the process group"
    #: If memory has run out, the kernel's log says so. After that, restart all processes from a checkpoint.
    return (
        f"{gone}, without an exception that other ranks could read. Its process was killed, ended by os._exit, lost its"
        " connection, or never entered the block. Look for the reason in its output and in the kernel's log. [J064]"
    )
