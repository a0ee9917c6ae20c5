"""Rounds of a loop over ``Join.iterate``: :class:`Rounds`, and the answers to its roll calls.

A round is ``lookahead`` steps, rounded up to a multiple of the accumulation window. In one roll call for each round,
every rank announces how many batches it has and their weights, and how many operations it has started on the group,
which should be equal (``join.protocol.progress``). :class:`Share` is one step of the answers of all ranks, which
:class:`Shares` adds up.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from join.batch import Exact, Step, exact
from join.collectives._torch_private import profiled
from join.options import Options
from join.protocol.channel import Lockstep

_WEIGHT_BITS, _ISSUED_BITS = 64, 16
_WINDOW_NUMBERS = itertools.count(1)  # modules remember the number of a window from one block to the next


class Share(NamedTuple):
    """Batches of one step on all ranks, or on some ranks.

    Attributes:
        ranks: The number of ranks that have a batch.
        first: The lowest of these ranks.
        weight: The sum of the weights of their batches.
    """

    ranks: int
    first: int
    weight: Exact


class Answers(NamedTuple):
    """Answers of all ranks, or of some ranks, to a roll call.

    Attributes:
        issued: The number of operations that each rank started on the group since the last call, modulo 65,536;
            ``None`` if these numbers differ.
        shares: The steps for which any rank has a batch.
    """

    issued: int | None = None
    shares: Sequence[Share] = ()


@dataclass(frozen=True)
class Shares:
    """Decoder of the answers to a roll call, which combines the answers of all ranks.

    Attributes:
        count_bits: The number of bits of an answer that hold the number of batches. Below them is the number of
            operations that were started on the group, and above them are the weights.
        weighs: Whether an answer has weights.
    """

    count_bits: int
    weighs: bool

    def of(self, answer: int, rank: int, /) -> Answers:
        """Return one rank's answer."""
        issued, answer = answer & (1 << _ISSUED_BITS) - 1, answer >> _ISSUED_BITS
        batches = answer & (1 << self.count_bits) - 1
        if not self.weighs:
            return Answers(issued, [Share(1, rank, 1)] * batches)
        weights = (answer >> self.count_bits).to_bytes(8 * batches, "little")
        return Answers(issued, [Share(1, rank, exact(weight)) for weight in struct.unpack(f"<{batches}d", weights)])

    def combined(self, one: Answers, other: Answers, /) -> Answers:
        """Return the answers of two sets of ranks together."""
        longer, shorter = sorted((one.shares, other.shares), key=len, reverse=True)
        both = [
            Share(a.ranks + b.ranks, min(a.first, b.first), a.weight + b.weight)
            for a, b in zip(longer, shorter, strict=False)
        ]
        issued = one.issued if one.issued == other.issued else None
        return Answers(issued, [*both, *longer[len(shorter) :]])


class Rounds:
    """Rounds of one loop, and the roll calls of its ranks.

    Args:
        lockstep: The loop, which all ranks have begun.
        options: The arguments of ``Join.iterate``.
        window: The number of steps of an accumulation window.
    """

    def __init__(self, lockstep: Lockstep, options: Options, window: int) -> None:
        self._lockstep, self._options, self._window = lockstep, options, window
        channel = lockstep.channel
        self._guard, self._tally, self._world_size = channel.guard, channel.headers.tally, channel.collective.world_size
        self.size = -(-options.lookahead // window) * window
        """Largest number of batches that a rank may have for a round, which are read ahead for it: whole windows."""
        self._answers = Answers()  # of all ranks, for this round
        self.shares: Sequence[Share] = ()
        """Shares of the steps of this round, without steps that only fill a window."""
        self._called = 0  # the number of batches that this rank announced in the last roll call
        self.own_batches = 0
        """Number of steps of this round in which this rank has data."""
        self.steps = 0
        """Number of steps in this round."""
        self.begun = 0
        """Number of steps of this round that were begun."""
        self._totals: list[float] = []  # for each window: the sum of the weights of its batches
        self._issued = lockstep.progress.issued()  # at the last call
        fold = Shares(self.size.bit_length(), options.weigh is not None)
        bits = _ISSUED_BITS + fold.count_bits + (_WEIGHT_BITS * self.size if fold.weighs else 0)
        self._roll_call = lockstep.roll_calls.roll_call((1 << bits) - 1, fold)

    def begin_round(self, doing: str) -> None:
        """Wait for the current roll call, and begin the round that it announces.

        Args:
            doing: The action of this rank that waits, as a predicate, for the error messages of other ranks.

        Raises:
            PeerError: If another rank failed, or skipped a collective.
            ProtocolError: If this rank skipped a collective.
        """
        started = time.monotonic()
        answers: Answers = self._guard.wait(self._roll_call, doing, self._roll_call.result)
        if self._lockstep.step.is_dummy:
            self._tally.idle += time.monotonic() - started
        if answers.issued is None:  # a rank may have skipped a collective, for which the others wait at last
            self._lockstep.meet()
        self.begun = 0
        if answers is not self._answers:  # a roll call returns the same object while its answers stay the same
            self._answers = answers
            self._plan_round()
        self.own_batches = min(self._called, len(self.shares))

    @property
    def fewest(self) -> int:
        """Smallest number of batches that any rank has in this round."""
        return sum(share.ranks == self._world_size for share in self.shares)

    def _steps_to_make(self, answers: Answers) -> Sequence[Share]:
        """Return the shares of the steps to make: under ``until="first"``, only steps where all ranks have a batch."""
        if self._options.until == "all" or self._options.throw:  # which ends the loop earlier, with an error
            return answers.shares
        return [share for share in answers.shares if share.ranks == self._world_size]

    def _plan_round(self) -> None:
        """Compute the number of steps of the round, and the total weight of each of its windows."""
        window, shares = self._window, self._steps_to_make(self._answers)
        self.shares, self.steps = shares, len(shares)
        if self._options.fill_window:
            self.steps = -(-self.steps // window) * window
        weights = [share.weight for share in shares]
        if self._options.over_all_ranks and self._options.weigh is None:
            weights = [self._world_size] * self.steps
        starts, copies = range(0, self.steps, window), self._options.copies
        self._totals = [float(sum(weights[start : start + window]) * copies) for start in starts]

    def next_step(self, before: Step, weight: float) -> Step:
        """Begin the next step of this round.

        Args:
            before: The step before it.
            weight: The weight of this rank's batch, if it has one.
        """
        index = self.begun
        self.begun, is_dummy = index + 1, index >= self.own_batches
        step = Step(in_loop=True, number=before.number + 1, is_dummy=is_dummy, first_with_data=before.first_with_data)
        step.weight, step.total = 0.0 if is_dummy else weight, self._totals[index // self._window]
        step.window = next(_WINDOW_NUMBERS) if before.ends_window else before.window
        step.usual = before.losses if before.losses > before.usual else before.usual
        step.skipped = 0 if before.ends_window else before.skipped + (not before.losses)
        step.ends_window = self.begun % self._window == 0 or self.begun == self.steps
        if index < len(self.shares):  # if not, the step only fills a window
            step.contributors, step.first_with_data, step.of_all = self.shares[index]
        return step

    # -- roll calls ---------------------------------------------------------------------------------------------------

    def call(self, weights: Sequence[float]) -> None:
        """Start a roll call, in which this rank announces batches with these ``weights``."""
        number, before, self._issued = len(weights), self._issued, self._lockstep.progress.issued()
        if self._options.weigh is not None:
            number |= int.from_bytes(struct.pack(f"<{len(weights)}d", *weights), "little") << self.size.bit_length()
        number = number << _ISSUED_BITS | self._issued - before & (1 << _ISSUED_BITS) - 1
        with profiled("roll call"):
            self._roll_call.call(number)
        self._called = len(weights)
        self._tally.headers += 1
        self._tally.nbytes += self._roll_call.nbytes

    def is_last(self, doing: str) -> bool:
        """Return whether this round is the last one, after waiting for the roll call, which remains to be read."""
        return not self._steps_to_make(self._guard.wait(self._roll_call, doing, self._roll_call.result))
