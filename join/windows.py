"""Who has how many batches in the steps to come of a loop in lockstep: :class:`Windows`.

A *window* is ``lookahead`` steps, for which one roll call is held, on a line of its own beside the group, so that it
never meets what the loop's body sends. The order is told in ``join.iteration``.

Beside its answer each rank tells how many bursts it has run since its last one. A rank that has left one out, and whose
next bursts have met the last ones of the others since, learns that these ran more.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import NamedTuple

import torch

from join.answers import Answers
from join.collectives import RollCall
from join.errors import PeerError, ProtocolError
from join.farewell import Farewell
from join.lockstep import LockstepChannel


class Missed(NamedTuple):
    """What a rank has left out.

    Attributes:
        bursts: how many fewer it ran than the rank that ran most.
        steps: in which steps of the loop, counted from 1.
        by: that other rank.
    """

    bursts: int
    steps: range
    by: int


class Windows:
    """The windows of one loop, and what its ranks tell each other.

    Args:
        channel: the block's, on which all ranks have begun the loop.
        size: the most batches that a rank may have for a window; ``None`` if all of a rank's batches are one window,
            whose lengths the ranks declare.
        until_first: whether the loop, and so a window, ends with the first rank that runs out.
    """

    def __init__(self, channel: LockstepChannel, size: int | None, *, until_first: bool) -> None:
        self._until_first = until_first
        self._channel, self._collective = channel, channel.collective
        self._rank = self._collective.rank
        self._line = self._collective.line(1)
        self.key = f"{channel.key}/loop/{channel.loop}"
        self.counts: list[int] = []
        """How many batches each rank has in this window."""
        self._counts_before: list[int] = []  # in the one before
        self.mine = 0
        """How many this rank has."""
        self.steps = 0
        """How many steps this window has."""
        self.at = 0
        """How many of them were begun."""
        # Up to which step of the window which ranks have a batch, as a bit mask; and the place that the loop is at.
        self._stretches: list[tuple[int, int]] = []
        self._stretch = 0
        self.missed: Missed | None = None
        """What this rank has left out, as the last roll call shows that was read."""
        self._ran = 0  # how many bursts it had run when it called last
        self._told: list[int] = []  # all that ranks told in the roll call that was read last, and their answers in it
        self._replies: list[int] = []
        self.farewell = Farewell(self._collective, channel, self.key)
        channel.has_been_left = self.farewell.has_begun
        self.under_way: RollCall | None = None
        """The roll call, if a call was started and not read."""
        self.ends_well = False
        """Whether it is the last one, in which this rank has said that all is well."""
        if size is not None:
            self._hold_roll_calls(size)

    def _hold_roll_calls(self, size: int) -> None:
        self.answers = Answers(size)
        self._roll_call = self._line.roll_call(self.answers.largest)

    def declare(self, length: int) -> list[int]:
        """Tell each other how many batches there are: one all-gather."""
        lengths = [int(each) for each in self._collective.all_gather(torch.tensor([length]))]
        self._hold_roll_calls(max(lengths))
        return lengths

    def begin(self, counts: list[int]) -> None:
        """A window begins in which each rank has so many batches."""
        self.at = self._stretch = 0
        self._counts_before = self.counts
        if counts is self.counts:
            return
        self.counts, self.mine, self.steps = counts, counts[self._rank], self._steps_of(counts)
        self._stretches = [
            (end, sum(1 << rank for rank, count in enumerate(counts) if count >= end)) for end in sorted(set(counts))
        ]
        self._stretches.append((sys.maxsize, 0))

    def _steps_of(self, counts: list[int]) -> int:
        return min(counts) if self._until_first else max(counts)

    def begin_step(self) -> int:
        """A step begins; the ranks that have a batch in it, as a bit mask."""
        self.at += 1
        while self._stretches[self._stretch][0] < self.at:
            self._stretch += 1
        return self._stretches[self._stretch][1]

    def active_before(self, steps: int) -> int:
        """The ranks that had a batch so many steps before the last one that began, as a bit mask."""
        counts, at = self.counts, self.at - steps
        if at < 1 and self._counts_before:
            counts, at = self._counts_before, at + self._steps_of(self._counts_before)
        return sum(1 << rank for rank, count in enumerate(counts) if count >= at)

    # -- roll calls ---------------------------------------------------------------------------------------------------

    def call(self, answer: int, seconds: float | None = None) -> None:
        """Start a roll call; ``seconds`` as for :meth:`join.collectives.Line.sum`."""
        channel, call = self._channel, self._roll_call
        ran = channel.ran
        call.call(self.answers.packed(answer, ran - self._ran), seconds)
        self._ran, self.under_way = ran, call
        channel.tally.count(call.nbytes)

    def begin_as_before(self) -> bool:
        """Begin the next window, if its roll call is there and says what the last one said; else, nothing was done."""
        # What was said last may have been asked for, and not begun yet.
        if self._replies is not self.counts or not self._roll_call.repeats():
            return False
        self.under_way = None
        self.begin(self.counts)
        return True

    def read(self, doing: str) -> list[int]:
        """Wait for the roll call under way.

        Args:
            doing: what this rank does, for the others to read.

        Returns:
            How many batches each rank has.

        Raises:
            PeerError: if a rank has failed.
            ProtocolError: if a rank has left the loop, or had another number of batches than it declared.
        """
        assert self.under_way is not None
        channel, started = self._channel, time.monotonic()
        channel.wait(self.under_way, doing)
        if channel.shadowing:
            channel.tally.idle += time.monotonic() - started
        self.under_way = None
        replies = self.replies
        if replies is not self.counts and self.answers.some_end(replies):  # the very same have been looked at
            with contextlib.suppress(Exception):  # of collectives that peers left; what they told says more
                self.farewell.part("stopped")
            self.check(replies)
        return replies

    def is_last(self, doing: str) -> bool:
        """Whether the window is the last one; waits for the roll call under way, which is still to be read."""
        assert self.under_way is not None
        self._channel.wait(self.under_way, doing)
        replies = self.replies
        return not (self.answers.some_end(replies) or self._steps_of(replies))  # an end is told when it is read

    @property
    def replies(self) -> list[int]:
        """What the ranks answered, after the roll call is done."""
        told = self._roll_call.answers()
        if told is not self._told:  # most often it repeats
            self._hear(told)
        return self._replies

    def _hear(self, told: list[int]) -> None:
        """Read a roll call: answers for the window that begins next, bursts of the one before that under way."""
        self._told = told
        replies, bursts = self.answers.unpacked(told)
        if replies != self._replies:  # the same list as long as they are equal: counts that repeat are looked at once
            self._replies = replies
        most, mine = max(bursts), bursts[self._rank]
        self.missed = None
        if mine < most and not self._channel.meets and not self.answers.some_end(replies):  # who leaves runs more
            last = self._channel.steps - self.at
            first = last - self._steps_of(self._counts_before) + 1
            self.missed = Missed(most - mine, range(first, last + 1), bursts.index(most))

    def check(self, replies: list[int]) -> None:
        """Raise what :meth:`read` raises."""
        failed = [rank for rank, reply in enumerate(replies) if self.answers.has_failed(reply)]
        if failed:
            self._channel.close_with(PeerError(self._texts(failed)))
        wrong = [rank for rank, reply in enumerate(replies) if reply == self.answers.wrong]
        if wrong:
            self._channel.close_with(ProtocolError(self._texts(wrong)))
        left = [rank for rank, reply in enumerate(replies) if self.answers.has_left(reply)]
        if left:
            self._channel.close_with(
                ProtocolError(
                    f"ranks {left} left the loop over join.iterate early, and the others did not. End it on all ranks"
                    " at the same step, by something that all ranks know"
                )
            )

    # -- texts --------------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> int:
        """Publish that this rank raised ``error``; the answer that says so."""
        return self._publish(f"failed: {type(error).__name__}: {error}", self.answers.failed(self.at))

    def wrong(self, text: str) -> int:
        """Publish how this rank's batches differ from what it declared; the answer that says so."""
        return self._publish(text, self.answers.wrong)

    def _publish(self, text: str, answer: int) -> int:
        self._collective.set(f"{self.key}/ended/{self._collective.rank}", f"rank {self._collective.rank} {text}")
        return answer

    def _texts(self, ranks: list[int]) -> str:
        return "; ".join(self._collective.get(f"{self.key}/ended/{rank}") for rank in ranks)

    @property
    def has_lost_peers(self) -> bool:
        """Whether processes of other ranks are gone, though they have answered."""
        return bool(self._line.lost())

    def check_peers(self) -> None:
        """Raise a ``PeerError`` if another rank has published its end."""
        ranks = [rank for rank in range(self._collective.world_size) if rank != self._collective.rank]
        try:
            ended = [rank for rank in ranks if self._collective.check(f"{self.key}/ended/{rank}")]
        except Exception:
            return  # the store is gone with a peer
        if ended:
            self._channel.close_with(PeerError(self._texts(ended)))
