"""Waiting for other ranks, and leaving with the right error: :class:`Guard`.

A rank that waits looks meanwhile whether another one has failed (``join.failure.peers``), and for no longer than
``timeout`` allows. A rank that fails posts a note and sends nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from join.collectives import Collective, Work
from join.collectives._torch_private import profiled
from join.collectives.board import Progress
from join.collectives.broken import is_broken
from join.collectives.timeouts import timeouts
from join.errors import EarlyTerminationError, JoinError, JoinTimeoutError, PeerError, described
from join.failure.peers import Peers

_LEAST_SECONDS = 0.01  # backends take 0 for their own time limit
_PENDING = "The process group has a collective pending and cannot be used any more: restart from a checkpoint"


class Guard:
    """What keeps a rank from waiting for ever, and sees to it that all ranks learn why a block ends.

    Args:
        collective: the ranks.
        progress: tells how far this rank is; called in another thread, too.
        look: called now and then while this rank waits; raises what it finds wrong.
    """

    peers: Peers
    """The other ranks, while a block is open."""

    def __init__(self, collective: Collective, progress: Callable[[], Progress], look: Callable[[], None]) -> None:
        self.closed = ""
        """Why nothing can be announced any more, if so."""
        self.is_lost = False
        """Whether something may be half done on the group, after an exception."""
        self.timeout: float | None = None
        """Seconds after which a rank that does not come is an error, if any."""
        self.doing = ""
        """What this rank waits for, where that is no header."""
        self.awaits_header = 0
        """The number of the header that this rank waits for, or has waited for last."""
        self._collective, self._progress, self._look = collective, progress, look
        self._arrived_at, self._busy_for = time.monotonic(), 0.0

    def begin(self) -> None:
        """Begin to look after the ranks; called when the first block of the group opens."""
        self.peers = Peers(self._collective, self._collective.next_block(), self._progress)

    def end(self) -> None:
        """Stop looking after the ranks; called when the last block of the group is closed."""
        self.peers.end()
        if self.is_lost:
            self._collective.hold()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Note the time; called where others may have waited for this rank, as they do under ``timeout``."""
        now = time.monotonic()
        self._busy_for, self._arrived_at = now - self._arrived_at, now

    def wait(self, work: Work, doing: str = "") -> None:
        """Wait for a message of this package's own; look meanwhile if others fail.

        Args:
            work: a sum on a line, or an all-reduce.
            doing: what this rank is doing, for the others to read; empty for the last header.

        Raises:
            PeerError: if another rank has failed, or is gone.
            JoinTimeoutError: if a rank does not come within ``timeout``, or another one has waited for so long.
        """
        try:
            if work.is_completed():
                work.wait()
            else:
                self.doing = doing
                with profiled("wait"):
                    self._wait_and_look(work)
                self.doing = ""
            if (
                self.timeout is not None and self._busy_for >= self.timeout / 2
            ):  # the others may have given up this rank
                self.peers.look_again()
        except (PeerError, JoinTimeoutError) as error:
            self.raise_on_all(error)
        except JoinError:
            raise  # known to this rank alone
        except RuntimeError as error:
            cause = self.explain(error)
            if cause is None:
                raise
            raise cause from error

    def _wait_and_look(self, work: Work) -> None:
        started = time.monotonic()
        limit = float("inf") if self.timeout is None else self.timeout
        while not _is_done_within(work, min(timeouts().look, limit)):
            self.peers.look()
            self._look()
            if time.monotonic() - started >= limit:
                raise self.timeout_error()

    def timeout_error(self, *, in_collective: bool = False) -> JoinTimeoutError:
        """The error of a rank that has waited for longer than ``timeout``, of which the others are told."""
        rank, own, others = self._collective.rank, self._progress(), self.peers.ask(limit=timeouts().note)
        if not (in_collective or self.doing):  # this rank may have sent another one since
            own = own._replace(headers=self.awaits_header)
        missing = [
            other
            for other in range(self._collective.world_size)
            if other != rank and (other not in others or _is_behind(others[other], own))
        ]
        here = [(other, progress) for other, progress in [*others.items(), (rank, own)] if other not in missing]
        doing = "; ".join(f"rank {other} {progress.doing}" for other, progress in sorted(here))
        if missing:
            text = (
                f"waited {self.timeout:g} s for ranks {missing}, which announced nothing. {doing}. They are late, or in"
                " a collective that this rank does not come to: in join.iterate, run the whole body on all ranks; else"
                " list what it belongs to (a sharded optimizer), or loop over join.iterate [J060]"
            )
        elif in_collective:
            #: A rank does not come to a collective of the group: run the same ones on all, or give a longer timeout.
            text = f"a collective was not done in {2 * (self.timeout or 0):g} s, twice the timeout: {doing} [J061]"
        else:
            text = (
                f"waited {self.timeout:g} s, and all wait, for different things: {doing}. All must run the same [J062]"
            )
        error = JoinTimeoutError(f"{text}. {_PENDING}")
        self.peers.post(error)
        return error

    # -- leaving ------------------------------------------------------------------------------------------------------

    def raise_closed(self) -> NoReturn:
        """Raise a :class:`JoinError`, since nothing can be announced any more."""
        raise JoinError(f"the Join block is over ({self.closed}); leave it before you go on [J063]")

    def raise_on_all(self, error: JoinError) -> NoReturn:
        """Raise ``error``, which the other ranks raise as well or know of; nothing can be announced any more."""
        self.closed = described(error)
        self.is_lost |= not isinstance(error, EarlyTerminationError)
        raise error

    def raise_alone(self, error: JoinError) -> NoReturn:
        """Raise ``error`` for a mistake that this rank alone may have made, after leaving a note for the others."""
        self.fail(error, is_alone=True)
        self.raise_on_all(error)

    def raise_early_termination(self, *, exhausted: bool) -> NoReturn:
        """Raise what ``throw_on_early_termination`` asks for; ``exhausted`` says whether it is this rank that is."""
        own = f"Rank {self._collective.rank} exhausted all inputs."
        others = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        self.raise_on_all(EarlyTerminationError(own if exhausted else others))

    def fail(self, error: BaseException, *, is_alone: bool = False) -> JoinError | None:
        """Leave the block with ``error``, and see to it that the others learn why.

        Args:
            error: what this rank raises.
            is_alone: whether it is one of this package's that other ranks do not raise as well.

        Returns:
            What to raise instead, if ``error`` comes of another rank's failure.
        """
        cause = self.explain(error)
        closes = False
        if cause is None and not self.closed:
            closes = is_alone or not isinstance(error, JoinError)
            self.closed, self.is_lost = f"this rank raised {type(error).__name__}", True
            self.peers.post(error)
        if self.is_lost and self._collective.world_size > 1:
            # Or whoever handles the error waits for the device when they read a tensor.
            self._collective.abort(connections=closes or cause is not None)
        return cause

    def explain(self, error: BaseException) -> JoinError | None:
        """What to raise instead of ``error``, if it is a collective that broke because of another rank's failure."""
        cause = self.peers.cause_of(error)
        if cause is None and self.timeout is not None and is_broken(error, stores=False):
            cause = self.timeout_error(in_collective=True)  # the others are there, but do not come to its end
        if cause is not None:
            self.closed = self.closed or described(cause)
            self.is_lost = True
        return cause


def _is_done_within(work: Work, seconds: float) -> bool:
    """Wait for ``work`` for some time at most; whether it is done.

    Raises:
        RuntimeError: if the collective itself fails.
    """
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        with suppress(RuntimeError):  # a timeout; or it has failed, and says so again below
            work.wait(timedelta(seconds=max(left, _LEAST_SECONDS)))
    work.wait()
    return True


def _is_behind(other: Progress, own: Progress) -> bool:
    """Whether a rank has not come to where this one waits."""
    theirs, ours = ((place.headers, place.loop, place.step, place.bursts) for place in (other, own))
    return theirs < ours
