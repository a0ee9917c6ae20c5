"""Loops over ``Join.iterate``, in lockstep on uneven loaders: :class:`Loop` and its parts.

All ranks run the loop body the same number of times, so the body may contain any collectives. A rank that is out of
data gets dummy batches, which weigh nothing. The parts of a loop:

- :class:`Loop` is one loop on one rank. It yields batches and dummy batches, and begins and ends the loop.
  ``Lockstep``, in ``join.protocol.channel``, is its protocol.
- :class:`Batches` is the result of ``Join.iterate``: an iterable over a loop, with the attributes of the loader.
- ``join.rounds`` announces the batches of several steps at a time, and adds up their weights. It has the arguments of
  ``Join.iterate``.
- ``join.read_ahead`` reads the batches of the next round.

In a block with ``enable=False`` a loop is the same, over a collective of this rank alone, which sends nothing. Other
ranks are then assumed to have the same batches.

These are the collectives of a loop::

    rank with data                                   rank without data
    --------------                                   -----------------
    begin     header of the channel                  the same
              message: do all ranks pass the same    the same
              arguments, and know their length?
              if so: rows, the lengths               the same
    step 1    window="all": read all batches,        message, rows
              message, rows with their number
              read a round; roll call 0              roll call 0
              a rank has no batch: template          template
              (broadcast)
    round r   wait for roll call r                   the same
              if its sum does not say all: rows      the same
              a rank has started other operations:   the same
              meet
              read the next; roll call r+1 starts    roll call r+1 starts
              (lookahead=0: only before the wait)    the same
              its steps: batches                     its steps: dummy batches
              first step, or another lowest rank     the same
              with data (then all wait first):
              hand_over of each burst
    end       last roll call: all reached the end    the same
              message: values that should be equal   the same
              broadcasts of tensors that each rank   the same
              has for itself
              synchronise_own of each joinable       the same

``len`` of a loop begins it, and reads nothing.

In the steady state no rank waits, because a roll call has the time of a whole round to complete. A round contains whole
accumulation windows, so the total weight of a window is known before its first step.

A rank that leaves the loop by ``break`` waits until all other ranks have left it in the same step::

    all leave in the same step                       a rank leaves alone
    --------------------------                       -------------------
    the pending burst and its followers              the same
    note that it has left                            the same
    last step of a round: wait for the roll call;    the same
    if it announces no step, the loop ends as above
    wait until all have left (board, no collective)  sees others in later steps
    the loop ends, as above from the message on      raises ProtocolError, and fails as any rank does (``join.failure``)

:meth:`Loop.leave` does this at the next of these: an announcement, the notification of a follower, a forward with grad
or a backward of a listed module, another loop, or the end of the block. The ``break`` itself is too early, because a
generator cannot raise an exception when it is dropped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

from typing_extensions import override

from join.batch import PLAIN, Step, copied, map_tensors, without_rows
from join.collectives._torch_private import profiled
from join.collectives.broken import is_broken
from join.errors import JoinError, add_note, described, outside, wrong_value
from join.protocol.channel import IN_LOOP, ONE_AT_A_TIME, Channel, Lockstep, Phase
from join.read_ahead import ReadAhead, length_of
from join.rounds import Options, Rounds, bits_of
from join.transfer import broadcast_tree

T = TypeVar("T")
_WEIGHT_OF = attrgetter("weight")  # of an item of ReadAhead.held


class Loop(Lockstep, Iterable[T]):
    """One loop in lockstep, on this rank: an iterable over its batches, once.

    Its ``len`` is the number of steps that all ranks make.

    Args:
        channel: The protocol of the block's process group.
        loader: The batches of this rank.
        options: The other arguments of ``Join.iterate``.
        on_begin: Called when the loop begins, before anything is sent.

    Raises:
        ValueError: If the dummy batches would count in a listed module.
    """

    _rounds: Rounds  # set when the first batches are read

    def __init__(
        self, channel: Channel, loader: Iterable[T], options: Options, on_begin: Callable[[Loop[Any]], None]
    ) -> None:
        mixed = [burst.mixes_ranks for _, burst in channel.roster.bursts if burst.mixes_ranks]
        if options.dummy == "last" and mixed:
            fix = "'empty', or a function that returns a batch without samples"
            raise wrong_value("dummy", "last", f"free of samples, which would count in {mixed[0]}", fix)
        super().__init__(channel)
        self._options, self._on_begin = options, on_begin
        self.ahead = ReadAhead(loader, options.weigh, options.resumable)
        """Batches that were read and not yielded."""
        self._template: Any = None  # the batch that dummies are made of
        self._length: int | None = None  # the number of steps, once the loop has begun, if all loaders have a length
        self.joined_at: float | None = None
        """Time of this rank's first step without data, on the monotonic clock."""

    @property
    def is_open(self) -> bool:
        """Whether the loop has begun and not ended."""
        return self.place is not None and self.place.loop is self and self.place.phase in IN_LOOP

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one, on all ranks."""
        is_running = self.is_open and self.channel.place.phase is Phase.RUNNING
        if is_running and not self._options.lookahead:
            fix = "Pass lookahead=1 to join.iterate, or put the code behind the loop"
            raise outside("join.is_last_step was read", "a loop that reads ahead (this one has lookahead=0)", fix)
        if not is_running or self._rounds.begun < self._rounds.steps:
            return False
        return self.ahead.error is None and self._rounds.is_last(
            f"asked in step {self.step.number} whether it is the last"
        )

    def __len__(self) -> int:
        if self.place is None:
            self._begin()
        if self._length is None:
            raise TypeError(
                "A loop over join.iterate has no len() because the loader of a rank has none. Pass a loader with a"
                " length on every rank. [J466]"
            )
        return self._length

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def __iter__(self) -> Iterator[T]:
        # No other reference to the generator may remain, because Python closes it after a ``break`` when it is dropped.
        try:
            while self._begin_step():
                if self.channel.late_use is not None:
                    self.channel.late_use.begin_step()
                yield self._make_dummy() if self.step.is_dummy else self._next_batch()
        finally:
            place = self.place
            if self.is_open and place is not None:  # after a break, or an error that the block may handle
                # It leaves the loop before its next announcement, because an exception here would be lost.
                place.phase, place.step = Phase.LEFT, PLAIN

    # After a step's arithmetic the caches are cold, and each call here costs microseconds. So there are few calls.

    def _begin_step(self) -> bool:
        """Begin the next step; return whether there is one."""
        place = self.place
        if place is None:
            self._begin()
        elif place.loop is not self:  # another one has begun in the middle of this one
            raise JoinError(ONE_AT_A_TIME)
        elif place.phase not in IN_LOOP:
            return False
        else:
            self.end_step()  # first, since a rank whose body handled an error that ends the block must send nothing
            place.phase = Phase.READING
        if not self._has_step(f"reached step {self.step.number + 1} of join.iterate"):
            if self.ahead.error is not None:
                raise self.ahead.error
            self._end()
            return False
        rounds = self._rounds
        if not rounds.begun and self._options.lookahead:
            self._call_next_round(len(self.ahead.held))
        if self._options.throw and rounds.begun >= rounds.fewest:
            self.progress.steps += 1  # as a rank that has left the loop alone must see
            self.wait_for_all(f"reached step {self.progress.steps} of join.iterate")
            self._guard.raise_early_termination(exhausted=rounds.own_batches <= rounds.begun)
        self.progress.steps += 1
        if self._guard.timeout is not None:
            self.wait_for_all(f"reached step {self.progress.steps} of join.iterate")
        place, held = self.channel.place, self.ahead.held
        step = rounds.next_step(self.step, held[0].weight if held else 0.0)
        self.step = place.step = step  # from here on, an error belongs to this step
        place.phase = Phase.RUNNING
        if step.contributors:
            before, self.last_with_data = self.last_with_data, step
            if before is PLAIN or step.first_with_data != before.first_with_data:
                self._change_leader(before)
        return True

    def _has_step(self, doing: str) -> bool:
        """Return whether the loop has another step, after the wait for a roll call if a round has ended.

        Args:
            doing: What this rank does, for the errors of other ranks.
        """
        if not self.step.number:
            self._begin_first_round()
        elif self._rounds.begun == self._rounds.steps:
            if not self._options.lookahead:
                self._call_next_round(0)
            self._rounds.begin_round(doing)
        return self._rounds.begun < self._rounds.steps

    def _change_leader(self, before: Step) -> None:
        """Give what only one rank has to the lowest rank with data, which is another one in this step.

        Args:
            before: The last step with data.
        """
        if before is not PLAIN:  # a rank that skipped a part of the step before is found here, not in hand_over
            self.wait_for_all(f"began step {self.step.number} of join.iterate")
        leader = self.channel.headers.leader = self.step.first_with_data
        for _, burst in self.channel.roster.bursts:
            burst.hand_over(leader)

    def _next_batch(self) -> Any:
        ahead, rounds = self.ahead, self._rounds
        read = ahead.held.popleft()
        batch, ahead.state = read.batch, read.state
        self.step.may_be_last = may_be_last = not (ahead.held or (self._options.lookahead and not ahead.ended))
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
            return map_tensors(without_rows if self._options.dummy == "empty" else copied, batch)
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
        """Begin the loop with all ranks. This reads no batch, so a script may still set the epoch of a sampler."""
        self._on_begin(self)
        del self._on_begin  # which refers to the Join, which refers to this loop
        channel, options = self.channel, self._options
        self.begin()
        length = length_of(self.ahead.loader)
        have_lengths = channel.check_same("entered join.iterate", options.to_compare(), vote=length is not None)
        channel.messages.resize(loop=bits_of(options, channel.collective.world_size))
        if have_lengths and length is not None:
            lengths = channel.messages.gather_numbers(length)
            self._length = min(lengths) if options.until == "first" or options.throw else max(lengths)
            if options.fill_window:
                window = max(*lengths, 1) if options.window == "all" else options.window
                self._length = -(-self._length // window) * window
        channel.scaling.begin_loop(self._reason_to_scale())

    def _begin_first_round(self) -> None:
        options = self._options
        window = self._read_all() if options.window == "all" else options.window
        rounds = self._rounds = Rounds(self, options, window)
        self._call_next_round(0)
        rounds.begin_round("reached step 1 of join.iterate")
        if rounds.fewest == 0 < rounds.steps and not options.throw:
            self._share_template()

    def _read_all(self) -> int:
        """Read all batches; return the size of the single window: the largest number of batches on a rank."""
        self.ahead.read(sys.maxsize)
        self.channel.check_same("has read all its batches")
        return max(*self.channel.messages.gather_numbers(len(self.ahead.held), "has read all its batches"), 1)

    def _reason_to_scale(self) -> str:
        """Return the reason for which the loop must scale its losses, as a clause; ``""`` if it need not."""
        if self._options.weigh is not None:
            return "join.iterate was called with a weigh function"
        if self._options.window != 1:
            return f"join.iterate was called with window={self._options.window!r}"
        names = [each.join_name for each in self.channel.roster.listed if each.needs_scale or each.mixes_ranks]
        return f"nothing else weighs the gradients of {names[0]}" if names else ""

    def _call_next_round(self, held: int) -> None:
        """Read the batches of the next round, and start the roll call that announces them.

        Args:
            held: The number of batches that were read before, for the current round.
        """
        ahead = self.ahead
        if not ahead.ended:
            ahead.read(held + self._rounds.size)
        error = ahead.error
        if error is not None and self.channel.collective.world_size > 1:  # a single rank yields the batches before it
            cause = self._guard.fail(error)  # now, since others wait for this rank, even if the block handles the error
            raise error if cause is None else cause from error
        self._rounds.call(list(map(_WEIGHT_OF, ahead.held))[held:])

    def _share_template(self) -> None:
        """Send a batch from the lowest rank with data to ranks that never had one; an empty one for empty dummies."""
        channel, source = self.channel, self._rounds.shares[0].first
        own = self._make_template(self.ahead.held[0].batch) if channel.collective.rank == source else None
        try:
            template = broadcast_tree(channel.collective, own, source, channel.roster.devices)
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
        self.ahead.end()
        self._release()

    @override
    def leave(self) -> None:
        """Leave the loop before its end, as all ranks must in this step.

        Raises:
            JoinError: If the loop was left inside an accumulation window.
            ProtocolError: If this rank leaves alone.
            PeerError: If another rank failed.
        """
        step, place = self.step, self.channel.place
        place.phase, place.step = Phase.ENDING, step  # which may be the step that this rank left by a break
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
            # Others may wait for the batches of this rank, if it has only asked for the length, or may run to the end.
            if self._has_step(f"left join.iterate in step {step.number}"):
                self.agree_to_leave()
                self.end()
            else:  # this step was the last of all ranks, so the loop ends as without a break
                self._end()
        finally:
            self._release()

    def close(self, error: BaseException | None) -> None:
        """End the loop, if it has begun and not ended, at the end of its block.

        Args:
            error: The exception of this rank that ends the block, if any. With it, the loop ends on this rank alone.

        Raises:
            JoinError: As :meth:`leave` does.
        """
        if not self.is_open:
            return
        if error is None:
            return self.leave()
        self.channel.place.phase, self.channel.place.step = Phase.ENDING, self.step
        if self.step.is_dummy and not isinstance(error, JoinError):
            rank, dummy = self.channel.collective.rank, self._options.dummy
            note = f"Rank {rank} was out of data and got a dummy batch (dummy={dummy!r})."
            if dummy == "empty":
                note += " A mean over no samples is NaN. If the body cannot process an empty batch, pass dummy='last'."
            note += " Check a loss only if join.shadowing is False"
            add_note(error, note)
        self._release()

    def _release(self) -> None:
        self._template = None
        self.ahead.close()


class Batches(Iterable[T]):
    """Batches of a loop, to be iterated once. All attributes are attributes of the loader, to read and to set.

    Its ``len`` is the number of steps that all ranks make.

    Args:
        loop: The loop.
        loader: The loader of this rank.
    """

    __slots__ = ("join_iterators", "join_loader", "join_loop")

    def __init__(self, loop: Loop[T], loader: Iterable[T]) -> None:
        object.__setattr__(self, "join_loop", loop)
        object.__setattr__(self, "join_loader", loader)
        object.__setattr__(self, "join_iterators", [iter(loop)])  # until it is used, because a break has to close it

    @override
    def __iter__(self) -> Iterator[T]:
        if not self.join_iterators:
            raise JoinError(
                "The result of join.iterate was iterated a second time, but it is one loop. Call join.iterate(loader)"
                " again in each epoch. To look at a batch before the loop, take it from the loader. [J776]"
            )
        return self.join_iterators.pop()

    def __len__(self) -> int:
        return len(self.join_loop)

    def __getattr__(self, name: str) -> Any:
        late = name in ("load_state_dict", "set_epoch") and self.join_loop.ahead.source is not None
        if late or name == "state_dict":
            raise AttributeError(
                f"join.iterate(loader) has no {name}, because it reads batches ahead of the loop body. Pass"
                " resumable=True and save join.loader_state(). Call load_state_dict and set_epoch before the first"
                " step. [J684]"
            )
        return getattr(object.__getattribute__(self, "join_loader"), name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.join_loader, name, value)
