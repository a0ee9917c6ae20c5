"""Any loop body in lockstep on uneven loaders: :class:`Iteration`, behind ``Join.iterate``; :class:`Loops` of a block.

All ranks run the body equally often. A rank that has run out of batches gets dummies, which weigh nothing. Who has how
many, and what they weigh, is told in one roll call for every round of ``lookahead`` steps::

    rank with data                                   rank without
    --------------                                   ------------
    begin     header of the channel                  the same
              all-reduce: do all give the same       the same
              arguments? (window="all": all is read,
              all-reduce (max) of how many batches)
              read a round; roll call 0              roll call 0
              a rank has none: template (broadcast)  template
    round r   roll call r is read                    the same
              read the next; roll call r+1 starts    roll call r+1 starts
              its steps: batches                     its steps: dummies
    end       last roll call: all have come to it    the same

So nothing waits in the steady state: a roll call has a round's time to come through. A round is a multiple of the
window of accumulation, so what all batches of a window weigh is known before its first step.

A rank that leaves the loop by ``break`` waits until all others have left it at the same step::

    all leave at the same step                       a rank leaves alone
    the last of its round: roll call is read         the same
    tell that they have left; wait for all           tells that it has left; sees that others are in later steps
    the loop is over                                 raises ProtocolError, and fails by the one rule, ``join.failure``

That begins with the next thing that is announced, or with the end of the block: a generator cannot raise where it is
dropped. ``Mode.leave_broken_loop`` is :meth:`Iteration.leave`, which ends the last step (``Lockstep.end_step``), waits
for all (``Lockstep.agree_to_leave``), and changes the mode back (``Lockstep.end``, ``Channel.leave_loop``).
"""

from __future__ import annotations

import copy
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch

from join.agreement import check_same
from join.arguments import checked_weight
from join.batch import Step, StepBatch, map_tensors
from join.collectives import RollCall
from join.collectives._torch_private import profiled
from join.collectives.base import Exact, exact
from join.collectives.broken import is_broken
from join.errors import JoinError, ProtocolError, add_note, described
from join.protocol.channel import ONE_AT_A_TIME, Channel, Lockstep
from join.transfer import broadcast_tree

T = TypeVar("T")
Until: TypeAlias = Literal["all", "first"]
Dummy: TypeAlias = Literal["empty", "last"] | Callable[[Any], Any]
Window: TypeAlias = int | Literal["all"]
_WEIGHT_BITS = 64


@dataclass(frozen=True)
class Options:
    """The arguments of ``Join.iterate`` but the loader.

    Raises:
        TypeError, ValueError: for values that are none.
    """

    until: Until
    dummy: Dummy
    lookahead: int
    weigh: Callable[[Any], Any] | None
    window: Window
    fill_window: bool

    def __post_init__(self) -> None:
        if self.until not in ("all", "first"):
            raise ValueError(f"until={self.until!r} must be 'all' or 'first': the loop ends when those run out [J069]")
        if self.dummy not in ("empty", "last") and not callable(self.dummy):
            raise ValueError(
                f"dummy={self.dummy!r} must be 'empty', 'last', or a function that makes a dummy of a batch [J070]"
            )
        for name, number in {"lookahead": self.lookahead, "window": 1 if self.window == "all" else self.window}.items():
            if isinstance(number, bool) or not isinstance(number, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{name}={number!r} must be a whole number of steps [J071]")
            if number < 1:
                raise ValueError(f"{name}={number} must be at least 1 step [J072]")
        if self.weigh is not None and not callable(self.weigh):
            raise TypeError(f"weigh={self.weigh!r} must be a function that tells what a batch weighs [J465]")

    def as_text(self) -> list[str]:
        """Return the arguments that must be the same on all ranks."""
        dummy = "a function" if callable(self.dummy) else self.dummy
        weigh = "a function" if self.weigh is not None else None
        return [
            f"until={self.until}",
            f"dummy={dummy}",
            f"lookahead={self.lookahead}",
            f"weigh={weigh}",
            f"window={self.window}",
            f"fill_window={self.fill_window}",
        ]


class _Phase(Enum):
    """Where a loop is."""

    NEW = auto()
    RUNNING = auto()
    OVER = auto()
    GAVE_WAY = auto()
    """Another loop has begun in the middle of it."""


class Iteration:
    """One loop in lockstep on this rank.

    Args:
        channel: the block's.
        loader: this rank's batches.
        options: how to go over them.
        throw: whether all ranks raise as soon as one has run out.
        over_all_ranks: whether the mean is over all ranks, also those without data, where batches are not weighed.

    Raises:
        TypeError, ValueError: for arguments that are none of these.
    """

    _lockstep: Lockstep  # the mode of the loop, once it has begun
    _counts: StepCounts  # its rounds, likewise

    def __init__(
        self, channel: Channel, loader: Iterable[Any], options: Options, *, throw: bool, over_all_ranks: bool
    ) -> None:
        check_loader(loader)
        dummy = options.dummy
        mixed = [burst.mixes_ranks for _, burst in channel.roster.bursts if burst.mixes_ranks]
        if dummy == "last" and mixed:
            raise ValueError(
                f"dummy='last' would count in {mixed[0]}; give dummy='empty', or a function that makes one [J074]"
            )
        self._channel, self._guard = channel, channel.guard
        self._options, self._throw, self._over_all_ranks = options, throw, over_all_ranks
        self._rank, self._own_length = channel.collective.rank, length_of(loader)
        self.ahead = ReadAhead(loader, options.weigh)
        """The batches that were read and not handed out."""
        self._phase = _Phase.NEW
        self._template: Any = None  # what dummies are made of
        self._length: int | None = None  # of the loop, once it has begun, if all loaders have one
        self._step = 0  # counted from the beginning of the loop
        self._dummies = 0  # in how many of these steps there was no batch
        self.joined_at: float | None = None
        """When this rank ran out of batches, on the monotonic clock."""

    @property
    def running(self) -> bool:
        """Whether the loop has begun and has not come to its end."""
        return self._phase is _Phase.RUNNING

    @property
    def steps(self) -> tuple[int, int]:
        """How many steps this rank has begun with a batch, and how many with a dummy."""
        return self._step - self._dummies, self._dummies

    @property
    def is_last_step(self) -> bool:
        """Whether the step under way is the last, of all ranks."""
        if not self.running:
            return False
        counts = self._counts
        if counts.at < counts.steps:
            return False
        return counts.is_last(f"asked in step {self._step} whether it is the last")

    def __len__(self) -> int:
        if self._phase is _Phase.NEW:
            self._begin()
        if self._length is None:
            raise TypeError(
                "a loop over join.iterate has no len() where the loader of a rank has none; give one to each [J466]"
            )
        return self._length

    # -- handing out --------------------------------------------------------------------------------------------------

    def handed_out(self) -> Iterator[Any]:
        """All batches and dummies, in a generator: one is told when the loop over it is left by a ``break``."""
        try:
            while self._begin_step():
                if self._channel.late_use is not None:
                    self._channel.late_use.begin_step()
                yield self._batch() if self._channel.step.has_data else self._make_dummy()
        except GeneratorExit:
            if self.running:  # one that is kept after a break may be dropped much later
                self._lockstep.mark_broken(self.leave)  # not here, where nothing can be raised
            raise

    # The calls here find cold caches after a step's arithmetic and cost microseconds each: there are few.

    def _begin_step(self) -> bool:
        """Begin a step; whether there is one."""
        phase = self._phase
        if phase is _Phase.RUNNING:
            if not self._guard.closed:
                self._lockstep.end_step()  # what goes wrong here is known to this rank alone
        elif phase is _Phase.GAVE_WAY:
            raise JoinError(ONE_AT_A_TIME)
        elif phase is not _Phase.NEW:
            return False
        try:
            if phase is _Phase.NEW:
                self._begin()
            counts = self._counts
            if counts.at == counts.steps:
                if phase is _Phase.RUNNING:
                    counts.begin_next(f"came to step {self._step + 1} of join.iterate")
                if not counts.steps:
                    self._end()
                    return False
            if not counts.at:
                self._tell_next_round()
            if self._throw and counts.at >= counts.least:
                self._guard.raise_early_termination(exhausted=counts.own_batches <= counts.at)
            self._step += 1
            weights = self.ahead.weights
            counts.begin_step(weights[0] if weights else 0.0)  # from here on, what goes wrong goes wrong in this step
        except Exception:
            self._release()
            raise  # an interrupt, of which nobody else knows, is for the end of the block
        return True

    def _batch(self) -> Any:
        batch = self.ahead.take()
        may_be_last = self.ahead.ended and not self.ahead.batches
        counts = self._counts
        fills_after_this = counts.own_batches == counts.at < counts.steps  # although there may be batches left
        if may_be_last or fills_after_this:  # dummies are made of it, as it was before the body
            self._template = duplicate(batch)
        self._channel.step.batch = StepBatch.LAST if may_be_last else StepBatch.DATA
        return batch

    def _make_dummy(self) -> Any:
        if self.joined_at is None:
            self.joined_at = time.monotonic()
            if self._options.dummy == "empty":
                self._template = emptied(self._template)
        self._dummies += 1
        self._channel.step.batch = StepBatch.EMPTY if self._options.dummy == "empty" else StepBatch.DUMMY
        with profiled("dummy"):
            dummy = duplicate(self._template)
            make = self._options.dummy
            return make(dummy) if callable(make) else dummy

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """All ranks begin the loop, and its first round."""
        channel, options = self._channel, self._options
        self._lockstep = channel.begin_loop()
        self._phase = _Phase.RUNNING
        until_first = options.until == "first"
        try:
            lengths = check_same(
                channel.collective, "join.iterate", options.as_text(), self._guard.wait, self._own_length
            )
        except ProtocolError as error:
            self._guard.raise_on_all(error)
        window = self._read_all() if options.window == "all" else options.window
        windows = Windows(window, options.fill_window, options.weigh is not None, self._over_all_ranks)
        if lengths is not None:
            self._length = lengths[0] if until_first or self._throw else lengths[1]
            if options.fill_window:
                self._length = -(-self._length // window) * window
        size = -(-options.lookahead // window) * window
        counts = self._counts = StepCounts(
            channel, self._lockstep, size, windows, until_first=until_first and not self._throw
        )
        channel.scaling.begin_loop(self._why_scale())
        self._tell_next_round()
        counts.begin_next("came to step 1 of join.iterate")
        if counts.least == 0 < counts.steps and not self._throw:
            self._share_template()

    def _read_all(self) -> int:
        """Read all batches: one window, of as many steps as the rank with most has."""
        count = torch.tensor([self.ahead.read(sys.maxsize)], device="cpu")
        self._guard.wait(self._channel.collective.all_reduce(count, "max"), "has read all its batches")
        return max(int(count), 1)

    def _why_scale(self) -> str:
        """Why the loop has to scale its losses, if it has to."""
        if self._options.weigh is not None:
            return "weigh= is given"
        if self._options.window != 1:
            return f"window={self._options.window!r} is given"
        names = [member.joinable.join_name for member in self._channel.roster.listed if member.joinable.needs_scale]
        return f"nothing else weighs the gradients of {names[0]}" if names else ""

    def _tell_next_round(self) -> None:
        ahead, held = self.ahead, self._counts.held  # for the round that begins
        ahead.read(self._counts.size - (len(ahead.batches) - held))
        weights = list(ahead.weights)[held:]
        if ahead.error is not None:
            raise ahead.error
        self._counts.call(weights)

    def _share_template(self) -> None:
        """Ranks that never had a batch get one from the lowest that has: empty if that is all that is wanted."""
        counts = self._counts
        source = counts.first_with_data
        own = self._own_template(source) if self._rank == source else None
        try:
            template, problem = broadcast_tree(self._channel.collective, own, source, self._channel.roster.devices())
        except (RuntimeError, TypeError) as error:
            if is_broken(error):
                raise  # another rank is gone
            raise JoinError(
                f"ranks without data need a dummy, and the first batch of rank {source} does not reach them ({error});"
                " hand out plain tensors in lists, tuples or dicts, and build the rest in the loop's body [J066]"
            ) from error
        if problem is not None:
            self._guard.raise_on_all(problem)
        if not counts.own_batches:
            self._template = template

    def _own_template(self, rank: int) -> tuple[Any, JoinError | None]:
        """This rank's first batch, or an empty one made of it; or what to raise because there is none."""
        first = self.ahead.batches[0]
        try:
            return emptied(first) if self._options.dummy == "empty" else first, None
        except Exception as error:
            return None, JoinError(
                f"ranks without data need a dummy, and rank {rank} cannot make one of its first batch"
                f" ({described(error)}); give join.iterate(..., dummy=function) a function that makes one [J067]"
            )

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Hold the last roll call: no rank has a batch left, or, under ``until="first"``, one has none."""
        self._counts.call(())
        self._counts.read("came to the end of join.iterate")
        self._lockstep.end()
        self._phase, self.ahead.is_used_up = _Phase.OVER, True
        self._release()

    def leave(self, *, gives_way: bool = False) -> None:
        """Leave the loop before its end, as all ranks must at this step.

        Args:
            gives_way: whether that is because another loop begins, so that going on with this one is an error.

        Raises:
            ProtocolError: if not all have.
            PeerError: if another rank has failed.
        """
        counts, lockstep = self._counts, self._lockstep
        self._phase = _Phase.GAVE_WAY if gives_way else _Phase.OVER
        lockstep.return_to_body()
        try:
            if self._guard.closed:
                return  # nothing can be told any more
            lockstep.end_step()
            if not self._channel.step.ends_window:
                raise JoinError(
                    f"the loop over join.iterate was left in step {self._step}, inside a window of accumulation, whose"
                    " other steps are missing; leave it if join.ends_window [J467]"
                )
            self._channel.complete_followers()
            lockstep.progress.has_left = True
            if counts.at == counts.steps:
                counts.begin_next(f"left join.iterate in step {self._step}")
                if not counts.steps:  # this step was the last
                    self._end()
                    return
            lockstep.agree_to_leave()
            lockstep.end()
        finally:
            self._release()

    def fail(self, error: BaseException) -> None:
        """End the loop on this rank alone, which leaves the block with ``error``."""
        if isinstance(error, Exception) and self._channel.step.batch is StepBatch.EMPTY:
            hint_at_empty_batch(error)
        self._lockstep.return_to_body()
        self._release()

    def _release(self) -> None:
        if self._phase is not _Phase.GAVE_WAY:
            self._phase = _Phase.OVER
        self._template = None
        self.ahead.close()


def check_loader(loader: Any) -> None:
    """Raise a ``TypeError`` for what cannot be iterated."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"loader={loader!r} cannot be iterated; give a DataLoader, a list or a generator [J068]")
    if getattr(loader, "__name__", "") == "log_every":  # the generator of a MetricLogger, wherever that is from
        #: Write ``log_every(join.iterate(loader))``.
        raise TypeError("log_every(...) would log each batch before the loop's body; put it around join.iterate [J524]")


# -- rounds ------------------------------------------------------------------------------------------------------------


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


# -- reading ahead -----------------------------------------------------------------------------------------------------


def length_of(loader: Iterable[Any]) -> int | None:
    """How many batches a loader has, if it tells."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):  # a DataLoader raises what its data set or sampler does
        return None


class ReadAhead:
    """The batches of one rank that were read and are not yet used.

    A loader with ``state_dict`` is asked for its state after each batch that is read, since it cannot tell later where
    it was.

    Args:
        loader: what can be iterated.
        weigh: tells what a batch weighs; ``None`` is 1.
    """

    def __init__(self, loader: Iterable[Any], weigh: Callable[[Any], Any] | None) -> None:
        self._loader: Iterable[Any] | None = loader
        self._name = type(loader).__name__
        self._source: Iterator[Any] = iter(loader)
        self.ended = False
        """Whether the loader has no batches beyond those read."""
        self.batches: deque[Any] = deque()
        """The batches that were read and are not yet used, the oldest first."""
        self.weights: deque[float] = deque()
        """What they weigh."""
        self._weigh = weigh
        self.error: BaseException | None = None
        """What the loader raised, or interrupted it; it is not asked again."""
        self.is_used_up = False
        """Whether the loop has come to its end, on all ranks."""
        self._has_state = callable(getattr(loader, "state_dict", None))
        self._states: deque[Any] = deque()  # of the loader, after each of these batches
        self._state_at_end: Any = None
        if self._has_state:
            self._state = self._state_now()  # after the batch that was taken last

    def close(self) -> None:
        """Let go of the loader, whose workers can end; what was read stays."""
        self.ended, self._loader, self._source = True, None, iter(())

    def read(self, wanted: int) -> int:
        """Read up to ``wanted`` more batches; how many there were."""
        for count in range(wanted):
            if self.ended:
                return count
            try:
                batch = next(self._source, self)
                if batch is self:  # there is no other
                    self.ended = True
                    if self._has_state:
                        self._state_at_end = self._state_now()
                    return count
                weight = 1.0 if self._weigh is None else checked_weight(self._weigh(batch), "weigh(batch)")
                if self._has_state:
                    self._states.append(self._state_now())
                self.batches.append(batch)
                self.weights.append(weight)
            except BaseException as error:  # also Ctrl-C: here most of it comes, and the others have to be told
                self.ended, self.error = True, error
                return count
        return wanted

    def take(self) -> Any:
        """The next batch."""
        self.weights.popleft()
        if self._has_state:
            self._state = self._states.popleft()
        return self.batches.popleft()

    def loader_state(self) -> Any:
        """The loader's state as of the batch that was taken last.

        At the end of the loop, if the loader has no more, it is the one that it ends with, in which many begin anew.

        Raises:
            TypeError: if the loader has no ``state_dict``.
            JoinError: if that has raised.
        """
        if not self._has_state:
            raise TypeError(
                f"join.loader_state() needs a loader with state_dict and load_state_dict, and {self._name} has none;"
                " use torchdata's StatefulDataLoader, or count the batches that were handed out [J075]"
            )
        has_ended = self.is_used_up and self._state_at_end is not None and not self.batches
        state = self._state_at_end if has_ended else self._state
        if isinstance(state, _NoState):
            raise JoinError(f"state_dict of {self._name} has raised; see the exception above [J076]") from state.error
        return state

    def _state_now(self) -> object:
        """A copy, since a loader may hand out what it goes on to change."""
        try:
            return copy.deepcopy(cast("Any", self._loader).state_dict())
        except Exception as error:  # it matters only to who asks for the state
            return _NoState(error)


class _NoState:
    """In the place of a state: why there is none."""

    def __init__(self, error: Exception) -> None:
        self.error = error


# -- dummies ----------------------------------------------------------------------------------------------------------


def emptied(batch: Any) -> Any:
    """Return ``batch`` with no samples in it: every tensor that has dimensions has length 0 along its first one.

    What else is in it stays as it is. No memory of the batch is held.
    """
    # A slice alone would keep the storage, and the graph of what the body has made of the batch.
    return map_tensors(_without_rows, batch)


def _without_rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    return tensor.detach()[:0].clone().requires_grad_(tensor.requires_grad)


def duplicate(batch: Any) -> Any:
    """The batch in new containers, with the same tensors, so that a loop body may change the containers it gets."""
    try:
        return map_tensors(lambda tensor: tensor, batch)
    except Exception:  # of a container that cannot be built anew; then it is that one
        return batch


def hint_at_empty_batch(error: BaseException) -> None:
    """Add to an ``error`` of a loop's body that its batch was an empty one, and the way out."""
    add_note(
        error,
        "This rank had run out of batches and got an empty one. If the loop's body cannot take it, give dummies with"
        " samples: join.iterate(loader, dummy='last')",
    )


# -- the loops of a block ---------------------------------------------------------------------------------------------


class LoopAlone:
    """A loop in a block with ``enable=False``; a window is read ahead, and one batch, so that the last one is known.

    Args:
        loader: this rank's batches.
        options: how to go over them; ``until``, ``dummy``, ``lookahead`` and ``fill_window`` have no meaning here.
        world_size: the number of ranks, which are taken to have the same.
    """

    def __init__(self, loader: Iterable[Any], options: Options, world_size: int) -> None:
        check_loader(loader)
        self._loader, self._window, self._world_size = loader, options.window, world_size
        self.ahead = ReadAhead(loader, options.weigh)
        self.step: Step | None = None
        """The step under way, if the loop is."""
        self.is_last_step = False
        """Whether the batch that was handed out last is the last one."""

    def handed_out(self) -> Generator[Any]:
        """The batches."""
        ahead, number, window = self.ahead, 0, self._window
        size = window if isinstance(window, int) else max(ahead.read(sys.maxsize), 1)
        try:
            while True:
                ahead.read(size + 1 - len(ahead.batches))
                weights = list(ahead.weights)[:size]
                total = sum(weights) * self._world_size
                for place, weight in enumerate(weights, 1):
                    number += 1
                    self.step = Step(number, weight=weight, total=total, ends_window=place == len(weights))
                    self.is_last_step = len(ahead.batches) == 1 and ahead.error is None
                    yield ahead.take()
                if not ahead.batches:
                    break
            if ahead.error is not None:
                raise ahead.error
            ahead.is_used_up = True
        finally:
            self.step, self.is_last_step = None, False
            ahead.close()

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]


class Batches(Iterable[T], Generic[T]):
    """What ``Join.iterate`` returns: the batches of one loop, once; ``len`` is the number of steps of all ranks."""

    def __init__(self, loop: Iteration | LoopAlone) -> None:
        self._loop: Iteration | LoopAlone = loop
        self._batches: Iterator[T] | None = loop.handed_out()

    def __iter__(self) -> Iterator[T]:
        # Nothing else may hold the generator: it is told of a ``break`` when it is dropped.
        batches, self._batches = self._batches, None
        return iter(()) if batches is None else batches

    def __len__(self) -> int:
        return len(self._loop)


class Loops:
    """The last loop of a block, and the steps of all."""

    def __init__(self) -> None:
        self.last: Iteration | LoopAlone | None = None
        """The one that began last, if any."""
        self._before = (0, 0)  # the steps of those before it

    def begin(self, loop: Iteration | LoopAlone) -> Batches[Any]:
        """Begin another loop, and return its batches."""
        self._before, self.last = self.steps, loop
        return Batches(loop)

    @property
    def running(self) -> Iteration | None:
        """The loop that has begun on all ranks, and has not come to its end."""
        last = self.last
        return last if isinstance(last, Iteration) and last.running else None

    @property
    def joined_at(self) -> float | None:
        """When this rank ran out of batches in the last loop, on the monotonic clock."""
        return self.last.joined_at if isinstance(self.last, Iteration) else None

    @property
    def steps(self) -> tuple[int, int]:
        """How many steps this rank has begun with a batch, and with a dummy."""
        (batches, dummies), last = self._before, self.last
        return (batches + last.steps[0], dummies + last.steps[1]) if isinstance(last, Iteration) else self._before
