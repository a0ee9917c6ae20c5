"""A rank's view of the other ranks outside collectives: :class:`Peers` finds the rank that caused a failure.

One rule covers all failures (``join.errors`` says what users see)::

    rank that fails                                  every other rank
    ---------------                                  ----------------
    posts a note: its rank, class and text           its loop, or a collective
    sends nothing more                               waits for its next header, and reads the notes: PeerError
    raises its own exception                         .
    its process ends                                 its collective breaks; reads the notes: PeerError

If a rank fails because another rank has failed, its note names the failure of the other rank, so that all ranks find
the first cause. ``join.failure.watch`` reads the notes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from join.collectives import Collective
from join.collectives.board import Board, Note, Progress
from join.collectives.broken import BrokenCollective, is_broken
from join.collectives.timeouts import TIMEOUTS
from join.errors import JoinError, JoinTimeoutError, PeerError, described
from join.failure.watch import News, text_of_gone, watch_of

_LOST = "The process group cannot be used any more: restart from a checkpoint"


class Peers:
    """Other ranks of a block.

    Args:
        collective: The ranks.
        progress: Returns the progress of this rank. It is called in another thread.
        on_fork: Called in a process that is forked from this one before the block ends.
    """

    def __init__(
        self, collective: Collective, progress: Callable[[], Progress], on_fork: Callable[[], object] = bool
    ) -> None:
        self._rank, self._world_size = collective.rank, collective.world_size
        # For each rank, its last beat, and how long it has been the last one, in seconds.
        self._beats: dict[int, tuple[int | None, float]] = {}
        self._asked_at = time.monotonic()
        self.watch, self._board = watch_of(collective), collective.board
        """The thread that reads the board."""
        self.begin = partial(self.watch.begin, progress, partial(collective.abort, connections=True), on_fork)
        """Begin to watch a block, unless one is open on the group."""

    def use(self, board: Board) -> None:
        """Use another board from now on, if its class differs from the current one."""
        if type(board) is not type(self.watch.board):
            self.watch.use(board)

    # -- posting ------------------------------------------------------------------------------------------------------

    def post(self, error: BaseException) -> None:
        """Post a note that this rank fails with ``error``."""
        if self._world_size == 1:
            return
        self.begin()
        self.use(self._board())  # it may have changed just before
        text = "\n".join([f"rank {self._rank} failed: {described(error)}", *getattr(error, "__notes__", ())])
        self.watch.post(Note(self._rank, self._rank, type(error).__name__, text), TIMEOUTS.note)

    # -- reading ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Raise the error that another rank's note describes, if there is one. This does not wait.

        Raises:
            PeerError, JoinTimeoutError: With the reason why the rank failed.
        """
        block = self.watch.block
        news = block.news if block.news.notes else block.aborted_for or block.news
        if news.notes or block.aborted_for is not None or (news.ended and block.is_lost):
            raise self._cause_in(news)

    def look_again(self) -> None:
        """Read the board again, and then do as :meth:`look` does."""
        self.watch.refresh(TIMEOUTS.note)
        self.look()

    def ask(self, *, limit: float = 0.0) -> dict[int, Progress]:
        """Return the progress of the other ranks, by rank.

        Args:
            limit: Seconds to wait until all ranks have posted their progress. With 0, the last posted progress is read
                once.
        """
        deadline = time.monotonic() + limit
        while True:
            self.watch.refresh(limit or TIMEOUTS.look, ring=True)
            others = self.watch.block.news.progress
            if len(others) == self._world_size - 1 or time.monotonic() >= deadline or self.watch.block.failed:
                return others
            time.sleep(0.01)

    def look_for_silent(self, progress: dict[int, Progress]) -> None:
        """Raise an error if another rank's process has ended, or has not posted its progress for a long time.

        Args:
            progress: The result of :meth:`ask`.

        Raises:
            PeerError: With the rank.
        """
        if gone := {*self.watch.block.news.ended, *self.silent(progress, TIMEOUTS.silent)}:
            raise self._gone(sorted(gone))

    def silent(self, progress: dict[int, Progress], seconds: float) -> list[int]:
        """Return the ranks whose progress is the same as ``seconds`` ago. This is called at short intervals.

        A long interval counts as a short one, because all ranks may have been suspended.

        Args:
            progress: The result of :meth:`ask`.
            seconds: A rank whose progress changes within this time is not silent.
        """
        now = time.monotonic()
        passed, self._asked_at = min(now - self._asked_at, 4 * TIMEOUTS.look), now
        for rank in set(range(self._world_size)) - {self._rank}:
            beat, is_done = (progress[rank].beat, progress[rank].done) if rank in progress else (None, False)
            last, unheard = self._beats.get(rank, (None, 0.0))
            self._beats[rank] = beat, unheard + passed if beat == last and not is_done else 0.0
        return sorted(rank for rank, (_, unheard) in self._beats.items() if unheard > seconds)

    # -- finding the cause --------------------------------------------------------------------------------------------

    def cause_of(self, error: BaseException) -> JoinError | None:
        """Return the error that names the rank which caused a broken collective; ``None`` if no other rank did.

        Args:
            error: Any exception that was raised on this rank.
        """
        if isinstance(error, Exception) and (news := self.watch.block.aborted_for) is not None:
            return self._cause_in(news)  # every later exception may be a consequence of the abort
        if not is_broken(error):
            return None
        known = set(error.ranks) if isinstance(error, BrokenCollective) else set[int]()
        started, before = time.monotonic(), dict[int, Progress]()
        while True:
            reached = self.watch.refresh(TIMEOUTS.note, ring=True)
            news = self.watch.block.news
            if time.monotonic() < started + 2 * TIMEOUTS.look:
                before = news.progress  # a rank that has ended may have posted it just before
            if news.notes:
                return self._consequence(news.notes)
            gone = known.union(news.ended)
            if gone:
                return self._gone(sorted(gone))
            if not reached:
                return self._gone([])
            if time.monotonic() >= started + TIMEOUTS.cause:
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
        end = "\n" if "\n" in text else ". "
        error = (JoinTimeoutError if is_timeout else PeerError)(f"{text}{end}{_LOST}")
        return self._with_cause(error, first[0].cause, first[0].kind, text)

    def _gone(self, ranks: list[int]) -> JoinError:
        """Return the error for ranks whose processes are gone. An empty list means that the store is gone, too."""
        text = text_of_gone(ranks)
        return self._with_cause(PeerError(f"{text} {_LOST}"), ranks[0] if ranks else None, "", text)

    def _with_cause(self, error: JoinError, cause: int | None, kind: str, text: str) -> JoinError:
        if isinstance(error, PeerError):
            error.rank = cause
        if cause is not None:
            self.watch.post(Note(self._rank, cause, kind, text), TIMEOUTS.note)
        return error
