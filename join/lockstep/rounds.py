"""Who has how many batches in the steps to come of a loop in lockstep, and what they weigh: :class:`StepCounts`.

One roll call is held for ``lookahead`` steps, a *round*, on a line of its own beside the group, so that it never meets
what the loop's body sends. The order is told in ``join.lockstep.loop``. In a roll call each rank answers how many
batches it has for a round, and what each of them weighs, if ``weigh`` is given. What comes back does not grow with the
number of ranks: for each step, how many ranks have a batch, the lowest of them, and what all their batches weigh.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from join.collectives import RollCall
from join.collectives._torch_private import profiled
from join.collectives.base import Exact, exact
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


class Share(NamedTuple):
    """Who has a batch in a step.

    Attributes:
        ranks: how many have one.
        first: the lowest of these.
        weight: what all their batches weigh.
    """

    ranks: int
    first: int
    weight: Exact


@dataclass(frozen=True)
class Shares:
    """Makes, of what ranks answer, the shares of those steps of a round that anybody has a batch for.

    Attributes:
        count_bits: of an answer, that say how many batches a rank has; above them are its weights, if any.
        weighs: whether there are.
    """

    count_bits: int
    weighs: bool

    def of(self, answer: int, rank: int, /) -> list[Share]:
        """Return what one rank answers."""
        batches = answer & (1 << self.count_bits) - 1
        if not self.weighs:
            return [Share(1, rank, 1)] * batches
        weights = (answer >> self.count_bits).to_bytes(8 * batches, "little")
        return [Share(1, rank, exact(weight)) for weight in struct.unpack(f"<{batches}d", weights)]

    def combined(self, one: list[Share], other: list[Share], /) -> list[Share]:
        """Return what two sets of ranks answer."""
        longer, shorter = (one, other) if len(one) > len(other) else (other, one)
        both = [
            Share(a.ranks + b.ranks, min(a.first, b.first), a.weight + b.weight)
            for a, b in zip(longer, shorter, strict=False)
        ]
        return both + longer[len(shorter) :]


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
        self._world_size, self._count_bits = channel.collective.world_size, size.bit_length()
        self.size = size
        """The most batches that a rank may have for a round: so many are read ahead for it."""
        self._answer: list[Share] = []  # of all ranks, for this round
        self._shares: list[Share] = []  # of those of its steps that are made
        self._called = 0  # how many batches this rank has in the next round
        self.held = 0
        """How many batches this rank has in this round."""
        self.own_batches = 0
        """How many batches this rank has that are trained on."""
        self.steps = 0
        """How many steps this round has."""
        self.at = 0
        """How many of them were begun."""
        self._totals: list[float] = []  # for each window: what all its batches weigh
        self.under_way: RollCall[list[Share]] | None = None
        """The roll call, if a call was started and not read."""
        bits = self._count_bits + (_WEIGHT_BITS * size if windows.weighs else 0)
        self._roll_call = lockstep.roll_calls.roll_call((1 << bits) - 1, Shares(self._count_bits, windows.weighs))

    def begin_next(self, doing: str) -> None:
        """Begin the next round: an empty one, if no roll call was started. For ``doing`` see :meth:`read`."""
        shares = list[Share]() if self.under_way is None else self.read(doing)
        self.at = 0
        self.held, self._called = self._called, 0
        if shares is not self._answer:
            self._answer = shares
            self._divide()
        self.own_batches = min(self.held, len(self._shares))

    @property
    def least(self) -> int:
        """The fewest batches that a rank has in this round."""
        return sum(share.ranks == self._world_size for share in self._shares)

    @property
    def first_with_data(self) -> int:
        """The lowest rank that has a batch in this round."""
        return self._shares[0].first

    def _with_data(self, shares: list[Share]) -> list[Share]:
        """Those of the steps that are made."""
        return [share for share in shares if share.ranks == self._world_size] if self._until_first else shares

    def _divide(self) -> None:
        """Find out how many steps the round has that begins, and what each of its windows weighs."""
        windows, shares = self._windows, self._with_data(self._answer)
        self._shares, self.steps = shares, len(shares)
        if windows.fills:
            self.steps = -(-self.steps // windows.size) * windows.size
        weights = [share.weight for share in shares]
        if windows.over_all_ranks and not windows.weighs:
            weights = [self._world_size] * self.steps
        self._totals = [float(sum(weights[at : at + windows.size])) for at in range(0, self.steps, windows.size)]

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
        if at < len(self._shares):
            step.contributors, step.first_with_data, _ = self._shares[at]
            lockstep.is_uneven = step.contributors < self._world_size
        else:  # the step only fills a window
            step.contributors = 0
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
        self._called = len(weights)
        self.under_way = self._roll_call
        self._tally.headers += 1
        self._tally.nbytes += self._roll_call.nbytes

    def read(self, doing: str) -> list[Share]:
        """Wait for the roll call under way, and return what was answered.

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
        return self._roll_call.result()

    def is_last(self, doing: str) -> bool:
        """Whether the round is the last one; waits for the roll call under way, which is still to be read."""
        assert self.under_way is not None
        self._guard.wait(self.under_way, doing)
        return not self._with_data(self._roll_call.result())
