"""Failures of ranks: :class:`Guard` waits for the other ranks, and finds the rank that caused a failure.

While a rank waits, it checks whether another rank has failed, and it waits no longer than ``timeout``. One rule covers
all failures (``join.errors`` says what users see)::

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

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn

from join.collectives import Collective, Work
from join.collectives._torch_private import profiled
from join.collectives.board import Note, Progress
from join.collectives.broken import BrokenCollective, is_broken, is_unreachable
from join.collectives.timeouts import TIMEOUTS
from join.errors import EarlyTerminationError, JoinError, JoinTimeoutError, PeerError, described
from join.failure.wait import every_rank, placed, places
from join.failure.watch import text_of_gone, watch_of

_LEAST_SECONDS = 0.01  # backends interpret 0 as their own time limit
_UNKNOWN = -1  # instead of the number of a rank that is gone
_PENDING = "The process group has a collective pending and cannot be used any more: restart from a checkpoint"
_LOST = "The process group cannot be used any more: restart from a checkpoint"


class Closed(NamedTuple):
    """Reason why a rank can announce nothing any more in the open blocks of a group.

    Attributes:
        cause: The reason, as a clause.
        is_lost: Whether an operation of the group may be incomplete.
    """

    cause: str
    is_lost: bool = True


FORK = Closed("this process is a fork of the rank")
ENTERS = "entered Join"
"""Activity of a rank that enters a block, from the setup of the lines on."""


class Guard:
    """Guard against waiting forever, which also makes all ranks learn why a block ends.

    An error inside a block is raised in one of three ways:

    - A plain ``raise`` is the usual way. The code in the block may handle the error and continue, so the other ranks
      are informed only if the exception leaves the block, as of any exception of the user (:meth:`fail`).
    - :meth:`post_and_raise`, if this rank cannot continue even if the code handles the error, since it is out of step
      with the other ranks. They are informed at once, because they may already wait for this rank.
    - :meth:`close_and_raise`, if this rank cannot continue and the other ranks raise the same error, or know it.

    Args:
        collective: The ranks.
        progress: Returns the progress of this rank. It is called in another thread, too.
        look_for_skipped: Called at intervals while this rank waits. It raises an error if it detects a fault.
    """

    def __init__(
        self,
        collective: Collective,
        progress: Callable[[], Progress],
        look_for_skipped: Callable[[], object] = bool,
    ) -> None:
        self.watch = watch_of(collective)
        """The thread that reads the board."""
        self.closed: Closed | None = None
        """Reason why nothing can be announced any more; ``None`` if something can."""
        self.timeout: float | None = None
        """Seconds after which a rank that has not arrived is an error; ``None`` for no limit."""
        self.doing = ""
        """Current activity of this rank, while it waits for a message that is not a header."""
        self._collective, self.progress, self._look_for_skipped = collective, progress, look_for_skipped
        self._rank, self._world_size = collective.rank, collective.world_size
        self._arrived_at, self._busy_for, self._asked_at = time.monotonic(), 0.0, time.monotonic()
        # For each rank, its last beat, and how long it has been the last one, in seconds.
        self._beats: dict[int, tuple[int | None, float]] = {}

    @property
    def is_lost(self) -> bool:
        """Whether an operation of the group may be incomplete, after an exception."""
        return self.closed is not None and self.closed.is_lost

    def begin(self) -> None:
        """Begin to watch the other ranks; called when the first block of the group opens."""
        if self.watch.is_fork:
            self.closed = FORK
            self.raise_closed()
        if lost := self._collective.kept.lost:
            raise JoinError(
                f"Another block of this process group has failed in this process ({lost}), so its ranks may wait in"
                " different collectives. Restart from a checkpoint, or destroy the process group on all ranks and make"
                " a new one. [J750]"
            )
        self._watch_block()
        self._collective.waiter = self.wait_patiently

    def _watch_block(self) -> None:
        """Begin to watch a block, unless one is open on the group."""
        self.watch.begin(self.progress, partial(self._collective.abort, connections=True), self._leave_to_parent)

    def end(self) -> None:
        """Stop watching the other ranks; called when the last block of the group closes."""
        self._collective.waiter = None
        self.watch.end()
        if self.is_lost:
            self._collective.hold()

    # -- posting ------------------------------------------------------------------------------------------------------

    def post(self, error: BaseException) -> None:
        """Post a note that this rank fails with ``error``."""
        self._watch_block()
        self.watch.use(self._collective.board())  # it may have changed just before
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
            raise self._consequence(news.notes, news.ended)

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
            raise self._consequence([], sorted(gone))

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
            return self._consequence(news.notes, news.ended)  # every later exception may be a consequence of the abort
        if not is_broken(error):
            return None
        known = set(error.ranks) if isinstance(error, BrokenCollective) else set[int]()
        started, before = time.monotonic(), dict[int, Progress]()
        while True:
            reached = self.watch.refresh(TIMEOUTS.note, ring=True)
            news = self.watch.block.news
            if time.monotonic() < started + 2 * TIMEOUTS.look:
                before = news.progress  # a rank that has ended may have posted it just before
            gone = sorted(known.union(news.ended))
            if news.notes or gone or not reached:
                return self._consequence(news.notes, gone)
            if time.monotonic() >= started + TIMEOUTS.cause:
                break
            time.sleep(0.05)
        alive = {rank for rank, progress in news.progress.items() if rank not in before or progress != before[rank]}
        silent = sorted(set(range(self._world_size)) - {self._rank} - alive)
        return self._consequence([], silent) if silent else None

    def _consequence(self, notes: list[Note], gone: list[int]) -> JoinError:
        """Return the error of this rank, which fails because of the failures in these notes, and pass the cause on.

        Args:
            notes: The notes of other ranks.
            gone: The ranks whose processes are gone, if there are no notes. With neither, the store is gone, too.
        """
        left = [Note(rank, rank, "", text_of_gone(gone)) for rank in gone[:1] or [_UNKNOWN]]
        first = [note for note in notes if note.rank == note.cause] or notes or left
        text = "; ".join(dict.fromkeys(note.text for note in first))
        is_timeout = all(note.kind == JoinTimeoutError.__name__ for note in first)
        end = "\n" if "\n" in text else ". "
        error = (JoinTimeoutError if is_timeout else PeerError)(f"{text}{end}{_LOST}")
        cause = first[0].cause
        if isinstance(error, PeerError):
            error.rank = None if cause == _UNKNOWN else cause
        if cause != _UNKNOWN:
            self.watch.post(Note(self._rank, cause, first[0].kind, text), TIMEOUTS.note)
        return error

    # -- waiting ------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Record the time; called where other ranks may have waited for this one, as they do under ``timeout``."""
        now = time.monotonic()
        self._busy_for, self._arrived_at = now - self._arrived_at, now

    def wait(self, work: Work, doing: str = "", then: Callable[[], Any] | None = None, *, patient: bool = False) -> Any:
        """Wait for a message of this package, and check meanwhile whether other ranks fail.

        Args:
            work: A sum on a line, or an all-reduce.
            doing: The activity of this rank, for the errors of other ranks; "" for the last header.
            then: A method of the work that returns its result, and raises an exception if the work has failed.
            patient: Whether to wait for any time, as long as all ranks answer within ``timeout``.

        Returns:
            The result of ``then``.

        Raises:
            PeerError: If another rank has failed or is gone.
            JoinTimeoutError: If a rank does not arrive within ``timeout``, or another rank has waited for this one that
                long.
        """
        if self.closed is FORK:
            self.raise_closed()  # the message is for the parent process
        try:
            if not work.is_completed():
                before, self.doing = self.doing, doing
                with profiled("wait"):
                    self._wait_and_look(work, patient)
                self.doing = before
            result = (then or work.wait)()
            # After so long, the other ranks may have raised an error about this rank.
            if self.timeout is not None and self._busy_for >= self.timeout / 2:
                self.look_again()
            return result
        except (PeerError, JoinTimeoutError) as error:
            self.close_and_raise(error)
        except JoinError:
            raise  # only this rank has found the fault
        except RuntimeError as error:
            cause = self.explain(error)
            if cause is None:
                raise
            raise cause from error

    def wait_patiently(self, work: Work) -> None:
        """Wait for an operation that may take longer than ``timeout``, such as a copy of all state."""
        self.wait(work, self.doing or "takes part in a message to all ranks", patient=True)

    def _wait_and_look(self, work: Work, patient: bool) -> None:
        """Wait until ``work`` is done or has failed."""
        started, limit = time.monotonic(), float("inf") if self.timeout is None else self.timeout
        interval = timedelta(seconds=max(min(TIMEOUTS.look, limit), _LEAST_SECONDS))
        while True:
            try:
                work.wait(interval)
                return
            except RuntimeError:  # the interval is over, or the work has failed
                if work.is_completed():
                    return
            self.look()
            self._look_for_skipped()
            if not patient:
                if time.monotonic() - started >= limit:
                    raise self.timeout_error()
            elif self.timeout is not None:
                if silent := self.silent(self.ask(), limit):
                    raise self.timeout_error(silent)
            elif self.doing == ENTERS:  # a rank that does not answer is gone
                self.look_for_silent(self.ask())

    def look_around(self, seconds: float) -> None:
        """Look for a failure of another rank, and for a fault of this one, for some seconds.

        Raises:
            PeerError, JoinTimeoutError: If another rank has failed.
            ProtocolError: If this rank has skipped a part of a loop.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.look_again()
            except (PeerError, JoinTimeoutError) as error:
                self.close_and_raise(error)
            self._look_for_skipped()
            if time.monotonic() >= deadline:
                return
            time.sleep(TIMEOUTS.look)

    def timeout_error(self, silent: Sequence[int] = (), *, in_collective: bool = False) -> JoinTimeoutError:
        """Return the error of a rank that has waited longer than ``timeout``, after posting it to the other ranks.

        Args:
            silent: The ranks that did not answer for so long.
            in_collective: Whether it waited in a collective of the process group.
        """
        rank, own, others = self._rank, self.progress(), self.ask(limit=TIMEOUTS.note)
        if not in_collective:  # whose line this rank has left by an exception
            own = placed(own, threading.get_ident())
        missing = [
            other
            for other in range(self._world_size)
            if other != rank and (other not in others or other in silent or _is_behind(others[other], own))
        ]
        here = [(other, progress) for other, progress in [*others.items(), (rank, own)] if other not in missing]
        doing = "; ".join(f"rank {other} {progress.doing}" for other, progress in sorted(here))
        timeout = self.timeout or 0.0
        if missing:
            #: The list names the ranks that are late. The parentheses say what the other ranks were doing. Read the log
            #: of a listed rank first. Restart all processes from the last complete checkpoint. If a step may take
            #: longer, for compilation, an evaluation or a slow file system, pass a longer timeout. Other ranks may
            #: quote this error after "rank N failed:", but rank N only waited. Ranks are counted within the process
            #: group of the block: with four ranks on each of two machines, ranks 4 to 7 are on the second machine. If
            #: all ranks of one machine are listed, check that machine and its network.
            text = (
                f"Ranks {missing} announced no collective within timeout={timeout:g} s ({doing}). They are slow, or"
                " blocked in a collective that this rank never calls. In a loop over join.iterate, run the whole loop"
                " body on every rank. In a plain block, list the object that issues the collective, such as a sharded"
                " optimizer, or loop over join.iterate. [J060]"
            )
        else:
            limit = f"{2 * timeout:g} s, twice the timeout" if in_collective else f"timeout={timeout:g} s"
            text = (
                f"A collective was not done within {limit}, but no rank is late ({doing}). Ranks wait in different"
                " collectives, or one never calls it. Run the same code on all ranks, or pass a longer timeout. [J061]"
            )
        lines = places(every_rank({**others, rank: own}, self._world_size))
        error = JoinTimeoutError("\n".join([f"{text} {_PENDING}", *lines]))
        self.post(error)
        return error

    # -- leaving ------------------------------------------------------------------------------------------------------

    def raise_closed(self) -> NoReturn:
        """Raise a :class:`JoinError`, because nothing can be announced any more."""
        if self.closed is FORK:
            raise JoinError(
                f"This process was forked from rank {self._rank}, after a Join block had begun, so it is not"
                " a rank. Train only in the process that entered the block, and use the fork for work without other"
                " ranks. [J581]"
            )
        cause = self.closed.cause if self.closed is not None else "it was left"
        raise JoinError(
            f"The Join block has already ended ({cause}). Leave the with statement before you continue. [J063]"
        )

    def _leave_to_parent(self) -> None:
        """Do nothing more in the block, since this process is a fork of the rank."""
        self.closed, self._collective.waiter = FORK, None

    def close_and_raise(self, error: JoinError) -> NoReturn:
        """Raise ``error``, which the other ranks raise or are informed of. Nothing can be announced afterwards."""
        if self.closed is not FORK:
            self.closed = Closed(described(error), self.is_lost or not isinstance(error, EarlyTerminationError))
        raise error

    def post_and_raise(self, error: JoinError) -> NoReturn:
        """Raise ``error`` for a fault that only this rank may have, after posting a note for the other ranks."""
        self.fail(error, is_alone=True)
        self.close_and_raise(error)

    def raise_early_termination(self, *, exhausted: bool) -> NoReturn:
        """Raise the error for ``throw_on_early_termination``. ``exhausted`` says whether this rank is out of data."""
        own = f"Rank {self._rank} exhausted all inputs."
        others = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        self.close_and_raise(EarlyTerminationError(own if exhausted else others))

    def fail(self, error: BaseException, *, is_alone: bool = False) -> JoinError | None:
        """Leave the block with ``error``, and inform the other ranks of the reason.

        Args:
            error: The exception of this rank.
            is_alone: Whether it is an error of this package that the other ranks do not raise themselves.

        Returns:
            The error to raise instead, if ``error`` is a consequence of another rank's failure.
        """
        is_found = self.closed is not None and isinstance(error, JoinError)  # while waiting; the search takes seconds
        cause, closes = None if is_found else self.explain(error), False
        if cause is None and self.closed is None:
            closes = is_alone or not isinstance(error, JoinError)
            self.closed = Closed(f"this rank raised {type(error).__name__}")
            self.post(error)
        closed = self.closed
        if closed is not None and closed.is_lost and self._world_size > 1:
            # Without this, code that handles the error waits for the device as soon as it reads a tensor.
            breaks = closes or is_broken(error)
            self._collective.abort(connections=breaks)
            if breaks or isinstance(cause or error, (PeerError, JoinTimeoutError)):
                self._collective.kept.lost = closed.cause
        return cause

    def explain(self, error: BaseException) -> JoinError | None:
        """Return the error to raise instead of ``error`` if a collective broke because another rank failed."""
        cause = self.cause_of(error)
        if cause is None and is_unreachable(error):  # a rank that waits for the connection is not told by gloo
            #: A host's name often has an address that only this host reaches, such as 127.0.1.1 on Debian. In
            #: GLOO_SOCKET_IFNAME, name the interface that reaches the other machines, as NCCL_SOCKET_IFNAME does.
            cause = JoinError(
                f"Rank {self._rank} cannot connect with another rank over gloo, which carries the messages"
                f" of Join ({error}). Set GLOO_SOCKET_IFNAME on each machine to the interface that reaches the other"
                " machines, and let a firewall pass the connections. [J800]"
            )
            self.post(cause)
        elif cause is None and self.timeout is not None and is_broken(error, stores=False):
            cause = self.timeout_error(in_collective=True)  # the other ranks live, but some never call it
        if cause is not None:
            self.closed = self.closed if self.is_lost else Closed(described(cause))
        return cause


def _is_behind(other: Progress, own: Progress) -> bool:
    """Return whether another rank has not reached the point at which this rank waits."""
    theirs, ours = ((place.headers, place.loop, place.step, place.bursts) for place in (other, own))
    return theirs < ours
