"""Rounds of a loop over ``Join.iterate``: :class:`Rounds`, its roll calls, and the :class:`Options` of the loop.

A round is ``lookahead`` steps, at least one, rounded up to a multiple of the accumulation window. In one roll call for
each round, every rank announces how many batches it has and their weights, and how many operations it has started on
the group, which should be equal (``join.protocol.progress``). :class:`Share` is one step of the answers of all ranks.

A roll call is a message (``join.protocol.messages``), which is read a round later, or at once with ``lookahead=0``. For
each step it sums the ranks that have a batch, whether the lowest rank with data of the last step still has one, and the
weights that are whole numbers. Rows with the batches and weights of each rank follow only if that does not say
everything, on all ranks alike: the lowest rank with data changes, a weight is a fraction, or the round is too long for
a sum.
"""

from __future__ import annotations

import itertools
import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from itertools import chain
from typing import Any, Literal, NamedTuple

from join.arguments import checked_number
from join.batch import Step
from join.collectives._torch_private import profiled
from join.errors import wrong_kind, wrong_value
from join.protocol.channel import Lockstep
from join.protocol.messages import WORD, Answer, Message

_WEIGHT_BITS, _MOST_BITS = 40, 1024  # of a weight in a sum, and of the sum of a roll call
_WINDOW_NUMBERS = itertools.count(1)  # modules remember the number of a window from one block to the next


@dataclass(frozen=True)
class Options:
    """Arguments of ``Join.iterate`` without the loader, and settings of its block as keywords.

    Keywords are not compared between ranks.

    Attributes:
        throw: Whether all ranks raise an exception as soon as one is out of data.
        over_all_ranks: Whether gradients are a mean over all ranks, including those without data. It has no effect if
            batches are weighed.
        resumable: Whether this rank keeps the states of its loader, an argument of ``Join.iterate``, too.
        copies: With ``enable=False``, the number of ranks that are assumed to have the batches of this rank, itself
            included; otherwise 1.

    The other attributes are the arguments of ``Join.iterate``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed.
    """

    until: Literal["all", "first"]
    dummy: Literal["empty", "last"] | Callable[[Any], Any]
    lookahead: int
    weigh: Callable[[Any], Any] | None
    window: int | Literal["all"]
    fill_window: bool
    _: KW_ONLY
    resumable: bool = False
    throw: bool = False
    over_all_ranks: bool = True
    copies: int = 1

    def __post_init__(self) -> None:
        if self.until not in ("all", "first"):
            fix = "'all' to loop until all ranks are out of data, or 'first' to stop as soon as one is"
            raise wrong_value("until", self.until, "a valid value", fix)
        if self.dummy not in ("empty", "last") and not callable(self.dummy):
            fix = "'empty', 'last', or a function that returns a dummy batch for a batch"
            raise wrong_value("dummy", self.dummy, "a valid value", fix)
        window = 1 if self.window == "all" else self.window
        for name, number, least in (("lookahead", self.lookahead, 0), ("window", window, 1)):
            checked_number(name, number, "a number of steps", least=least, is_whole=True)
        if not self.lookahead and self.window != 1:
            kind = "possible with lookahead=0, as the weights of a window are added up before its first step"
            raise wrong_value("window", self.window, kind, "lookahead=1 or window=1")
        if self.weigh is not None and not callable(self.weigh):
            fix = "a function that returns the weight of a batch, such as its number of samples"
            raise wrong_kind("weigh", self.weigh, "a function", fix)

    def to_compare(self) -> list[str]:
        """Return texts of the arguments, which must be equal on all ranks; functions are not distinguished."""
        arguments = [(field.name, getattr(self, field.name)) for field in fields(self) if not field.kw_only]
        return [f"{name}={'a function' if callable(value) else value}" for name, value in arguments]


class Share(NamedTuple):
    """Batches of one step on all ranks.

    Attributes:
        ranks: The number of ranks that have a batch.
        first: The lowest of these ranks.
        weight: The sum of the weights of their batches, exact before rounding.
    """

    ranks: int
    first: int
    weight: float


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
        self._messages, self._tally, self._collective = channel.messages, channel.headers.tally, channel.collective
        self._count = self._collective.world_size.bit_length()
        self.size = -(-max(options.lookahead, 1) // window) * window
        """Largest number of batches that a rank may have for a round, which are read ahead for it: whole windows."""
        self._fits = bits_of(options, self._collective.world_size) > 0
        self._message: Message  # the last roll call
        self._answer: Answer | None = None  # to the roll call for this round, if it said everything
        self._first = 0  # the lowest rank with data, as all ranks know it
        self.shares: Sequence[Share] = ()
        """Shares of the steps of this round, without steps that only fill a window."""
        self._called: Sequence[float] = ()  # the weights of the batches that this rank announced in the last roll call
        self.own_batches = 0
        """Number of steps of this round in which this rank has data."""
        self.steps = 0
        """Number of steps in this round."""
        self.begun = 0
        """Number of steps of this round that were begun."""
        self._totals: list[float] = []  # for each window: the sum of the weights of its batches
        self._issued = lockstep.progress.issued()  # at the last call

    def begin_round(self, doing: str) -> None:
        """Wait for the current roll call, and begin the round that it announces.

        Args:
            doing: The action of this rank that waits, as a predicate, for the error messages of other ranks.

        Raises:
            PeerError: If another rank failed, or skipped a collective.
            ProtocolError: If this rank skipped a collective.
        """
        started = time.monotonic()
        answer = self._messages.read(self._message, doing)
        if not answer.is_same:  # a rank may have skipped a collective, for which the others wait at last
            self._lockstep.meet()
        if answer != self._answer:
            shares = self._summed(answer)
            self._answer = None if shares is None else answer
            if shares is None:
                shares = self._gathered(doing)
            self._plan_round(shares)
        if self._lockstep.step.is_dummy:
            self._tally.idle += time.monotonic() - started
        self.begun = 0
        self.own_batches = min(len(self._called), len(self.shares))

    @property
    def fewest(self) -> int:
        """Smallest number of batches that any rank has in this round."""
        return sum(share.ranks == self._collective.world_size for share in self.shares)

    def _plan_round(self, shares: Sequence[tuple[Share, Sequence[float]]]) -> None:
        """Compute the number of steps of the round, and the total weight of each of its windows.

        Args:
            shares: The steps, and the weights that add up to the weight of each.
        """
        window, world_size, options = self._window, self._collective.world_size, self._options
        if shares:
            self._first = shares[-1][0].first
        if self._ends_at_first:
            shares = [each for each in shares if each[0].ranks == world_size]
        self.shares, self.steps = [share for share, _ in shares], len(shares)
        if options.fill_window:
            self.steps = -(-self.steps // window) * window
        weights = [weights for _, weights in shares]
        if options.over_all_ranks and options.weigh is None:
            weights = [[world_size]] * self.steps
        starts = range(0, self.steps, window)
        self._totals = [math.fsum(chain(*weights[start : start + window])) * options.copies for start in starts]

    @property
    def _ends_at_first(self) -> bool:
        """Whether the loop makes only steps for which all ranks have a batch."""
        return self._options.until == "first" and not self._options.throw  # which ends the loop earlier, with an error

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
        before, self._issued, self._called = self._issued, self._lockstep.progress.issued(), weights
        is_first, more = self._collective.rank == self._first, 0
        if self._fits and (self.size > 1 or self._options.weigh is not None):
            more = self._packed(weights, is_first)
        has_data = bool(weights)
        with profiled("roll call"):
            self._message = self._messages.start(
                f"called the roll, {self._issued - before} operations",
                vote=has_data,
                first=has_data and is_first,
                more=more,
            )
        self._tally.headers += 1
        self._tally.nbytes += self._message.work.nbytes

    def _packed(self, weights: Sequence[float], is_first: bool) -> int:
        """Return the numbers of a roll call that its votes do not hold; :meth:`_summed` reads their sum."""
        number, place, step = 0, self._count, 1 | is_first << self._count
        for index in range(1, self.size):
            number |= (step if index < len(weights) else 0) << place
            place += self._count + 1
        if self._options.weigh is not None:
            if not all(weight.is_integer() and weight < 1 << _WEIGHT_BITS for weight in weights):
                return number | 1
            for weight in weights:
                number |= int(weight) << place
                place += _WEIGHT_BITS + self._count
        return number

    def _summed(self, answer: Answer) -> list[tuple[Share, Sequence[float]]] | None:
        """Return the steps of a round from the answer to its roll call; ``None`` if it does not say everything."""
        count, more = self._count, answer.more
        largest = (1 << count) - 1
        if not answer.votes:
            return []
        if not self._fits or more & largest:
            return None
        ranks, has_first, more = [answer.votes], answer.first, more >> count
        for _ in range(1, self.size):
            ranks.append(more & largest)
            has_first &= bool(more >> count & 1) or not ranks[-1]
            more >>= count + 1
        if not has_first:
            return None
        sums = ranks
        if self._options.weigh is not None:
            bits = _WEIGHT_BITS + count
            sums = [more >> bits * index & (1 << bits) - 1 for index in range(self.size)]
        return [(Share(n, self._first, float(sum_)), (sum_,)) for n, sum_ in zip(ranks, sums, strict=True) if n]

    def _gathered(self, doing: str) -> list[tuple[Share, Sequence[float]]]:
        """Return the steps of a round from rows of all ranks: the number of batches, and their weights."""
        own = self._called
        row = struct.pack(f"<q{self.size}d", len(own), *own, *[0.0] * (self.size - len(own)))
        rows = [struct.unpack(f"<q{self.size}d", each) for each in self._messages.gather(row, doing)]
        shares: list[tuple[Share, Sequence[float]]] = []
        for step in range(max(int(batches) for batches, *_ in rows)):
            held = {rank: weights[step] for rank, (batches, *weights) in enumerate(rows) if step < batches}
            weights = list(held.values())
            shares.append((Share(len(held), min(held), math.fsum(weights)), weights))
        return shares

    def is_last(self, doing: str) -> bool:
        """Return whether this round is the last one, after waiting for the roll call, which remains to be read."""
        answer = self._messages.read(self._message, doing)
        return answer.votes < (self._collective.world_size if self._ends_at_first else 1)


def bits_of(options: Options, world_size: int) -> int:
    """Return the bits of a roll call; 0 if it is so long that rows follow each sum, of which none is sent then."""
    if options.window == "all":
        return 0
    count, size = world_size.bit_length(), -(-max(options.lookahead, 1) // options.window) * options.window
    weights = size * (_WEIGHT_BITS + count) if options.weigh is not None else 0
    bits = WORD + count + (size - 1) * (count + 1) + weights
    if bits == WORD + count:  # votes say everything
        return WORD
    return bits if bits <= _MOST_BITS else 0
