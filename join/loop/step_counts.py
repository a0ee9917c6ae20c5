"""Who has how many batches in the steps to come of a loop in lockstep: :class:`StepCounts`.

A *window* is ``lookahead`` steps, for which one roll call is held, on a line of its own beside the group, so that it
never meets what the loop's body sends. The order is told in ``join.loop.iterate``.

In a roll call each rank answers how many batches it has for a window. Packed with that it tells how
many bursts it has begun since its last answer: a rank that has begun fewer than another has left one out.
"""

from __future__ import annotations

import sys
import time

from join.collectives import RollCall
from join.protocol.channel import Channel
from join.protocol.lockstep import Lockstep

_BURST_BITS = 5  # for how many bursts a rank begins in a step: more are not told apart


class Answers:
    """What a rank may answer in a roll call, as one number.

    Args:
        window: the most batches it may have.
    """

    def __init__(self, window: int) -> None:
        self._bits = window.bit_length()
        self.mask = (1 << self._bits) - 1
        """The bits of a packed number that hold the answer; those above count bursts."""
        self._most = (1 << _BURST_BITS + (window - 1).bit_length()) - 1
        self.largest = self.packed(window, self._most)
        """The largest packed number."""

    def packed(self, answer: int, bursts: int) -> int:
        """An answer, and how many bursts its rank has begun since its last one, or the most that can be told."""
        return min(bursts, self._most) << self._bits | answer


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
        self._steps_before = 0  # how many steps the window before had
        self.mine = 0
        """How many this rank has."""
        self.steps = 0
        """How many steps this window has."""
        self.at = 0
        """How many of them were begun."""
        # The window, cut where a rank runs out: (its last step, the ranks that have a batch up to there as a bit mask).
        self._stretches: list[tuple[int, int]] = []
        self._stretch = 0  # the one that the step under way is in
        self._begun = 0  # how many bursts this rank had begun when it called last
        self.under_way: RollCall | None = None
        """The roll call, if a call was started and not read."""
        self.answers = Answers(size)
        self._roll_call = lockstep.roll_calls.roll_call(self.answers.largest)

    def begin_next(self, doing: str) -> None:
        """Begin the next window: an empty one, if no roll call was started. For ``doing`` see :meth:`read`."""
        batches = [0] * len(self.batches) if self.under_way is None else self.read(doing)
        self._steps_before, self.at, self._stretch = self.steps, 0, 0
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
        call, begun = self._roll_call, self._lockstep.progress.begun
        call.call(self.answers.packed(answer, begun - self._begun))
        self._begun, self.under_way = begun, call
        self._tally.headers += 1
        self._tally.nbytes += call.nbytes

    def read(self, doing: str) -> list[int]:
        """Wait for the roll call under way; how many batches each rank has.

        Args:
            doing: what this rank does meanwhile, for the others to read.

        Raises:
            PeerError: if a rank has failed.
            ProtocolError: if a rank has begun more bursts than this one.
        """
        assert self.under_way is not None
        started = time.monotonic()
        self._guard.wait(self.under_way, doing)
        if self._lockstep.step.shadowing:
            self._tally.idle += time.monotonic() - started
        self.under_way = None
        return self.replies

    def is_last(self, doing: str) -> bool:
        """Whether the window is the last one; waits for the roll call under way, which is still to be read."""
        assert self.under_way is not None
        self._guard.wait(self.under_way, doing)
        return not self._steps_of(self.replies)

    @property
    def replies(self) -> list[int]:
        """What the ranks answered, after the roll call is done: for the window that begins next.

        Bursts are those of the window before that one.
        """
        packed, mask = self._roll_call.answers(), self.answers.mask
        most = max(packed)
        if packed[self._rank] | mask < most:  # another rank has begun more bursts
            last = self._lockstep.step.number - self.at
            steps = range(last - self._steps_before + 1, last + 1)
            self._lockstep.progress.raise_left_out("something", steps, packed.index(most))
        return [each & mask for each in packed]
