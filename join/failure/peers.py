"""What a rank knows of the others besides their collectives: :class:`Peers`, who finds out who is to blame.

One rule for all failures (``join.errors`` says what users see)::

    rank that fails                                  every other rank
    ---------------                                  ----------------
    posts a note: its rank, class and text           its loop, or a collective
    sends nothing more                               waits for its next header, and looks at the notes: PeerError
    raises its own exception                         .
    its process ends                                 its collective breaks; looks at the notes: PeerError

A rank that fails because another has failed posts a note of that other's failure, so that all find the first cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from join.collectives import Collective
from join.collectives.board import Board, Note, Progress
from join.collectives.broken import BrokenCollective, is_broken
from join.collectives.timeouts import timeouts
from join.errors import JoinError, JoinTimeoutError, PeerError, described
from join.failure.watch import Watch

_LOST = "The process group cannot be used any more: restart from a checkpoint"


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
        self._begin(collective.board())

    def _begin(self, board: Board) -> None:
        board.begin(self._block)
        self._board, self._watch = board, Watch(board, self._progress)
        self._watch.start()

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
        if self._watch.news.notes:
            raise self._consequence(self._watch.news.notes)

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
            told = self._watch.news.told
            if len(told) == self._world_size - 1 or time.monotonic() >= deadline or self._watch.failed:
                return told
            time.sleep(0.01)

    def look_for_silent(self, told: dict[int, Progress]) -> None:
        """Raise if another rank's process has ended, or has not told for long how far it is.

        Args:
            told: what :meth:`ask` has found.

        Raises:
            PeerError: that names the rank.
        """
        now, others = time.monotonic(), set(range(self._world_size)) - {self._rank}
        for rank in others:
            beat = told[rank].beat if rank in told else None
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
        if not is_broken(error):
            return None
        known = set(error.ranks) if isinstance(error, BrokenCollective) else set[int]()
        before, deadline = self._watch.news.told, time.monotonic() + timeouts().cause
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
        alive = {rank for rank, progress in news.told.items() if rank not in before or progress != before[rank]}
        silent = sorted(set(range(self._world_size)) - {self._rank} - alive)
        return self._gone(silent) if silent else None

    def _consequence(self, notes: list[Note]) -> JoinError:
        """The error of this rank, which fails because of what these notes say."""
        first = [note for note in notes if note.rank == note.cause] or notes
        text = "; ".join(dict.fromkeys(note.text for note in first))
        gave_up = all(note.kind == JoinTimeoutError.__name__ for note in first)
        error = (JoinTimeoutError if gave_up else PeerError)(f"{text}. {_LOST}")
        return self._blaming(error, first[0].cause, first[0].kind, text)

    def _gone(self, ranks: list[int]) -> JoinError:
        """The error for ranks whose processes are gone; for none, where the store is gone, too."""
        who = f"rank {ranks[0]} is gone" if len(ranks) == 1 else f"ranks {ranks} are gone"
        if not ranks:
            who = "another rank is gone, and with it the store in which ranks leave word"
        #: Its output may say why, or the kernel's log, if memory has run out. Restart from a checkpoint.
        text = (
            f"{who}, without an exception that could be told: killed, ended by os._exit, cut off, or never in the"
            " block [J064]"
        )
        return self._blaming(PeerError(f"{text}. {_LOST}"), ranks[0] if ranks else None, "", text)

    def _blaming(self, error: JoinError, cause: int | None, kind: str, text: str) -> JoinError:
        if isinstance(error, PeerError):
            error.rank = cause
        if cause is not None:
            self._post(Note(self._rank, cause, kind, text))
        return error
