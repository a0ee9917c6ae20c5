"""Ranks that do not run a loop over ``join.iterate`` alike: :class:`LoopProgress` and :class:`LateUse` find them.

A rank that leaves the loop alone, or leaves out of a step what others run in it, comes to a place where nobody else
comes to: a roll call, at the latest that at the loop's end, or the agreement of all that leave. While it waits there it
asks the others how far they are. If one of them is in a burst, or a collective of the body's own, that this rank has
left behind, it raises :class:`ProtocolError`, and the others learn of it as of any failure (``join.failure.peers``).

A consumer that takes batches ahead of the body (``for x in prefetch(join.iterate(loader))``) has the body run on one
batch while the loop is at another, so a batch that counts is taken for a dummy. No module is called in the first step
then, and the bodies of the last steps run after the loop, on dummies on a rank that had no data: no other loop calls a
module on an empty batch there. Or a module is called in another thread than the one that takes the batches.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

from join.batch import has_empty_tensor
from join.collectives import Collective
from join.collectives.board import Progress
from join.collectives.timeouts import timeouts
from join.errors import ProtocolError
from join.protocol.headers import Member


class LoopProgress:
    """How far this rank is in one loop.

    Args:
        collective: the ranks.
        loop: the number of the loop.
    """

    def __init__(self, collective: Collective, loop: int) -> None:
        self.steps = 0
        """How many steps this rank has come to."""
        self.begun = 0
        """How many bursts it has come to, but for those that interject: they may come in any step."""
        self.last: Member | None = None
        """Whose burst the last of these is."""
        self.has_left = False
        """Whether it has left the loop before its end."""
        self._collective, self._loop, self._rank = collective, loop, collective.rank
        self._issued_before = collective.issued()
        self.ended = self.begun_by_then = 0
        """How many steps have ended, and how many bursts had begun by then."""
        self._others: dict[int, Progress] = {}  # how far the other ranks were when last asked
        self._still_since = 0.0  # when they last moved

    def place(self) -> Progress:
        """Return how far this rank is, for the others to read."""
        return Progress(
            loop=self._loop,
            step=self.steps,
            bursts=self.begun,
            burst="" if self.last is None else self.last.joinable.join_name,
            issued=self._collective.issued() - self._issued_before,
            left=self.has_left,
        )

    def all_have_left_here(self, others: dict[int, Progress]) -> bool:
        """Return whether all ``others`` have left the loop where this rank has."""
        return len(others) == self._collective.world_size - 1 and all(map(self._has_left_here, others.values()))

    def _has_left_here(self, other: Progress) -> bool:
        if other.loop > self._loop:
            return True  # it has agreed to leave, with this rank, and gone on
        return other.left and (other.loop, other.step, other.bursts) == (self._loop, self.steps, self.begun)

    def look_for_left_out(self, others: dict[int, Progress]) -> None:
        """Find out whether another rank is in something that this rank has left out.

        Args:
            others: how far they are, by rank.

        Raises:
            ProtocolError: if so; this rank alone knows.
        """
        here = {rank: other for rank, other in others.items() if other.loop == self._loop}
        for rank, other in here.items():
            is_elsewhere = other.bursts > self.begun_by_then
            if self.has_left and (is_elsewhere or other.step > self.steps):
                raise ProtocolError(
                    f"rank {self._rank} left the loop over join.iterate in step {self.steps}, and rank {rank} went on."
                    " End it on all ranks at the same place of the same step, by something that all ranks know [J092]"
                )
            if is_elsewhere and other.step <= self.ended:
                what = other.burst if other.bursts == self.begun_by_then + 1 else "something"
                self._raise_left_out(what, other.step, rank)
        now, issued = time.monotonic(), self.place().issued
        places = {rank: other._replace(beat=0, heard=0) for rank, other in others.items()}
        if places != self._others:
            self._others, self._still_since = places, now
        is_still = now - self._still_since > timeouts().still
        for rank, other in here.items():
            if is_still and other.step <= self.ended and 0 < issued < other.issued:
                self._raise_left_out("a collective of the body's own", other.step, rank)

    def _raise_left_out(self, what: str, step: int, rank: int) -> NoReturn:
        """Raise a :class:`ProtocolError`: this rank has left out what another rank has run by a step."""
        raise ProtocolError(
            f"rank {self._rank} left {what} out of step {step} of join.iterate, or of one before, and rank {rank} did"
            " not. All ranks must run the same body at every step, also on a dummy, or they wait for each other for"
            " ever; to leave a batch out, return 0 from weigh= [J093]"
        )


class LateUse:
    """Looks where modules are called in one loop, and on what after it.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._thread = rank, threading.get_ident()
        self._steps = self._calls_after = 0  # of the loop; and calls of modules since it has ended
        self.has_ended = False
        """Whether the loop is over."""
        self.is_ruled_out = False
        """Whether nobody reads ahead, or nothing that was read is left to be used."""

    def begin_step(self) -> None:
        """Note that a batch is taken."""
        self._steps, self._thread = self._steps + 1, threading.get_ident()

    def called(self) -> None:
        """Check the thread in which a module is called, before that sends anything.

        Raises:
            ProtocolError: if the batches are taken in another thread.
        """
        if self.has_ended:
            self._calls_after += 1
            self.is_ruled_out = self._calls_after > self._steps
        elif threading.get_ident() != self._thread:
            self._refuse(f"in step {self._steps} of join.iterate in another thread than the one that takes the batches")
        else:
            self.is_ruled_out = self._steps == 1

    def used(self, arguments: Any) -> None:
        """Check the arguments that a module runs on.

        Raises:
            ProtocolError: if they are a dummy of a loop that has ended.
        """
        if self.has_ended and has_empty_tensor(arguments):
            self._refuse(f"on an empty batch after step {self._steps}, the last one of join.iterate")

    def _refuse(self, what: str) -> None:
        raise ProtocolError(
            f"on rank {self._rank}, a module was called {what}: batches are read ahead of the loop's body, which then"
            " takes dummies for data. Put what reads ahead inside: for batch in join.iterate(prefetch(loader)), or"
            " join.iterate(loader, lookahead=k) [J089]"
        )
