"""Who has how many batches in the steps to come of a loop in lockstep, and what they weigh: :class:`StepCounts`.

One roll call is held for ``lookahead`` steps, a *round*, on a line of its own beside the group, so that it never meets
what the loop's body sends. The order is told in ``join.lockstep.loop``. In a roll call each rank answers how many
batches it has for a round, and what each of them weighs, if ``weigh`` is given.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from join.collectives import RollCall
from join.collectives._torch_private import profiled
from join.lockstep.mode import Lockstep
from join.protocol.channel import Channel

_WEIGHT_BITS = 64


@dataclass(frozen=True)
class Windows:
    """How the steps of a loop are grouped, and what gradients of a window are divided by.

    Attributes:
        size: the steps whose gradients one optimizer step averages.
        fills: whether a window that is not full is filled with dummies on all ranks.
        weighs: whether batches are weighed by a function; else each weighs 1.
        over_all_ranks: whether a rank without data counts as one that weighs 1, where batches are not weighed.
    """

    size: int
    fills: bool
    weighs: bool
    over_all_ranks: bool


class StepCounts:
    """The rounds of one loop, and what its ranks tell each other.

    Args:
        channel: the block's.
        lockstep: the loop, which all ranks have begun.
        size: the most batches that a rank may have for a round; a multiple of the window's.
        windows: how the steps are grouped.
        until_first: whether the loop, and so a round, ends with the first rank that runs out.
    """

    def __init__(self, channel: Channel, lockstep: Lockstep, size: int, windows: Windows, *, until_first: bool) -> None:
        self._lockstep, self._windows, self._until_first = lockstep, windows, until_first
        self._channel, self._guard, self._tally = channel, channel.guard, channel.headers.tally
        self._rank, self._count_bits = channel.collective.rank, size.bit_length()
        self.size = size
        """The most batches that a rank may have for a round: so many are read ahead for it."""
        self._answers: list[int] = []  # of all ranks, for this round: how many batches, and, above that, their weights
        self.batches: list[int] = []
        """How many batches each rank has in this round."""
        self.own_batches = 0
        """How many batches this rank has that are trained on."""
        self.steps = 0
        """How many steps this round has."""
        self.at = 0
        """How many of them were begun."""
        self._shares: list[tuple[int, int]] = []  # for each step: how many ranks have a batch, and the lowest of them
        self._totals: list[float] = []  # for each window: what all its batches weigh
        self.under_way: RollCall | None = None
        """The roll call, if a call was started and not read."""
        bits = self._count_bits + (_WEIGHT_BITS * size if windows.weighs else 0)
        self._roll_call = lockstep.roll_calls.roll_call((1 << bits) - 1)

    def begin_next(self, doing: str) -> None:
        """Begin the next round: an empty one, if no roll call was started. For ``doing`` see :meth:`read`."""
        answers = [0] * len(self._answers) if self.under_way is None else self.read(doing)
        self.at = 0
        if answers != self._answers:
            self._answers = answers
            self._divide()

    def _steps_of(self, batches: list[int]) -> tuple[int, int]:
        """How many steps have data in them, and how many there are."""
        with_data = min(batches) if self._until_first else max(batches)
        filled = -(-with_data // self._windows.size) * self._windows.size
        return with_data, filled if self._windows.fills else with_data

    def _divide(self) -> None:
        """Find out who has data in each step of the round that begins, and what each of its windows weighs."""
        self.batches = self._batches_of(self._answers)
        with_data, self.steps = self._steps_of(self.batches)
        self.own_batches = min(self.batches[self._rank], with_data)
        windows, world_size, size = self._windows, len(self.batches), self.size
        ranks = [[rank for rank, count in enumerate(self.batches) if count > step] for step in range(with_data)]
        self._shares = [(len(having), having[0]) for having in ranks]
        self._shares += [(0, first) for _, first in self._shares[-1:]] * (self.steps - with_data)
        if windows.weighs:
            numbers = [(answer >> self._count_bits).to_bytes(8 * size, "little") for answer in self._answers]
            by_rank = [struct.unpack(f"<{size}d", number) for number in numbers]
            weights = [sum(by_rank[rank][step] for rank in having) for step, having in enumerate(ranks)]
        elif windows.over_all_ranks:
            weights = [float(world_size)] * self.steps
        else:
            weights = [float(len(having)) for having in ranks]
        self._totals = [sum(weights[at : at + windows.size]) for at in range(0, self.steps, windows.size)]

    def begin_step(self, weight: float) -> None:
        """Begin a step, in which this rank's batch, if it has one, has this ``weight``."""
        at, size, step, lockstep = self.at, self._windows.size, self._channel.step, self._lockstep
        lockstep.progress.steps += 1
        if lockstep.barrier is not None:
            lockstep.wait_for_all(f"came to step {lockstep.progress.steps} of join.iterate")
        if self._guard.closed:
            self._guard.raise_closed()
        if step.ends_window:
            self._channel.scaling.window += 1
        self.at = at + 1
        step.number = lockstep.progress.steps
        step.contributors, step.first_with_data = self._shares[at]
        if step.contributors:  # else the step only fills a window
            lockstep.is_uneven = step.contributors < len(self.batches)
        step.has_data = at < self.own_batches
        step.shadowing = not step.has_data
        step.weight, step.total = weight if step.has_data else 0.0, self._totals[at // size]
        step.ends_window = self.at % size == 0 or self.at == self.steps

    # -- roll calls ---------------------------------------------------------------------------------------------------

    def call(self, weights: Sequence[float]) -> None:
        """Start a roll call, in which this rank has batches with these ``weights``."""
        number = len(weights)
        if self._windows.weighs:
            number |= int.from_bytes(struct.pack(f"<{len(weights)}d", *weights), "little") << self._count_bits
        with profiled("roll call"):
            self._roll_call.call(number)
        self.under_way = self._roll_call
        self._tally.headers += 1
        self._tally.nbytes += self._roll_call.nbytes

    def read(self, doing: str) -> list[int]:
        """Wait for the roll call under way, and return its answers, one for each rank.

        Args:
            doing: what this rank does meanwhile, for the others to read.

        Raises:
            PeerError: if another rank has failed.
        """
        assert self.under_way is not None
        started = time.monotonic()
        self._guard.wait(self.under_way, doing)
        if self._channel.step.shadowing:
            self._tally.idle += time.monotonic() - started
        self.under_way = None
        return self._roll_call.answers()

    def is_last(self, doing: str) -> bool:
        """Whether the round is the last one; waits for the roll call under way, which is still to be read."""
        assert self.under_way is not None
        self._guard.wait(self.under_way, doing)
        return not self._steps_of(self._batches_of(self._roll_call.answers()))[0]

    def _batches_of(self, answers: list[int]) -> list[int]:
        """How many batches each rank has, as they have answered."""
        return [answer & (1 << self._count_bits) - 1 for answer in answers]
