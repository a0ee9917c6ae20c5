"""Who has how many batches in the steps to come of a loop in lockstep: :class:`StepCounts`.

A *window* is ``lookahead`` steps, for which one roll call is held, on a line of its own beside the group, so that it
never meets what the loop's body sends. The order is told in ``join.loop.iterate``.

In a roll call each rank answers how many batches it has for a window.
"""

from __future__ import annotations

import sys
import time

from join.collectives import RollCall
from join.protocol.channel import Channel
from join.protocol.lockstep import Lockstep


class StepCounts:
    """The windows of one loop, and what its ranks tell each other.

    Args:
        channel: the block's.
        lockstep: the loop, which all ranks have begun.
        size: the most batches that a rank may have for a window.
        until_first: whether the loop, and so a window, ends with the first rank that runs out.
    """

    def __init__(self, channel: Channel, lockstep: Lockstep, size: int, *, until_first: bool) -> None:
        self._lockstep, self._until_first = lockstep, until_first
        self._guard, self._tally = channel.guard, channel.headers.tally
        self._rank = channel.collective.rank
        self.batches: list[int] = []
        """How many batches each rank has in this window."""
        self.mine = 0
        """How many this rank has."""
        self.steps = 0
        """How many steps this window has."""
        self.at = 0
        """How many of them were begun."""
        # The window, cut where a rank runs out: (its last step, the ranks that have a batch up to there as a bit mask).
        self._stretches: list[tuple[int, int]] = []
        self._stretch = 0  # the one that the step under way is in
        self.under_way: RollCall | None = None
        """The roll call, if a call was started and not read."""
        self._roll_call = lockstep.roll_calls.roll_call(size)

    def begin_next(self, doing: str) -> None:
        """Begin the next window: an empty one, if no roll call was started. For ``doing`` see :meth:`read`."""
        batches = [0] * len(self.batches) if self.under_way is None else self.read(doing)
        self.at, self._stretch = 0, 0
        if batches != self.batches:
            self._divide(batches)

    def _divide(self, batches: list[int]) -> None:
        """Cut the window that begins into stretches, by how many batches each rank has."""
        self.batches, self.mine, self.steps = batches, batches[self._rank], self._steps_of(batches)
        self._stretches = [
            (end, sum(1 << rank for rank, count in enumerate(batches) if count >= end)) for end in sorted(set(batches))
        ]
        self._stretches.append((sys.maxsize, 0))

    def _steps_of(self, batches: list[int]) -> int:
        return min(batches) if self._until_first else max(batches)

    def begin_step(self) -> int:
        """Count a step, and return the ranks that have a batch in it, as a bit mask."""
        self.at += 1
        while self._stretches[self._stretch][0] < self.at:
            self._stretch += 1
        return self._stretches[self._stretch][1]

    # -- roll calls ---------------------------------------------------------------------------------------------------

    def call(self, answer: int) -> None:
        """Start a roll call, in which this rank has ``answer`` batches."""
        call = self.under_way = self._roll_call
        call.call(answer)
        self._tally.headers += 1
        self._tally.nbytes += call.nbytes

    def read(self, doing: str) -> list[int]:
        """Wait for the roll call under way; how many batches each rank has.

        Args:
            doing: what this rank does meanwhile, for the others to read.

        Raises:
            PeerError: if a rank has failed.
            ProtocolError: if this rank has left out what others run.
        """
        assert self.under_way is not None
        started = time.monotonic()
        self._guard.wait(self.under_way, doing)
        if self._lockstep.step.shadowing:
            self._tally.idle += time.monotonic() - started
        self.under_way = None
        return self._roll_call.answers()

    def is_last(self, doing: str) -> bool:
        """Whether the window is the last one; waits for the roll call under way, which is still to be read."""
        assert self.under_way is not None
        self._guard.wait(self.under_way, doing)
        return not self._steps_of(self._roll_call.answers())
