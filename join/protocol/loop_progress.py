"""How far ranks are in a loop over ``join.iterate``, and who has left something out: :class:`LoopProgress`.

A rank that leaves the loop alone, or leaves out of a step what others run in it, comes to a place where nobody else
comes to: a roll call, at the latest that at the loop's end, or the agreement of all that leave. While it waits there it
asks the others how far they are. If one of them is in a burst, or a collective of the body's own, that this rank has
left behind, it raises :class:`ProtocolError`, and the others learn of it as of any failure (``join.failure.peers``).
"""

from __future__ import annotations

import time
from typing import NoReturn

from join.collectives import Collective
from join.collectives.board import Progress
from join.collectives.timeouts import timeouts
from join.errors import ProtocolError
from join.protocol.members import Member


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
        self._ended = self._begun_by_then = 0  # how many steps have ended, and how many bursts had begun by then
        self._others: dict[int, Progress] = {}  # how far the other ranks were when last asked
        self._still_since = 0.0  # when they last moved

    def told(self) -> Progress:
        """How far this rank is, for the others to read."""
        return Progress(
            loop=self._loop,
            step=self.steps,
            bursts=self.begun,
            burst="" if self.last is None else self.last.joinable.join_name,
            issued=self._collective.issued() - self._issued_before,
            left=self.has_left,
        )

    def end_step(self) -> None:
        """Count the step that was begun last, if any, as ended."""
        self._ended, self._begun_by_then = self.steps, self.begun

    def all_have_left_here(self, told: dict[int, Progress]) -> bool:
        """Whether all others have left the loop where this rank has."""
        return len(told) == self._collective.world_size - 1 and all(map(self._has_left_here, told.values()))

    def _has_left_here(self, other: Progress) -> bool:
        if other.loop > self._loop:
            return True  # it has agreed to leave, with this rank, and gone on
        return other.left and (other.loop, other.step, other.bursts) == (self._loop, self.steps, self.begun)

    def look_for_left_out(self, told: dict[int, Progress]) -> None:
        """Find out whether another rank, as they have ``told``, is in something that this rank has left out.

        Raises:
            ProtocolError: if so; this rank alone knows.
        """
        here = {rank: other for rank, other in told.items() if other.loop == self._loop}
        for rank, other in here.items():
            is_elsewhere = other.bursts > self._begun_by_then
            if self.has_left and (is_elsewhere or other.step > self.steps):
                raise ProtocolError(
                    f"rank {self._rank} left the loop over join.iterate in step {self.steps}, and rank {rank} went on."
                    " End it on all ranks at the same place of the same step, by something that all ranks know [J092]"
                )
            if is_elsewhere and other.step <= self._ended:
                what = other.burst if other.bursts == self._begun_by_then + 1 else "something"
                self._raise_left_out(what, other.step, rank)
        now, mine = time.monotonic(), self.told().issued
        others = {rank: other._replace(beat=0, heard=0) for rank, other in told.items()}
        if others != self._others:
            self._others, self._still_since = others, now
        is_still = now - self._still_since > timeouts().still
        for rank, other in here.items():
            if is_still and other.step <= self._ended and 0 < mine < other.issued:
                self._raise_left_out("a collective of the body's own", other.step, rank)

    def _raise_left_out(self, what: str, step: int, rank: int) -> NoReturn:
        """Raise a :class:`ProtocolError`: this rank has left out what another rank has run by a step."""
        raise ProtocolError(
            f"rank {self._rank} left {what} out of step {step} of join.iterate, or of one before, and rank {rank} did"
            " not. All ranks must run the same body at every step, also on a dummy, or they wait for each other for"
            " ever; to leave a batch out, return 0 from weigh= [J093]"
        )
