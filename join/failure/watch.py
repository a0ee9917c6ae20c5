"""The thread of a block that reads and writes the board: :class:`Watch`.

A store that cannot be reached blocks whoever asks it, for minutes. So no rank's own thread ever does: it asks its
watch, and waits for it for a limited time. And the watch answers for its rank while that is held up in a collective.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from typing_extensions import override

from join.collectives.board import Board, Note, Progress
from join.collectives.timeouts import timeouts

_logger = logging.getLogger("join")
_RANKS_AT_ONCE = 64  # the more ranks there are beyond these, the less often each of them asks and tells


@dataclass(frozen=True)
class News:
    """What a look at the board has found.

    Attributes:
        notes: those of other ranks.
        told: how far other ranks are, by rank.
        ended: the other ranks whose processes are known to have ended.
    """

    notes: list[Note] = field(default_factory=list[Note])
    told: dict[int, Progress] = field(default_factory=dict[int, Progress])
    ended: list[int] = field(default_factory=list[int])


class Watch(threading.Thread):
    """Looks at a board, now and then or when it is asked to.

    Args:
        board: of the block that begins.
        progress: tells how far this rank is; called in the thread.
    """

    def __init__(self, board: Board, progress: Callable[[], Progress]) -> None:
        super().__init__(name=f"join watch of rank {board.rank}", daemon=True)
        self.news = News()
        """What it has found last."""
        self.failed = False
        """Whether it cannot reach the board any more."""
        self._board, self._progress = board, progress
        self._changed = threading.Condition()
        self._wanted = self._looked = 0  # how many looks were asked for, and how many of these were made
        self._note: Note | None = None  # what is to be left
        self._is_rung = self._ends = False

    @override
    def start(self) -> None:
        super().start()
        atexit.register(self.end)  # of a block that is never left: a thread in a store may abort the interpreter

    def refresh(self, seconds: float, *, ring: bool = False) -> bool:
        """Look at the board; whether that was possible within so many seconds.

        Args:
            seconds: how long to wait.
            ring: whether the others are to tell how far they are.
        """
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
            heard = {rank for rank, progress in news.told.items() if progress.heard}
            gone = {each.rank for each in news.notes} | set(news.ended)
            if others <= heard | gone or time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def end(self) -> None:
        """End the thread; called when the block is over."""
        atexit.unregister(self.end)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self.join(timeouts().look)  # it may be held up by a store
        if self.is_alive():  # which must not answer while the interpreter takes itself down
            atexit.register(self.join, timeouts().note)

    @override
    def run(self) -> None:
        tells, beat = False, 0
        while not self._ends:
            with self._changed:
                note, self._note = self._note, None
                wanted, rings = self._wanted, self._is_rung
            try:
                if note is not None:
                    self._board.post(note)
                elif rings and not tells:
                    self._board.ring()
                tells = tells or self._board.is_rung()
                if tells:
                    beat += 1
                    self.news = self._look()
                    self._board.tell(self._progress()._replace(heard=len(self.news.notes), beat=beat))
            except Exception as error:  # the store is gone
                _logger.info("rank %d cannot look at what others leave for it: %r", self._board.rank, error)
                with self._changed:
                    self.failed = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._looked = wanted
                self._changed.notify_all()
                if self._wanted == wanted and not self._ends:
                    self._changed.wait(timeouts().look * max(1.0, self._board.world_size / _RANKS_AT_ONCE))

    def _look(self) -> News:
        ended = self._board.ended()  # first: what these had to say is there by now
        notes = [note for note in self._board.notes() if note.rank != self._board.rank]
        told = {rank: progress for rank, progress in self._board.told().items() if rank != self._board.rank}
        return News(notes, told, ended)
