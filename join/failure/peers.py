"""A rank's view of the others besides their collectives: :class:`Peers` finds the rank that is to blame for a failure.

One rule for all failures (``join.errors`` says what users see)::

    rank that fails                                  every other rank
    ---------------                                  ----------------
    posts a note: its rank, class and text           its loop, or a collective
    sends nothing more                               waits for its next header, and looks at the notes: PeerError
    raises its own exception                         .
    its process ends                                 its collective breaks; looks at the notes: PeerError

A rank that fails because another has failed posts a note of that other's failure, so that all find the first cause.

A store that cannot be reached blocks its callers for minutes. So a rank's own thread never reads the board: it asks the
thread of the block, :class:`Watch`, and waits for it for a limited time. And the watch answers for its rank while that
is held up in a collective.

On an accelerator a collective does not break when another rank is gone: the device waits, and so does whoever reads a
tensor from it. So the watch acts by itself. A second after it has seen that a rank has failed, or has ended without
leaving the block, it aborts what this process has under way on its devices; the rank's own thread goes on then, and
finds the cause when it comes to its next header::

    rank that fails                      every other rank                       its watch
    ---------------                      ----------------                       ---------
    posts a note, or its process ends    reads its loss, on a device that       sees the note, or that the process
                                         waits for the rank that failed         has ended
                                         .                                      a second later: aborts
                                         goes on with rubbish; waits for its
                                         next header, and looks: PeerError
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
from join.collectives.timeouts import timeouts
from join.errors import JoinError, JoinTimeoutError, PeerError, described

_logger = logging.getLogger("join")
_RANKS_AT_ONCE = 64  # the more ranks there are beyond these, the less often each of them asks and tells
_LOST = "The process group cannot be used any more: restart from a checkpoint"


@dataclass(frozen=True)
class News:
    """What a look at the board has found.

    Attributes:
        notes: those of other ranks.
        progress: how far other ranks are, by rank.
        ended: the other ranks whose processes are known to have ended.
    """

    notes: list[Note] = field(default_factory=list[Note])
    progress: dict[int, Progress] = field(default_factory=dict[int, Progress])
    ended: list[int] = field(default_factory=list[int])


class _Starter(threading.Thread):
    """Starts watches whose blocks last: to start a thread and to end it takes longer than a short block.

    There is one in a process, which is never woken up, since that takes as long.
    """

    def __init__(self) -> None:
        super().__init__(name="join starter", daemon=True)
        self.waiting: set[Watch] = set()
        self.start()

    @override
    def run(self) -> None:
        while True:
            time.sleep(timeouts().look)
            for watch in list(self.waiting):
                with suppress(RuntimeError):  # the interpreter is being shut down
                    watch.start()


_starters: list[_Starter] = []


class Watch(threading.Thread):
    """Looks at a board, now and then or when it is asked to.

    Args:
        board: of the block that begins.
        progress: tells how far this rank is; called in the thread.
        abort: ends what this rank may wait for on a device, and tells whether there was any; called in the thread, once
            another rank has failed, and again as long as the block is not left.
        keeps_store: whether one of the ranks keeps the store, so that it is gone if the store is.
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
        """What it has found last."""
        self.failed = False
        """Whether it cannot reach the board any more."""
        self.aborted_for: News | None = None
        """What it had found when it aborted what this rank had under way on a device, if it has."""
        self._board, self._progress, self._abort, self._keeps_store = board, progress, abort, keeps_store
        self._told = Progress()
        self._has_told = False  # the others of a process that has ended
        self._lost_since = float("inf")  # when it saw that another rank has failed
        self._changed = threading.Condition()
        self._wanted = self._looked = 0  # how many looks were asked for, and how many of these were made
        self._note: Note | None = None  # what is to be left
        self._is_rung = self._is_started = self._ends = False

    def begin(self) -> None:
        """Start the thread, or let it be started in a while if the board is in memory and needs no thread."""
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
                # Of a block that is never left: a thread in a store may abort the interpreter.
                atexit.register(self.end)
        for starter in _starters:
            starter.waiting.discard(self)

    def refresh(self, seconds: float, *, ring: bool = False) -> bool:
        """Look at the board; whether that was possible within so many seconds.

        Args:
            seconds: how long to wait.
            ring: whether the others are to tell how far they are.
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
        """Leave a note, and wait until the others can have it even if this process ends; best effort."""
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
        """End the thread; called when the block is over."""
        with self._changed:
            self._ends = True
            if not self._is_started:
                self.start()  # it is not wanted any more
                self._board.tell(self._told._replace(done=True))
                return
            self._changed.notify_all()
        atexit.unregister(self.end)
        self.join(timeouts().look)  # it may be held up by a store
        if self.is_alive():  # which must not answer while the interpreter takes itself down
            atexit.register(self.join, timeouts().note)

    @override
    def run(self) -> None:
        try:
            self._look_until_the_end()
            self._board.tell(self._told._replace(done=True))
        except Exception as error:  # the store is gone, with the process that kept it
            _logger.info("rank %d cannot look at what others leave for it: %r", self._board.rank, error)
            with self._changed:
                self.failed = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ends, timeouts().abort)
            if self._keeps_store and not self._ends:
                self._abort_for(News())

    def _look_until_the_end(self) -> None:
        tells, beat = False, 0
        while not self._ends:
            with self._changed:
                note, self._note = self._note, None
                wanted, rings = self._wanted, self._is_rung
            if note is not None:
                self._board.post(note)
            elif rings and not tells:
                self._board.ring()
            ended = self._board.ended()  # before their notes: what these had to say is there by now
            tells = tells or bool(ended) or self._board.is_rung()
            if tells:
                beat += 1
                self.news = self._look(ended)
                self._told = self._progress()._replace(heard=len(self.news.notes), beat=beat)
                self._board.tell(self._told)
                self._abort_if_lost()
            with self._changed:
                self._looked = wanted
                self._changed.notify_all()
                if self._wanted == wanted and not self._ends:
                    self._changed.wait(timeouts().look * max(1.0, self._board.world_size / _RANKS_AT_ONCE))

    def _look(self, ended: list[int]) -> News:
        notes = [note for note in self._board.notes() if note.rank != self._board.rank]
        progress = {rank: place for rank, place in self._board.progress().items() if rank != self._board.rank}
        return News(notes, progress, [rank for rank in ended if rank not in progress or not progress[rank].done])

    def _abort_if_lost(self) -> None:
        """Abort what this rank waits for, if another has failed and it has not found that out within a while."""
        news, now = self.news, time.monotonic()
        if not (news.notes or news.ended):
            self._lost_since = float("inf")
            return
        self._lost_since = min(self._lost_since, now)
        if now - self._lost_since >= timeouts().abort:
            self._abort_for(news)
            if not news.notes and not self._has_told:  # not all may see that a process has ended
                self._has_told = True
                self._board.post(Note(self._board.rank, news.ended[0], "", _text_of_gone(news.ended)))

    def _abort_for(self, news: News) -> None:
        if self._abort():
            self.aborted_for = self.aborted_for or news


class Peers:
    """The other ranks of a block.

    Args:
        collective: the ranks.
        block: the number of the block, the same on all ranks.
        progress: tells how far this rank is; called in another thread.
    """

    def __init__(self, collective: Collective, block: int, progress: Callable[[], Progress]) -> None:
        self._rank, self._world_size = collective.rank, collective.world_size
        self._block, self._progress = block, progress
        self._beats: dict[int, tuple[int | None, float]] = {}  # what each rank has told last, and since when
        self._abort, self._keeps_store = partial(collective.abort, connections=True), collective.keeps_store
        self._begin(collective.board())

    def _begin(self, board: Board) -> None:
        board.begin(self._block)
        self._board, self._watch = board, Watch(board, self._progress, self._abort, self._keeps_store)
        self._watch.begin()

    def use(self, board: Board) -> None:
        """Use another board from now on, if it is of another kind."""
        if type(board) is not type(self._board):
            self.end()
            self._begin(board)

    def end(self) -> None:
        """Stop the thread that watches; called when the block is over."""
        self._watch.end()

    # -- telling ------------------------------------------------------------------------------------------------------

    def post(self, error: BaseException) -> None:
        """Post a note: this rank fails with ``error``."""
        text = "\n".join([f"rank {self._rank} failed: {described(error)}", *getattr(error, "__notes__", ())])
        self._post(Note(self._rank, self._rank, type(error).__name__, text))

    def _post(self, note: Note) -> None:
        self._watch.post(note, timeouts().note)

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Raise what another rank's note says; waits for nothing.

        Raises:
            PeerError, JoinTimeoutError: that say why the rank failed.
        """
        news = self._watch.news
        if news.notes or (news := self._watch.aborted_for) is not None:
            raise self._cause_in(news)

    def look_again(self) -> None:
        """Like :meth:`look`, after reading the board anew."""
        self._watch.refresh(timeouts().note)
        self.look()

    def ask(self, *, limit: float = 0.0) -> dict[int, Progress]:
        """How far the other ranks are.

        Args:
            limit: how many seconds to wait until all have told; at least, what they have told last is read anew.
        """
        deadline = time.monotonic() + limit
        while True:
            self._watch.refresh(limit or timeouts().look, ring=True)
            others = self._watch.news.progress
            if len(others) == self._world_size - 1 or time.monotonic() >= deadline or self._watch.failed:
                return others
            time.sleep(0.01)

    def look_for_silent(self, progress: dict[int, Progress]) -> None:
        """Raise if another rank's process has ended, or has not told for long how far it is.

        Args:
            progress: what :meth:`ask` has returned.

        Raises:
            PeerError: that names the rank.
        """
        now, others = time.monotonic(), set(range(self._world_size)) - {self._rank}
        for rank in others:
            beat = progress[rank].beat if rank in progress else None
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
        silent = [rank for rank in others if now - self._beats[rank][1] > timeouts().silent]
        if gone := {*self._watch.news.ended, *silent}:
            raise self._gone(sorted(gone))

    # -- who is to blame ----------------------------------------------------------------------------------------------

    def cause_of(self, error: BaseException) -> JoinError | None:
        """The error that says which rank is to blame for a broken collective; ``None`` if no other rank is.

        Args:
            error: as raised on this rank, by whatever.
        """
        if isinstance(error, Exception) and (news := self._watch.aborted_for) is not None:
            return self._cause_in(news)  # whatever is raised after that comes of it
        if not is_broken(error):
            return None
        known = set(error.ranks) if isinstance(error, BrokenCollective) else set[int]()
        before, deadline = self._watch.news.progress, time.monotonic() + timeouts().cause
        while True:
            reached = self._watch.refresh(timeouts().note, ring=True)
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
        """The error of this rank, which fails because of what these notes say."""
        first = [note for note in notes if note.rank == note.cause] or notes
        text = "; ".join(dict.fromkeys(note.text for note in first))
        gave_up = all(note.kind == JoinTimeoutError.__name__ for note in first)
        error = (JoinTimeoutError if gave_up else PeerError)(f"{text}. {_LOST}")
        return self._blaming(error, first[0].cause, first[0].kind, text)

    def _gone(self, ranks: list[int]) -> JoinError:
        """The error for ranks whose processes are gone; for none, where the store is gone, too."""
        text = _text_of_gone(ranks)
        return self._blaming(PeerError(f"{text}. {_LOST}"), ranks[0] if ranks else None, "", text)

    def _blaming(self, error: JoinError, cause: int | None, kind: str, text: str) -> JoinError:
        if isinstance(error, PeerError):
            error.rank = cause
        if cause is not None:
            self._post(Note(self._rank, cause, kind, text))
        return error


def _text_of_gone(ranks: list[int]) -> str:
    who = f"rank {ranks[0]} is gone" if len(ranks) == 1 else f"ranks {ranks} are gone"
    if not ranks:
        who = "another rank is gone, and with it the store in which ranks leave word"
    #: Its output may say why, or the kernel's log, if memory has run out. Restart from a checkpoint.
    return (
        f"{who}, without an exception that could be told: killed, ended by os._exit, cut off, or never in the"
        " block [J064]"
    )
