"""One ``Join`` block on this rank, from entering to leaving: :class:`OpenBlock`.

A block first compares the lists of the ranks, so that no message can be mistaken, and ends with equal state on all
ranks. :func:`claim` and :func:`release` record which objects are in a block. These are the collectives of all ranks, in
their order::

    enter    first block of a group: setup of the line that carries messages (shared memory: an object broadcast and an
                all-reduce)
             a message (``join.protocol.messages``) that compares lists, arguments and values of all ranks; in later
                blocks of a group it is read before the first header
             joinables attach (DDP runs a pending bucket rebuild here)
    exit     in the body of a loop of a block around this one: meet
             drain: headers and shadowed bursts until no rank is active
             a row of each rank: whether it was last, digests of the values that should be equal (``join.agreement``)
                and of the steps that each rank made, what has changed (``join.held``), random generators, the number of
                its own steps and the last learning rate of each optimizer, and the report
             uneven ranks, including ranks that made different steps: one copy of all state from a last joiner
                (``join.transfer``), with its learning rates at the last steps of other ranks, the parameters and
                gradients of each DDP module by its own broadcasts, then the last parts of each ``exchange``
             even ranks: if values differ, a gather of them (``join.held``); a broadcast of the tensors that each rank
                has for itself, then ``synchronise_own`` of each joinable
             random generators that were equal on entering, if a rank drew others in the block (``join.generators``), in
                the same copy
             ``post_hook`` of each hook

The exit is the same on active and on joined ranks. A joined rank has no other rank to wait for by then.

*Entering does not wait.* A block with the same arguments as an earlier block on the group (``Kept.agreed``)
sends its message and continues. It waits for the other ranks' when it sends its first header. No burst begins before
that, so ranks that list different objects have sent nothing that could be mistaken. A block with new arguments, and a
block inside another one, waits at once.
"""

from __future__ import annotations

import atexit
import struct
import sys
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from datetime import timedelta
from functools import cached_property
from operator import sub
from typing import Any, NamedTuple

from join.agreement import Values, digest, digest_of, is_same, raise_difference
from join.collectives import Collective, SingleCollective, Sum, TorchCollective
from join.collectives._torch_private import profiled
from join.collectives.board import Progress
from join.collectives.timeouts import TIMEOUTS
from join.collectives.version import VERSION
from join.errors import JoinError, PeerError, add_note
from join.failure.guard import ENTERS, FORK, Guard
from join.generators import digests_of_generators, exchange_of_generators, generators_apart
from join.held import Held
from join.joinable import Burst, Joinable, JoinConfig, values_of
from join.loop import Loop
from join.protocol.channel import Channel, Outcome
from join.protocol.headers import Scope, Tally
from join.report import JoinReport, RankReport
from join.transfer import Exchange, copy_state

channels: dict[int, Channel] = {}
"""Channels of the groups on which blocks are open, by the ``id`` of the group's collective."""
joins: dict[int, Any] = {}
"""Open ``Join`` objects in the order of entering, by the ``id`` of a joinable and of its target: a joinable must stay
picklable."""


def claim(join: Any, joinables: Sequence[Joinable], *, enable: bool, throw: bool) -> None:
    """Record that these joinables are in the block of ``join``."""
    for position, joinable in enumerate(joinables):
        joins[id(joinable)] = joins[id(joinable.join_target)] = join
        object.__setattr__(joinable, "_join_config", JoinConfig(enable, throw, position == 0))


def release(join: Any, joinables: Sequence[Joinable]) -> None:
    """Record that these joinables, all those of ``join``, are in no block any more."""
    for key, holder in joins.copy().items():  # other threads open blocks, too, even while a list of items is made
        if holder is join:
            del joins[key]
    disabled = JoinConfig.construct_disabled_join_config()
    for joinable in joinables:
        object.__setattr__(joinable, "_join_config", disabled)


@atexit.register
def _report_open_blocks() -> None:
    """Tell the user and the other ranks of a block that was never left, and the user which rank has failed before."""
    error: BaseException | None = getattr(sys, "last_value", None)  # the exception that ends this process, if any
    for channel in [channel for channel in channels.values() if channel.guard.closed is not FORK]:
        guard = channel.guard
        channel.collective.hold()  # its connections may have an operation pending, whose thread would abort the process
        warnings.warn(
            "A Join block was opened and never left, so the other ranks wait for this one. Call join.close(), and"
            " join.close(error) after an exception.",
            stacklevel=1,
        )
        if guard.closed:  # the user and the other ranks know the reason
            continue
        cause = None if error is None else guard.explain(error)
        try:
            if cause is None:
                guard.look_again()
        except JoinError as failure:
            cause = failure
        if cause is not None:
            sys.excepthook(type(cause), cause, None)
        else:
            never_left = JoinError("Its process ended inside a Join block. Call join.close() before that. [J582]")
            guard.post(error or never_left)


def report_failed_entry(collective: Collective, error: BaseException) -> None:
    """Send ``error`` to the other ranks, which wait for this one to enter a block.

    Nothing is sent inside another block on the group, because that block sends the error when it is left.
    """
    if collective.world_size > 1 and id(collective) not in channels:
        guard = Guard(collective, Progress)
        guard.post(error)
        guard.watch.end()


def _would_block(outer: Collective, inner: Collective) -> bool:
    """Return whether ranks that are out of data on one of two groups can wait for ranks that wait on the other."""
    return outer is not inner and all(isinstance(g, TorchCollective) and g.world_size > 1 for g in (outer, inner))


class _Ends(NamedTuple):
    """Beginning of the rows of all ranks, when all are out of data: for each fact, the values of the ranks.

    ``total_steps``, ``own_steps`` and ``values`` are 0 if bursts were shadowed.

    Attributes:
        last: Whether the rank was among the last that had data.
        total_steps: The number of steps that it made by itself (``Joinable.own_steps``), over all joinables.
        own_steps: A digest of the numbers of these steps, by joinable.
        values: A digest of the values that should be equal on all ranks.
        changes: A digest of other values that have changed since entering. If bursts were shadowed, it includes those
            of the blocks around this one.
        steps, shadowed: As in the report.
    """

    last: Sequence[bool]
    total_steps: Sequence[int]
    own_steps: Sequence[int]
    values: Sequence[int]
    changes: Sequence[int]
    steps: Sequence[int]
    shadowed: Sequence[int]


_ROW = "<?6q3d2q8I"
"""Row of a rank: the facts in :class:`_Ends`, and the parts below. The number of learning rates differs from block to
block."""
_REPORT, _ENTERED, _LEFT, _RATES = slice(5, 12), slice(12, 16), slice(16, 20), slice(20, None)


class BlockAlone:
    """Block that sends nothing, with ``enable=False`` or without anything that communicates.

    Its loops over ``Join.iterate`` run on this rank alone.

    Args:
        scope: The settings of the block, without members.
    """

    is_alone = True
    """Whether loops in the block run on this rank alone."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.undo = scope, ExitStack()

    @cached_property
    def channel(self) -> Channel:
        """Protocol of this rank alone."""
        channel = Channel(SingleCollective())
        channel.agree()
        return channel

    def notify(self, caller: Any) -> None:
        """Do nothing, since no other rank has to know of a burst."""

    def end(self, error: BaseException | None, loop: Loop[Any] | None) -> JoinReport | None:
        """End the last loop; return an empty report, or ``None`` after an error."""
        if loop is not None:
            loop.close(error)
        return JoinReport() if error is None else None

    def tell(self, error: BaseException) -> None:
        """Do nothing, since no other rank waits."""


class OpenBlock:
    """Block that this rank has entered, with :meth:`enter`, and not left.

    Args:
        collective: The collectives of the block's process group.
        scope: The members and settings of the block.

    Raises:
        JoinError: If the block cannot be opened now.
    """

    is_alone = False
    """Whether loops in the block run on this rank alone."""

    def __init__(self, collective: Collective, scope: Scope) -> None:
        self._collective, self.scope = collective, scope
        for outer in list(channels.values()):  # other threads may open blocks meanwhile, which are not around this one
            is_around = outer.thread is threading.current_thread() and not outer.place.step.in_loop
            if is_around and _would_block(outer.collective, collective):
                raise JoinError(
                    f"A block on {collective.world_size} ranks was entered inside a plain block on another group of"
                    f" {outer.collective.world_size} ranks, so ranks could wait for each other forever. Leave the outer"
                    " block first, or loop over join.iterate in one block, on the group of all ranks. [J548]"
                )
        self.channel = channels.get(id(collective)) or Channel(collective)
        self.undo = ExitStack()
        """Callbacks that run when the block is left, whatever happened in it; the one added last runs first."""
        self.undo.callback(self._close_channel)
        self._limited = self.undo.enter_context(ExitStack())  # restores the time limit of the group's operations

    # -- entering -----------------------------------------------------------------------------------------------------

    def enter(self, join: Any, entered_with: Sequence[str]) -> None:
        """Enter the block of ``join`` with all ranks. After an exception, the caller calls :meth:`tell` and ``undo``.

        The ranks check that all enter with the same objects, arguments and values (``Joinable.before_entering``). The
        check is awaited at once if objects or arguments are new to the group, and before the first header if an earlier
        block on the group had the same. Then each joinable is attached, and the clocks of the report start.

        Args:
            join: The ``Join`` of this block.
            entered_with: The names of the joinables, and the arguments of ``Join``, as texts.

        Raises:
            ProtocolError: On all ranks, if they enter with different texts or values.
            ValueError: If a joinable refuses the list.
        """
        channels[id(self._collective)] = self.channel
        self._meet_others(entered_with)
        joinables = self.scope.joinables
        claim(join, joinables, enable=True, throw=self.scope.throw)

        def is_of_interrupted_attach(kind: type[BaseException] | None, *_: object) -> bool:
            return kind is AttributeError and not hasattr(self.scope, "held")

        self.undo.push(is_of_interrupted_attach)  # and suppressed
        try:
            for joinable in joinables:
                self.undo.callback(joinable.detach)
                joinable.attach(join)
            self.scope.held = Held(
                lambda: [part for joinable in joinables for part in joinable.held()],
                self.scope.own_attributes,
                self._collective,
            )
            self._random = digests_of_generators()
        except BaseException as error:
            self._fail(error)
            raise
        self._tally = replace(self.channel.headers.tally)
        self._started = time.monotonic()

    def _meet_others(self, entered_with: Sequence[str]) -> None:
        """End what a block around this one has begun, and compare with other ranks what this one enters with."""
        collective, channel, agreed = self._collective, self.channel, self._collective.kept.agreed
        own = digest("\n".join(entered_with))
        try:
            with profiled("enter"):
                channel.begin_to_open(self.scope.timeout)
                if not agreed and collective.world_size > 1:
                    channel.guard.watch.refresh(TIMEOUTS.note)  # the other ranks notice now if this process ends
                scopes = (*channel.roster.scopes, self.scope) if collective.world_size > 1 else ()
                listed = [joinable for scope in scopes for joinable in scope.joinables]
                values = [(each.join_name, each.before_entering(listed)) for each in self.scope.joinables]
                message = channel.messages.start(ENTERS, [*entered_with, f"joinables {VERSION}"], values)
                channel.open(self.scope)
                if own in agreed and len(channel.roster.scopes) == 1:
                    channel.headers.before_next = message
                else:
                    channel.messages.check(message)
                channel.messages.resize(header=channel.roster.code.bits)  # not before, for ranks outside the block
                agreed.add(own)
        except RuntimeError as error:
            if not isinstance(error, JoinError) and (cause := channel.guard.explain(error)) is not None:
                raise cause from error
            raise
        if self.scope.timeout is not None:  # no burst begins before all ranks have reached it, so the limit is safe
            before = self._collective.limit(timedelta(seconds=2 * self.scope.timeout))
            if before is not None:
                self._limited.callback(self._collective.limit, before)

    def notify(self, caller: Any) -> Sum[int] | None:
        """Announce a burst of ``caller`` to all ranks if it announces; otherwise note that it follows.

        Args:
            caller: A joinable of the block, or the object that a joinable wraps.

        Returns:
            The header's sum over all ranks, or ``None`` for a joinable that follows.

        Raises:
            TypeError: If the joinable around ``caller`` announces its bursts by itself.
        """
        member = next(
            member
            for member in self.scope.members
            if member.joinable is caller or member.joinable.join_target is caller
        )
        joinable = member.joinable
        if joinable is not caller and isinstance(joinable, Burst):
            raise TypeError(
                f"notify_join_context was called for an object of type {type(caller).__name__}, which announces its"
                " bursts by itself. Remove the call. [J078]"
            )
        if member in self.scope.announcing:
            return self.channel.announce(joinable)
        self.channel.follow(joinable)
        return None

    # -- leaving ------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException | None, loop: Loop[Any] | None) -> JoinReport | None:
        """Shadow the other ranks until all are out of data, then synchronise; called when the user's code has ended.

        Args:
            error: The exception that the code raised, if any; the caller raises it after this call.
            loop: The last loop over ``Join.iterate`` in the block, if any.

        Returns:
            The report of all ranks; ``None`` after an error.

        Raises:
            PeerError, ProtocolError, JoinTimeoutError: If the block failed, here or on another rank.
        """
        if self.channel.guard.closed is FORK:
            return None
        if error is not None:
            if loop is not None:
                loop.close(error)
            self._fail(error)
            return None
        try:
            if loop is not None:
                loop.close(None)
            out_of_data_at = time.monotonic() if loop is None or loop.joined_at is None else loop.joined_at
            return self._finish(self.channel.drain(), out_of_data_at)
        except BaseException as failure:
            self._fail(failure, is_ours=True)  # other ranks may wait for this one
            raise

    def tell(self, error: BaseException) -> None:
        """Send ``error`` to the other ranks, unless all ranks raise it, or they were sent another error."""
        guard = self.channel.guard
        if not (isinstance(error, JoinError) or guard.watch.block.own is not None):
            guard.post(error)

    def _fail(self, error: BaseException, *, is_ours: bool = False) -> None:
        """Leave the block with ``error``; raise the failure of another rank that caused it, if there is one.

        The traceback of an error in this package's own code (``is_ours``) would only hide that cause.
        """
        cause, step = self.channel.guard.fail(error), self.channel.place.step
        if isinstance(cause or error, PeerError) and 0 < step.contributors < self._collective.world_size:
            count = f"only {step.contributors} of {self._collective.world_size} ranks had data"
            add_note(cause or error, f"In this step of join.iterate, {count}. The others ran on dummy batches.")
        if cause is not None:
            raise cause from (error.with_traceback(None) if is_ours else error)

    def _finish(self, outcome: Outcome, out_of_data_at: float) -> JoinReport:
        """Gather the report and synchronise state; called when all ranks are out of data."""
        collective = self._collective
        tally = Tally(*map(sub, astuple(self.channel.headers.tally), astuple(self._tally)))  # of this block
        own_report = self._row(tally, out_of_data_at)
        joinables = self.scope.joinables
        held, values, shadowed = self.scope.held, list[tuple[str, Mapping[str, Any]]](), outcome.shadowed
        if shadowed:
            changes = [scope.held.digest_of_changes(is_copied=True) for scope in self.channel.roster.scopes]
            own_end = outcome.last, 0, 0, 0, digest(repr(changes))
        else:
            values, steps = values_of(joinables), [joinable.own_steps for joinable in joinables]
            own_end = outcome.last, sum(steps), digest(repr(steps)), digest_of(values), held.digest_of_changes()
        stepping = {joinable.join_name: joinable.own_rates for joinable in joinables if joinable.own_rates is not None}
        last_rates = [number for rates in stepping.values() for number in (len(rates), (rates or [0.0])[-1])]
        row = struct.Struct(f"{_ROW}{len(last_rates)}d")
        packed = row.pack(*own_end, *own_report, *self._random, *digests_of_generators(), *last_rates)
        with profiled("compare"):
            rows = self.channel.messages.gather(packed, "has left its block")
        columns = list(zip(*map(row.unpack, rows), strict=True))
        ends = _Ends(*columns[: len(_Ends._fields)])
        outcome, keeps = self._compare(outcome, ends, values)
        warn: Callable[[], None] | None = None
        self._limited.close()  # because a copy of all state may take longer than a burst
        source, exchanges = outcome.source, list[tuple[str, Exchange]]()
        differ = len(set(ends.changes)) > 1
        if outcome.shadowed:
            exchanges.append(("rates", _compare_rates(stepping, columns[_RATES], source, collective.rank)))
            for joinable in self.channel.roster.listed:  # of blocks around this one, too, whose bursts were shadowed
                if (exchange := joinable.exchange(source)) is not None:
                    exchanges.append((joinable.join_name, exchange))
            if differ or not shadowed:
                exchanges += [("attributes", scope.held.exchange(source)) for scope in self.channel.roster.scopes]
        else:
            warn = held.compare() if differ else None
            self.channel.synchronise_own(self.scope.joinables, source)
            source = ends.shadowed.index(min(ends.shadowed))  # which ran the fewest dummies
        has_shadowed = outcome.shadowed or (tally.loops > 0 and any(ends.shadowed))
        if kinds := generators_apart(collective, columns[_ENTERED], columns[_LEFT], is_copied=has_shadowed):
            exchange = exchange_of_generators(kinds, is_source=collective.rank == source)
            exchanges.append(("random generators", exchange))
        if exchanges:
            with profiled("copy"):
                copy_state(collective, exchanges, source, self.channel.roster.devices, keeps=keeps)
        for member in self.scope.members:
            member.hook.post_hook(outcome.last)
        counts_steps = tally.loops > 0 and not (outcome.shadowed or any(ends.total_steps))
        if warn is not None:
            warn()
        ranks = tuple(map(RankReport, range(len(rows)), *columns[_REPORT]))
        return JoinReport(ranks, outcome.even, counts_steps)

    def _row(self, tally: Tally, out_of_data_at: float) -> tuple[float, ...]:
        """Return this rank's row of the report, without the rank.

        Args:
            tally: The counts of this block.
            out_of_data_at: The time on the monotonic clock.
        """
        joined_at, ended_at = out_of_data_at - self._started, time.monotonic() - self._started
        steps, shadowed = tally.batches, tally.dummies
        if not tally.loops:
            # Announced and shadowed bursts together are equally many on all ranks, so all choose the same member.
            steps, shadowed = max([(each.steps, each.shadowed) for each in self.scope.announcing], key=sum)
        return steps, shadowed, joined_at, ended_at, tally.idle, tally.headers, tally.nbytes

    def _compare(self, outcome: Outcome, ends: _Ends, values: Values) -> tuple[Outcome, bool]:
        """Return the outcome after a comparison of all ranks, and whether this rank may keep its own state.

        Ranks that are out of data at the same time may have made different steps of their own. They are uneven then.

        Raises:
            ProtocolError: If ranks made the same steps and hold different values.
        """
        if outcome.shadowed:
            return replace(outcome, source=ends.last.index(True)), outcome.last
        if len(set(ends.own_steps)) > 1:  # steps that no rank announces, such as those under no_sync
            # Each rank has made steps of its own, and the state of only one rank is copied.
            rank, source = self._collective.rank, ends.total_steps.index(max(ends.total_steps))
            last = ends.own_steps[rank] == ends.own_steps[source]
            return Outcome(even=False, last=last, shadowed=True, source=source), source == rank
        if len(set(ends.values)) > 1:
            raise_difference(dict(enumerate(self._collective.all_gather_object(values, plain=True))))
        return outcome, True

    def _close_channel(self) -> None:
        try:
            self.channel.close(self.scope)
        finally:  # even if it was interrupted
            if not set(self.channel.roster.scopes) - {self.scope}:
                channels.pop(id(self._collective), None)


def _compare_rates(
    rates: Mapping[str, array[float]], last: Sequence[Sequence[float]], source: int, rank: int
) -> Exchange:
    """Compare the last learning rate of each rank with that of rank ``source`` in the same step.

    Args:
        rates: The learning rate in each step of this rank, by the name of the optimizer.
        last: For each optimizer, the number of steps of each rank, and its last rate.
        source: The rank that made the most steps.
        rank: This rank.
    """
    apart: dict[int, Values] = {}
    for index, (name, own) in enumerate(rates.items()) if rank == source else ():
        for each, (number, rate) in enumerate(zip(last[2 * index], last[2 * index + 1], strict=True)):
            n = int(number)
            key = f"learning rate in step {n} of the block"
            if 0 < n <= len(own) and not is_same(key, rate, own[n - 1]):
                apart = apart or {each: [(name, {key: rate})], source: [(name, {key: own[n - 1]})]}
    inbox = yield apart
    if inbox.skeleton:
        raise_difference(inbox.skeleton)
    yield ""
