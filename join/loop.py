"""Loops over ``Join.iterate``, in lockstep on uneven loaders: :class:`Loop` and its parts.

All ranks run the loop body the same number of times, so the body may contain any collectives. A rank that is out of
data gets dummy batches, which weigh nothing. The file has four parts, to be read in this order:

- :class:`Loop` is one loop on one rank, and the result of ``Join.iterate``. It yields batches and dummy batches, and
  begins and ends the loop.
  :class:`Options` are the arguments of ``Join.iterate``.
- :class:`Rounds` holds the rounds of a loop. A round is ``lookahead`` steps, rounded up to a multiple of the
  accumulation window. In one roll call for each round, every rank announces how many batches it has and their weights,
  and how many operations it has started on the group, which should be equal (``join.protocol.progress``).
- :class:`ReadAhead` reads the batches of the next round, and :func:`emptied` makes an empty dummy batch of a batch.

In a block with ``enable=False`` a loop is the same, over a collective of this rank alone, which sends nothing. Other
ranks are then assumed to have the same batches.

These are the collectives of a loop::

    rank with data                                   rank without data
    --------------                                   -----------------
    begin     header of the channel                  the same
              all-reduce: do all ranks pass the      the same
              same arguments? (window="all": read
              all batches, all-reduce (max) of
              their number)
              read a round; roll call 0              roll call 0
              a rank has no batch: template          template
              (broadcast)
    round r   wait for roll call r                   the same
              a rank has started other operations:   the same
              meet
              read the next; roll call r+1 starts    roll call r+1 starts
              its steps: batches                     its steps: dummy batches
              the lowest rank with data is another   the same
              than before: wait for all ranks;
              hand_over of each burst
    end       last roll call: all reached the end    the same
              all-reduce (min): digests of values    the same
              that should be equal
              broadcasts of tensors that each rank   the same
              has for itself
              synchronise_own of each joinable       the same

In the steady state no rank waits, because a roll call has the time of a whole round to complete. A round contains whole
accumulation windows, so the total weight of a window is known before its first step.

A rank that leaves the loop by ``break`` waits until all other ranks have left it in the same step::

    all leave in the same step                       a rank leaves alone
    --------------------------                       -------------------
    last step of a round: wait for the roll call     the same
    note that they have left; wait for all           notes that it has left; sees others in later steps
    the loop ends, as above from the digests on      raises ProtocolError, and fails as any rank does (``join.failure``)

This begins with the next announcement, forward or backward of a listed module, or at the end of the block, because a
generator cannot raise an exception when it is dropped. :meth:`Loop.leave` then ends the last step
(``Lockstep.end_step``), waits for all ranks (``Lockstep.agree_to_leave``) and ends the loop (``Lockstep.end``).
"""

from __future__ import annotations

import copy
import itertools
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from typing_extensions import override

from join.agreement import check_same
from join.arguments import checked_weight
from join.batch import PLAIN, Step, map_tensors
from join.collectives._torch_private import profiled
from join.collectives.broken import is_broken
from join.collectives.plain import Exact, as_exact, exact
from join.errors import JoinError, ProtocolError, add_note, described
from join.protocol.channel import ONE_AT_A_TIME, Channel, Lockstep, Phase
from join.transfer import broadcast_tree

T = TypeVar("T")
_WEIGHT_BITS, _ISSUED_BITS = 64, 16
_ARGUMENTS = 6  # of Join.iterate, among the fields of Options
_WEIGHT_OF = itemgetter(1)  # of an item of ReadAhead.held
_WINDOW_NUMBERS = itertools.count(1)  # modules remember the number of a window from one block to the next


@dataclass(frozen=True)
class Options:
    """Arguments of ``Join.iterate`` without the loader, and settings of its block.

    Attributes:
        throw: Whether all ranks raise an exception as soon as one is out of data.
        over_all_ranks: Whether gradients are a mean over all ranks, including those without data. It has no effect if
            batches are weighed.
        copies: The number of ranks that are assumed to have the same batches as each rank of the loop.

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
    throw: bool = False
    over_all_ranks: bool = True
    copies: int = 1

    def __post_init__(self) -> None:
        if self.until not in ("all", "first"):
            raise ValueError(
                f"until={self.until!r} is not a valid value. Pass 'all' to loop until all ranks are out of data, or"
                " 'first' to stop as soon as one is. [J069]"
            )
        if self.dummy not in ("empty", "last") and not callable(self.dummy):
            raise ValueError(
                f"dummy={self.dummy!r} is not a valid value. Pass 'empty', 'last', or a function that returns a dummy"
                " batch for a batch. [J070]"
            )
        for name, number in {"lookahead": self.lookahead, "window": 1 if self.window == "all" else self.window}.items():
            if isinstance(number, bool) or not isinstance(number, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"{name}={number!r} is not a whole number of steps. Pass an integer of 1 or more. [J071]"
                )
            if number < 1:
                raise ValueError(f"{name}={number} is less than one step. Pass an integer of 1 or more. [J072]")
        if self.weigh is not None and not callable(self.weigh):
            raise TypeError(
                f"weigh={self.weigh!r} is not a function. Pass a function that returns the weight of a batch, such as"
                " its number of samples. [J465]"
            )

    def to_compare(self) -> list[str]:
        """Return texts of the arguments, which must be equal on all ranks; functions are not distinguished."""
        arguments = list(vars(self).items())[:_ARGUMENTS]
        return [f"{name}={'a function' if callable(value) else value}" for name, value in arguments]


class Loop(Lockstep, Iterable[T]):
    """One loop in lockstep, on this rank: an iterable over its batches, once.

    Its ``len`` is the number of steps that all ranks make.

    Args:
        channel: The protocol of the block's process group.
        loader: The batches of this rank.
        options: The other arguments of ``Join.iterate``.

    Raises:
        TypeError: If the loader cannot be iterated.
        ValueError: If the dummy batches would count in a listed module.
    """

    on_begin: Callable[[Loop[Any]], None]
    """Called when the loop begins, before anything is sent; set by the ``Join`` of the loop."""
    _rounds: Rounds  # set when the loop begins

    def __init__(self, channel: Channel, loader: Iterable[T], options: Options) -> None:
        mixed = [burst.mixes_ranks for _, burst in channel.roster.bursts if burst.mixes_ranks]
        if options.dummy == "last" and mixed:
            raise ValueError(
                f"dummy='last' would count in {mixed[0]}. Pass dummy='empty', or a function that returns a batch"
                " without samples. [J074]"
            )
        super().__init__(channel)
        self._options, self._own_length = options, length_of(loader)
        self.ahead = ReadAhead(loader, options.weigh)
        """Batches that were read and not yielded."""
        self._template: Any = None  # the batch that dummies are made of
        self._length: int | None = None  # the number of steps, once the loop has begun, if all loaders have a length
        self.joined_at: float | None = None
        """Time of this rank's first step without data, on the monotonic clock."""

    @property
    def running(self) -> bool:
        """Whether the loop has begun and not ended."""
        return self.phase in (Phase.RUNNING, Phase.LEFT)

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one, on all ranks."""
        if self.phase is not Phase.RUNNING or not self.step.number or self._rounds.begun < self._rounds.steps:
            return False
        return self.ahead.error is None and self._rounds.is_last(
            f"asked in step {self.step.number} whether it is the last"
        )

    def __len__(self) -> int:
        if self.phase is Phase.NEW:
            self._begin()
        return _known(self._length)

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def __iter__(self) -> Iterator[T]:
        # No other reference to the generator may remain, because Python closes it after a ``break`` when it is dropped.
        try:
            while self._begin_step():
                if self.channel.late_use is not None:
                    self.channel.late_use.begin_step()
                yield self._make_dummy() if self.step.shadowing else self._next_batch()
        finally:
            if self.phase is Phase.RUNNING:  # after a break, or an error that the block may handle
                self.mark_left()  # it leaves later, because an exception here would be lost

    # After a step's arithmetic the caches are cold, and each call here costs microseconds. So there are few calls.

    def _begin_step(self) -> bool:
        """Begin the next step; return whether there is one."""
        phase = self.phase
        if phase is Phase.RUNNING:
            if not self._guard.closed:
                self.end_step()  # not below: an error in the step is handled at the end of the block
        elif phase is Phase.SUPERSEDED:
            raise JoinError(ONE_AT_A_TIME)
        elif phase is not Phase.NEW:
            return False
        if phase is Phase.NEW:
            self._begin()
        rounds = self._rounds
        if rounds.begun == rounds.steps:
            if self.step.number:
                rounds.begin_round(f"reached step {self.step.number + 1} of join.iterate")
            if not rounds.steps:
                if self.ahead.error is not None:
                    raise self.ahead.error
                self._end()
                return False
        if not rounds.begun:
            self._call_next_round()
        if self._options.throw and rounds.begun >= rounds.fewest:
            self._guard.raise_early_termination(exhausted=rounds.own_batches <= rounds.begun)
        self._enter_step()
        return True

    def _enter_step(self) -> None:
        channel, progress, held = self.channel, self.progress, self.ahead.held
        progress.steps += 1
        if self._guard.timeout is not None:
            self.wait_for_all(f"reached step {progress.steps} of join.iterate")
        if self._guard.closed:
            self._guard.raise_closed()
        step = self._rounds.next_step(self.step, held[0][1] if held else 0.0)
        self.step = channel.step = step  # from here on, an error belongs to this step
        if not step.contributors:
            return
        before, self.last_with_data = self.last_with_data, step
        if before is PLAIN or step.first_with_data != before.first_with_data:
            if before is not PLAIN:  # a rank that skipped a part of the step before is found here, not in hand_over
                self.wait_for_all(f"began step {step.number} of join.iterate")
            channel.headers.leader = step.first_with_data
            for _, burst in channel.roster.bursts:
                burst.hand_over(step.first_with_data)

    def _next_batch(self) -> Any:
        ahead, rounds = self.ahead, self._rounds
        batch, _, ahead.state = ahead.held.popleft()
        self.step.may_be_last = may_be_last = ahead.ended and not ahead.held
        # Dummies may follow in this round even if the loader has more batches.
        dummies_follow = rounds.own_batches == rounds.begun < rounds.steps
        if may_be_last or dummies_follow:  # dummies are made of this batch as it was before the loop body
            self._template = self._make_template(batch)
        self.channel.headers.tally.batches += 1
        return batch

    def _make_dummy(self) -> Any:
        if self.joined_at is None:
            self.joined_at = time.monotonic()
        self.channel.headers.tally.dummies += 1
        with profiled("dummy"):
            dummy = self._make_template(self._template)  # another copy, since the loop body may change it
            if isinstance(dummy, JoinError):
                raise dummy
            make = self._options.dummy
            self.step.is_empty = make == "empty"
            return make(dummy) if callable(make) else dummy

    def _make_template(self, batch: Any) -> Any:
        """Return a copy of ``batch`` of which dummies are made, emptied if these are empty, or the error if that fails.

        The function that makes dummies may know how to copy a batch, so it receives the batch itself then.
        """
        try:
            return map_tensors(_without_rows if self._options.dummy == "empty" else copied, batch)
        except Exception as error:
            if callable(self._options.dummy):
                return batch
            return JoinError(
                f"Ranks without data need a dummy batch, but rank {self.channel.collective.rank} cannot make one of its"
                f" own batch ({described(error)}). Pass join.iterate(..., dummy=function) with a function that makes"
                " one. [J067]"
            )

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the loop and its first round, with all ranks."""
        self.on_begin(self)
        del self.on_begin  # which refers to the Join, which refers to this loop
        channel, options = self.channel, self._options
        self.begin()
        try:
            lengths = check_same(
                channel.collective, "join.iterate", options.to_compare(), self._guard.wait, self._own_length
            )
        except ProtocolError as error:
            self._guard.close_and_raise(error)
        window = self._read_all() if options.window == "all" else options.window
        if lengths is not None:
            self._length = lengths[0] if options.until == "first" or options.throw else lengths[1]
            if options.fill_window:
                self._length = -(-self._length // window) * window
        rounds = self._rounds = Rounds(self, options, window)
        channel.scaling.begin_loop(self._reason_to_scale())
        self._call_next_round()
        rounds.begin_round("reached step 1 of join.iterate")
        if rounds.fewest == 0 < rounds.steps and not options.throw:
            self._share_template()

    def _read_all(self) -> int:
        """Read all batches; return the size of the single window: the largest number of batches on a rank."""
        count = torch.tensor([self.ahead.read(sys.maxsize)], device="cpu")
        self._guard.wait(self.channel.collective.all_reduce(count, "max"), "has read all its batches")
        return max(int(count), 1)

    def _reason_to_scale(self) -> str:
        """Return the reason for which the loop must scale its losses, as a clause; ``""`` if it need not."""
        if self._options.weigh is not None:
            return "join.iterate was called with a weigh function"
        if self._options.window != 1:
            return f"join.iterate was called with window={self._options.window!r}"
        listed = [member.joinable for member in self.channel.roster.listed]
        names = [each.join_name for each in listed if each.needs_scale or each.mixes_ranks]
        return f"nothing else weighs the gradients of {names[0]}" if names else ""

    def _call_next_round(self) -> None:
        """Read the batches of the next round, and start the roll call that announces them."""
        ahead, held = self.ahead, self._rounds.held  # held for the current round
        if not ahead.ended:
            ahead.read(self._rounds.size - (len(ahead.held) - held))
        weights = list(map(_WEIGHT_OF, ahead.held))[held:]
        if ahead.error is not None and self.channel.collective.world_size > 1:
            self._guard.fail(ahead.error)  # now, since others wait for this rank, even if the block handles the error
            raise ahead.error  # a rank alone first yields the batches before it
        self._rounds.call(weights)

    def _share_template(self) -> None:
        """Send a batch from the lowest rank with data to ranks that never had one; an empty one for empty dummies."""
        channel, source = self.channel, self._rounds.first_with_data
        own = self._make_template(self.ahead.held[0][0]) if channel.collective.rank == source else None
        try:
            template = broadcast_tree(channel.collective, own, source, channel.roster.devices())
        except (RuntimeError, TypeError) as error:
            if is_broken(error):
                raise  # because another rank is gone, whatever the batch is
            raise JoinError(
                f"Ranks without data need a dummy batch, but the first batch of rank {source} cannot be sent to them"
                f" ({error}). Yield plain tensors in lists, tuples or dicts from the loader, and build other objects in"
                " the loop body. [J066]"
            ) from error
        if isinstance(template, JoinError):
            self._guard.close_and_raise(template)
        if not self._rounds.own_batches:
            self._template = template

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """End the loop with a last roll call. No rank has a batch left; under ``until="first"``, one has none."""
        self._rounds.call(())
        self._rounds.begin_round("reached the end of join.iterate")
        self.end()
        self.phase = Phase.OVER
        self.ahead.end()
        self._release()

    @override
    def leave(self, *, superseded: bool = False) -> None:
        """Leave the loop before its end, as all ranks must in this step.

        Args:
            superseded: Whether another loop begins, so that continuing this one is an error.

        Raises:
            JoinError: If the loop was left inside an accumulation window.
            ProtocolError: If this rank leaves alone.
            PeerError: If another rank failed.
        """
        step = self.step
        self.phase = Phase.SUPERSEDED if superseded else Phase.OVER
        self.channel.step = step  # which may be the step that this rank left by a break
        try:
            if self._guard.closed:
                return  # because nothing can be sent after a failure
            self.end_step()
            if not step.ends_window:
                error = JoinError(
                    f"The loop over join.iterate was left in step {step.number}, inside an accumulation window whose"
                    " other steps are missing. Leave the loop only if join.ends_window is True. [J467]"
                )
                self._guard.fail(error)  # posted, since this rank may have left the loop alone
                self._guard.close_and_raise(error)
            self.channel.complete_followers()
            self.progress.has_left = True
            rounds = self._rounds
            if rounds.begun == rounds.steps:
                rounds.begin_round(f"left join.iterate in step {step.number}")
                if not rounds.steps:  # this step was the last of all ranks, so the loop ends as without a break
                    self._end()
                    return
            self.agree_to_leave()
            self.end()
        finally:
            self._release()

    def close(self, error: BaseException | None) -> None:
        """End the loop, if it has begun and not ended, at the end of its block.

        Args:
            error: The exception with which this rank leaves the block, if any. The loop ends on this rank only then.

        Raises:
            JoinError: As :meth:`leave` does.
        """
        if not self.running:
            return
        if error is None:
            return self.leave()
        self.phase, self.channel.step = Phase.OVER, self.step
        if self.step.shadowing and not isinstance(error, JoinError):
            note = f"This rank was out of data and got a dummy batch (dummy={self._options.dummy!r})."
            if self._options.dummy == "empty":
                note += " A mean over no samples is NaN. If the body cannot process an empty batch, pass dummy='last'."
            note += " Check a loss only if join.shadowing is False"
            add_note(error, note)
        self._release()

    def _release(self) -> None:
        self._template = None
        self.ahead.close()


def check_loader(loader: Any) -> None:
    """Raise a ``TypeError`` if a loader cannot be iterated, or would run code of the loop body too early."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"loader={loader!r} cannot be iterated. Pass a DataLoader, a list or a generator. [J068]")
    if getattr(loader, "__name__", "") == "log_every":  # by its name, since every project has its own MetricLogger
        raise TypeError(
            "log_every(...) would log each batch before the loop body runs. Write log_every(join.iterate(loader))."
            " [J524]"
        )


# -- rounds ------------------------------------------------------------------------------------------------------------


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
    """Fold of a roll call.

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

    def restored(self, result: list[Any], /) -> Answers:
        """Return answers after a message."""
        issued, shares = result
        return Answers(issued, [Share(ranks, first, as_exact(weight)) for ranks, first, weight in shares])


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
        self._shares: Sequence[Share] = ()  # those of its steps that are made
        self._called = 0  # the number of batches that this rank announced for the next round
        self.held = 0
        """Number of batches that this rank has for this round."""
        self.own_batches = 0
        """Number of these batches that are trained on."""
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
        if self._lockstep.step.shadowing:
            self._tally.idle += time.monotonic() - started
        if answers.issued is None:  # a rank may have skipped a collective, for which the others wait at last
            self._lockstep.meet()
        self.begun = 0
        self.held, self._called = self._called, 0
        if answers is not self._answers:  # a roll call returns the same object while its answers stay the same
            self._answers = answers
            self._plan_round()
        self.own_batches = min(self.held, len(self._shares))

    @property
    def fewest(self) -> int:
        """Smallest number of batches that any rank has in this round."""
        return sum(share.ranks == self._world_size for share in self._shares)

    @property
    def first_with_data(self) -> int:
        """Lowest rank that has a batch in this round."""
        return self._shares[0].first

    def _steps_to_make(self, answers: Answers) -> Sequence[Share]:
        """Return the shares of the steps to make: under ``until="first"``, only steps where all ranks have a batch."""
        if self._options.until == "all" or self._options.throw:  # which ends the loop earlier, with an error
            return answers.shares
        return [share for share in answers.shares if share.ranks == self._world_size]

    def _plan_round(self) -> None:
        """Compute the number of steps of the round, and the total weight of each of its windows."""
        window, shares = self._window, self._steps_to_make(self._answers)
        self._shares, self.steps = shares, len(shares)
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
        self.begun, shadowing = index + 1, index >= self.own_batches
        step = Step(in_loop=True, number=before.number + 1, shadowing=shadowing, first_with_data=before.first_with_data)
        step.weight, step.total = 0.0 if shadowing else weight, self._totals[index // self._window]
        step.window = next(_WINDOW_NUMBERS) if before.ends_window else before.window
        step.ends_window = self.begun % self._window == 0 or self.begun == self.steps
        if index < len(self._shares):  # if not, the step only fills a window
            step.contributors, step.first_with_data, _ = self._shares[index]
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


# -- reading ahead -----------------------------------------------------------------------------------------------------


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches of a loader, or ``None`` if it has no length."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):  # a DataLoader raises the error of its data set or sampler
        return None


def _known(length: int | None) -> int:
    if length is None:
        raise TypeError(
            "A loop over join.iterate has no len() because the loader of a rank has none. Pass a loader with a length"
            " on every rank. [J466]"
        )
    return length


class ReadAhead:
    """Batches of one rank that were read and not yet used.

    A loader with ``state_dict`` is asked for its state after each batch, because it has no record of earlier states.

    Args:
        loader: Any iterable of batches.
        weigh: A function that returns the weight of a batch; with ``None``, every batch weighs 1.
    """

    def __init__(self, loader: Iterable[Any], weigh: Callable[[Any], Any] | None) -> None:
        self._loader: Iterable[Any] | None = loader
        self._name = type(loader).__name__
        self._source: Iterator[Any] = iter(loader)
        self.ended = False
        """Whether the loader has no batches beyond those read."""
        self.held: deque[tuple[Any, float, Any]] = deque()
        """Batches that were read and not yet used, the oldest first; each with its weight, and the loader's state after
        it if the loader has one."""
        self._weigh = weigh
        self.error: BaseException | None = None
        """Exception or interrupt of the loader, which is not asked for batches again."""
        self._has_state = callable(getattr(loader, "state_dict", None))
        self._state_at_end: Any = None
        self.state = self._copy_state() if self._has_state else None
        """The loader's state after the batch that was taken from ``held`` last."""

    def end(self) -> None:
        """Record that the loop has ended on all ranks, so that the final state of the loader counts."""
        if self._state_at_end is not None and not self.held:
            self.state = self._state_at_end

    def close(self) -> None:
        """Release the loader, so that its workers can end, and keep the batches that were read."""
        self.ended, self._loader, self._source = True, None, iter(())

    def read(self, wanted: int) -> int:
        """Read up to ``wanted`` more batches; return how many there were."""
        for count in range(wanted):
            if self.ended:
                return count
            try:
                batch = next(self._source, self)
                if batch is self:  # the default of next(), so the loader has no more batches
                    self.ended = True
                    if self._has_state:
                        self._state_at_end = self._copy_state()
                    return count
                weight = 1.0 if self._weigh is None else checked_weight(self._weigh(batch), "weigh(batch)")
                self.held.append((batch, weight, self._copy_state() if self._has_state else None))
            except BaseException as error:  # even Ctrl-C, which usually arrives here, so that other ranks get it
                self.ended, self.error = True, error
                return count
        return wanted

    def loader_state(self) -> Any:
        """Return the loader's state as of the batch that was taken last.

        Once the loop has ended and all batches were taken, this is the loader's final state. From its final state, a
        loader usually begins its next epoch.

        Raises:
            TypeError: If the loader has no ``state_dict``.
            JoinError: If ``state_dict`` raised an exception.
        """
        if not self._has_state:
            raise TypeError(
                f"join.loader_state() needs a loader with state_dict and load_state_dict, but {self._name} has no"
                " state_dict. Use torchdata's StatefulDataLoader, or count the batches in your loop. [J075]"
            )
        if isinstance(self.state, Exception):
            raise JoinError(
                f"The state_dict of {self._name} raised an exception. Fix the cause shown above. [J076]"
            ) from self.state
        return self.state

    def _copy_state(self) -> object:
        """Return a copy of the loader's state, since the loader may change the object; or the exception it raised."""
        try:
            return copy.deepcopy(cast("Any", self._loader).state_dict())
        except Exception as error:  # raised only if the user asks for the state
            return error


# -- dummies ----------------------------------------------------------------------------------------------------------


def emptied(batch: Any) -> Any:
    """Return a copy of ``batch`` without samples: tensors with dimensions have length 0 along the first one.

    Other objects in the batch stay as they are. The copy holds no memory of the tensors.
    """
    return map_tensors(_without_rows, batch)


def _without_rows(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor[:0] if tensor.dim() else tensor  # a mere slice would keep the storage of the tensor
    return rows.detach().clone().requires_grad_(tensor.requires_grad)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a batch's tensor, because a loop body may change it; without its autograd graph and storage."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
