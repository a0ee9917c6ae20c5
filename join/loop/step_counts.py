"""Who has how many batches in the steps to come of a loop in lockstep, and what they weigh: :class:`StepCounts`.

One roll call is held for ``lookahead`` steps, a *round*, on a line of its own beside the group, so that it never meets
what the loop's body sends. The order is told in ``join.loop.iterate``. In a roll call each rank answers how many
batches it has for a round, and what each of them weighs, if ``weigh`` is given. Packed with that it
tells how many bursts it has begun since its last answer: a rank that has begun fewer than another has left one out.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from join.collectives import RollCall
from join.collectives._torch_private import profiled
from join.protocol.channel import Channel
from join.protocol.lockstep import Lockstep

_BURST_BITS = 5  # for how many bursts a rank begins in a step: more are not told apart
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

    size: int = 1
    fills: bool = False
    weighs: bool = False
    over_all_ranks: bool = False


class Answers:
    """What a rank may answer in a roll call, as one number.

    Args:
        round_size: the most batches it may have.
        weighs: whether it tells what each of them weighs.
    """

    def __init__(self, round_size: int, *, weighs: bool) -> None:
        self._round, self._weighs = round_size, weighs
        self._count_bits = round_size.bit_length()
        burst_bits = _BURST_BITS + (round_size - 1).bit_length()
        self._most = (1 << burst_bits) - 1
        self._bits = self._count_bits + burst_bits
        self.largest = (1 << self._bits + (_WEIGHT_BITS * round_size if weighs else 0)) - 1
        """No packed number is larger."""

    def packed(self, answer: int, bursts: int, weights: Sequence[float]) -> int:
        """An answer, how many bursts its rank has begun since its last one (or the most that can be told), weights."""
        number = min(bursts, self._most) << self._count_bits | answer
        if self._weighs:
            number |= int.from_bytes(struct.pack(f"<{len(weights)}d", *weights), "little") << self._bits
        return number

    def unpacked(self, number: int) -> tuple[int, int, Sequence[float]]:
        """What :meth:`packed` was given; weights of batches that there are none of are 0."""
        answer, bursts = number & (1 << self._count_bits) - 1, number >> self._count_bits & self._most
        if not self._weighs:
            return answer, bursts, ()
        weights = (number >> self._bits).to_bytes(self._round * _WEIGHT_BITS // 8, "little")
        return answer, bursts, struct.unpack(f"<{self._round}d", weights)


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
        self._guard, self._tally, self._collective = channel.guard, channel.headers.tally, channel.collective
        self._rank = self._collective.rank
        self.batches: list[int] = []
        """How many batches each rank has in this round."""
        self._weights: list[Sequence[float]] = []  # what they weigh, by rank
        self._steps_before = 0  # how many steps the round before had
        self.mine = 0
        """How many batches this rank has that are trained on."""
        self.steps = 0
        """How many steps this round has."""
        self.at = 0
        """How many of them were begun."""
        self._shares: list[tuple[int, int]] = []  # for each step: how many ranks have a batch, and the lowest of them
        self._totals: list[float] = []  # for each window: what all its batches weigh
        self._begun = 0  # how many bursts this rank had begun when it called last
        self.under_way: RollCall | None = None
        """The roll call, if a call was started and not read."""
        self.answers = Answers(size, weighs=windows.weighs)
        self._roll_call = lockstep.roll_calls.roll_call(self.answers.largest)

    def begin_next(self, doing: str) -> None:
        """Begin the next round: an empty one, if no roll call was started. For ``doing`` see :meth:`read`."""
        batches, weights = ([0] * len(self.batches), self._weights) if self.under_way is None else self.read(doing)
        self._steps_before, self.at = self.steps, 0
        if (batches, weights) != (self.batches, self._weights):
            self.batches, self._weights = batches, weights
            self._divide()

    def _steps_of(self, batches: list[int]) -> tuple[int, int]:
        """How many steps have data in them, and how many there are."""
        with_data = min(batches) if self._until_first else max(batches)
        filled = -(-with_data // self._windows.size) * self._windows.size
        return with_data, filled if self._windows.fills else with_data

    def _divide(self) -> None:
        """Find out who has data in each step of the round that begins, and what each of its windows weighs."""
        with_data, self.steps = self._steps_of(self.batches)
        self.mine = min(self.batches[self._rank], with_data)
        windows, world_size = self._windows, len(self.batches)
        ranks = [[rank for rank, count in enumerate(self.batches) if count > step] for step in range(with_data)]
        self._shares = [(len(having), having[0]) for having in ranks]
        self._shares += [(0, first) for _, first in self._shares[-1:]] * (self.steps - with_data)
        if windows.weighs:
            weights = [sum(self._weights[rank][step] for rank in having) for step, having in enumerate(ranks)]
        elif windows.over_all_ranks:
            weights = [float(world_size)] * self.steps
        else:
            weights = [float(len(having)) for having in ranks]
        self._totals = [sum(weights[at : at + windows.size]) for at in range(0, self.steps, windows.size)]

    def begin_step(self, weight: float) -> None:
        """Begin a step, in which this rank's batch, if it has one, has this ``weight``."""
        at, size = self.at, self._windows.size
        self.at = at + 1
        contributors, first = self._shares[at]
        has_data = at < self.mine
        self._lockstep.begin_step(contributors, first, has_data=has_data)
        step = self._lockstep.step
        step.weight, step.total = weight if has_data else 0.0, self._totals[at // size]
        step.ends_window = self.at % size == 0 or self.at == self.steps

    # -- roll calls ---------------------------------------------------------------------------------------------------

    def call(self, answer: int, weights: Sequence[float] = ()) -> None:
        """Start a roll call, in which this rank has ``answer`` batches with these ``weights``."""
        call, begun = self._roll_call, self._lockstep.progress.begun
        with profiled("roll call"):
            call.call(self.answers.packed(answer, begun - self._begun, weights))
        self._begun, self.under_way = begun, call
        self._tally.headers += 1
        self._tally.nbytes += call.nbytes

    def read(self, doing: str) -> tuple[list[int], list[Sequence[float]]]:
        """Wait for the roll call under way; how many batches each rank has, and what they weigh.

        Args:
            doing: what this rank does meanwhile, for the others to read.

        Raises:
            PeerError: if a rank has failed.
            ProtocolError: if a rank has begun more bursts than this one.
        """
        assert self.under_way is not None
        started = time.monotonic()
        with profiled("roll call"):
            self._guard.wait(self.under_way, doing)
        if self._lockstep.step.shadowing:
            self._tally.idle += time.monotonic() - started
        self.under_way = None
        return self._replies()

    def is_last(self, doing: str) -> bool:
        """Whether the round is the last one; waits for the roll call under way, which is still to be read."""
        assert self.under_way is not None
        with profiled("roll call"):
            self._guard.wait(self.under_way, doing)
        return not self._steps_of(self._replies()[0])[0]

    def _replies(self) -> tuple[list[int], list[Sequence[float]]]:
        """What the ranks answered, after the roll call is done: for the round that begins next.

        Bursts are those of the round before that one.
        """
        replies = [self.answers.unpacked(number) for number in self._roll_call.answers()]
        bursts = [reply[1] for reply in replies]
        if bursts[self._rank] < max(bursts):
            last = self._lockstep.step.number - self.at
            steps = range(last - self._steps_before + 1, last + 1)
            self._lockstep.progress.raise_left_out("something", steps, bursts.index(max(bursts)))
        return [reply[0] for reply in replies], [reply[2] for reply in replies]
