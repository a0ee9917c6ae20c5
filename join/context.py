"""The context manager: :class:`Join`.

It checks its arguments, turns objects into joinables, attaches and detaches them, and synchronises state at the end.
The order of collectives inside the block is the business of ``join.protocol``; around it stand, on all ranks alike::

    enter    one all-reduce: do all ranks list the same? (``join.arguments``)
             joinables attach (a pending bucket rebuild of DDP is done now)
    exit     drain: headers and shadowed bursts until nobody is active
             even only: an all-gather of the steps that each rank has made; ranks that differ are uneven, too
             uneven: an election of the last joiner, then each joinable's ``synchronise``; even: ``synchronise_own``
             each hook's ``post_hook``
             one all-reduce for the report
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import torch
from typing_extensions import Self

from join.arguments import (
    check_agreement,
    check_flags,
    check_initialised,
    check_keywords,
    checked_steps,
    checked_timeout,
    checked_weight,
    common_collective,
    expand,
    hook_of,
)
from join.collectives import Collective, Work, collective_of
from join.errors import JoinError, ProtocolError
from join.joinable import Joinable, JoinConfig
from join.loop.alone import LoopAlone
from join.loop.iterate import Iteration, check_arguments
from join.protocol.announced import Channel, Outcome
from join.protocol.declared import DeclaredChannel
from join.protocol.lockstep import LockstepChannel
from join.protocol.members import Member, Scope
from join.report import JoinReport, RankReport

T = TypeVar("T")

# By identity, not on the objects: a joinable must stay picklable inside its block.
_blocks: dict[int, Join] = {}  # by joinable and by what it stands for
_channels: dict[int, Channel] = {}


class Join:
    """Lets ranks with different numbers of batches train together.

    Inside the block every rank runs its own loop. A rank that runs out of inputs leaves its loop and, in ``__exit__``,
    shadows the collectives of the others until all are done. After the block all ranks hold the same parameters,
    buffers and optimizer state: those that one process would hold after the same global batches.

    Example::

        with Join([model, optimizer], divide_by_initial_world_size=False):
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()

    Args:
        joinables: DDP modules, optimizers, schedulers, scalers, :class:`Joinable` objects of your own, torch's. What is
            trained and not listed is not kept in step.
        enable: ``False`` makes the block do nothing, for inputs known to be even.
        throw_on_early_termination: raise :class:`EarlyTerminationError` on all ranks once one is exhausted.
        steps: how many steps this rank will make, if that is known: synchronised backwards, each with one step of every
            sharded optimizer in the list. On all ranks or on none. Then no header is sent at all. ``"loader"``: for a
            loop over :meth:`iterate`, as many as its loader has batches.
        timeout: seconds to wait for a rank that does not announce; then :class:`JoinTimeoutError` says who. With it an
            active rank awaits every header right before the burst, and in a loop over :meth:`iterate` all ranks wait
            for each other before each step and each burst. On gloo, a collective of the group breaks inside the block
            once it takes twice as long.
        **kwargs: handed to every ``join_hook``. DDP takes ``divide_by_initial_world_size``: ``True`` (as in PyTorch)
            divides gradients by the size of the group, ``False`` by the number of ranks that contributed.

    Raises:
        ValueError: no joinable, none that communicates, one given twice, or two process groups.
        TypeError: an object that cannot join, a ``Joinable`` whose constructor did not call ``Joinable.__init__``, or a
            keyword that no hook takes.
        ProtocolError: on entering, on all ranks, if they list different objects or give different arguments.

    Source: PyTorch PR 61555 (generic join) for the interface; the protocol is this package's own.
    """

    def __init__(
        self,
        joinables: Iterable[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        steps: int | Literal["loader"] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._timeout = checked_timeout(timeout)
        self._steps = checked_steps(steps, timeout)
        self._joinables = expand(joinables)
        self._collective = common_collective(self._joinables)
        check_keywords(self._joinables, kwargs, own=("enable", "throw_on_early_termination", "steps", "timeout"))
        divides = {name: value for name, value in kwargs.items() if name == "divide_by_initial_world_size"}
        check_flags({"enable": enable, "throw_on_early_termination": throw_on_early_termination} | divides)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._kwargs = kwargs
        self._weight: float | None = None
        self._iteration: Iteration | None = None
        self._looped = (0, 0)  # the steps of the loops before that one
        self._alone: LoopAlone | None = None  # the last loop, with ``enable=False``
        self._entered = self._is_open = False
        self._report: JoinReport | None = None

    # -- for users ----------------------------------------------------------------------------------------------------

    @property
    def report(self) -> JoinReport:
        """Who did what, rank by rank; available after a block that ended without an exception."""
        if self._report is None:
            raise JoinError("there is no report: it is made at the end of a block that ends without an exception")
        return self._report

    @staticmethod
    def notify_join_context(joinable: Any) -> Work | None:
        """Tell the other ranks that this rank is about to run a burst of ``joinable``'s collectives.

        Call it before the collectives of each burst.

        Returns:
            The header's sum over all ranks, under way, with ``wait`` and ``is_completed`` as of an all-reduce, if
            ``joinable`` announces: it comes first in the list, or is a :class:`Burst`. ``None`` for the others, which
            follow it, and in a block with ``enable=False``.

        Raises:
            JoinError: outside a block, or if the block is over because a rank failed.
            TypeError: if the joinable's constructor did not call ``Joinable.__init__``.
        """
        block = _blocks.get(id(joinable))
        if block is None:
            check_initialised(joinable)
            name = type(joinable).__name__
            if _blocks:
                raise JoinError(f"{name} called notify_join_context inside a Join block that does not list it; list it")
            raise JoinError(
                f"{name} called notify_join_context outside a Join block; wrap the loop in `with Join([...])`, with"
                " enable=False where inputs are even"
            )
        return block._notify(joinable)

    @staticmethod
    def is_open_on(group: Any) -> bool:
        """Whether a block is open on a process group (``None``: the default one)."""
        return any(channel.collective is collective_of(group) for channel in _channels.values())

    @property
    def weight(self) -> float | None:
        """How much this rank's next backwards weigh: the number of samples or tokens in its batch.

        Gradients become the mean over all ranks, weighted by it, and under accumulation over the micro-batches too, so
        do not divide the loss by their number; ``divide_by_initial_world_size`` has no say then. Set it before the
        forward, on all ranks or on none, to a number that is not negative; it stays until it is set again. ``None``,
        the default: every rank weighs the same. In a loop over :meth:`iterate`, a dummy weighs 0 whatever is set.

        Raises:
            ValueError: on setting, if it is negative, infinite or NaN; in the backward, if it is 0 on all ranks.
            TypeError: on setting, if it is no number.
        """
        return 0.0 if self._is_open and self._channel.shadowing else self._weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        checked = checked_weight(weight)
        self._check_not_over("weight")
        declared = self._is_open and isinstance(self._steps, int)
        if declared and (checked is not None) != self._channel.weighted:
            raise JoinError(
                "with steps=, all ranks must know on entering whether weights are in use, and they are in all of the"
                " block or in none of it: join = Join(..., steps=n); join.weight = w; with join: ..."
            )
        self._weight = checked

    @property
    def shadowing(self) -> bool:
        """Whether the batch that :meth:`iterate` handed out last is a dummy, which must not count.

        Also where the loop is that of another block, around this one on the same group.
        """
        return self._is_open and self._channel.shadowing

    @property
    def is_last_step(self) -> bool:
        """Whether no other step follows in the loop over :meth:`iterate`, on any rank; ``False`` outside one.

        The same on all ranks, so that all can make something of what is left, such as the gradients of a window of
        accumulation that is not full. No collective is sent for it; but it may wait until all have begun this step.
        With ``throw_on_early_termination``, the step before that error is not called the last.
        """
        return self._loop is not None and self._loop.is_last_step

    @property
    def pending(self) -> list[Any]:
        """The batches that :meth:`iterate` has read ahead and not handed out, in their order."""
        return [] if self._loop is None else self._loop.pending

    @property
    def _loop(self) -> Iteration | LoopAlone | None:
        return self._iteration or self._alone

    def loader_state(self) -> Any:
        """The state of the loader of the last loop over :meth:`iterate`, as of the batch that was handed out last.

        What the loader itself says is ahead of that, by what is read ahead. A loader that takes this state over by
        ``load_state_dict``, on every rank its own, goes on with the next batch: with none on a rank that had run out.
        Once the loop has come to its end on all ranks, it is the state that the loader itself ends with; torchdata's
        begins its next epoch then.

        Raises:
            JoinError: if there was no loop over :meth:`iterate` in this block; if the loader's ``state_dict`` raised.
            TypeError: if the loader has no ``state_dict``.
        """
        if self._loop is None:
            raise JoinError("join.loader_state() is of a loop over join.iterate, and there was none in this block")
        return self._loop.loader_state

    def iterate(
        self,
        loader: Iterable[T],
        until: Literal["all", "first"] = "all",
        *,
        dummy: Literal["empty", "last"] | Callable[[T], T] = "empty",
        lookahead: int = 1,
    ) -> Iterator[T]:
        """Hand out ``loader``'s batches in lockstep: all ranks run the loop's body equally often.

        So the body may contain any collectives: of the model, of metrics, of clipping. It must do the same on all
        ranks. A rank that has run out of batches gets dummies, which weigh nothing in gradients; ``shadowing`` tells.

        Args:
            loader: this rank's batches: anything that can be iterated, also with no length or no batches.
            until: ``"all"``: until all ranks have run out. ``"first"``: all ranks stop when one has run out; what they
                had read ahead is in ``pending``.
            dummy: ``"empty"``: the rank's last batch with all tensors of length 0 along their first dimension.
                ``"last"``: the last batch itself; not where ranks compute together (SyncBatchNorm), for there it would
                count. A function: what it returns for the last batch, at every step. A rank that never had a batch uses
                the first one of another rank.
            lookahead: how many steps one roll call is for. Up to ``2 * lookahead - 1`` batches are read ahead and held,
                besides the one in use. A loader with a ``state_dict`` is asked for it after each; see
                :meth:`loader_state`.

        Raises:
            ValueError, TypeError: for arguments that are none of these.
            JoinError: in the loop, on all ranks, if it is inside another one on the same group.
            ProtocolError: on all ranks, if some leave the loop early and others do not.
            PeerError: if a rank fails, in its loader or in the body.
        """
        if not self._entered:
            raise JoinError("join.iterate is for the inside of a block: with Join([...]) as join: ...")
        self._check_not_over("iterate")
        if not self._enable:
            check_arguments(loader, until, dummy, lookahead)
            self._alone = LoopAlone(loader)
            return self._alone.handed_out()
        if not isinstance(self._channel, LockstepChannel):
            raise JoinError("steps= declares single bursts; for a loop over join.iterate write steps='loader'")
        members = [member for scope in self._channel.scopes for member in scope.announcing]
        mixed = [member.burst.mixes_ranks for member in members if member.burst and member.burst.mixes_ranks]
        if dummy == "last" and mixed:
            raise ValueError(
                f"dummy='last' would count in {mixed[0]}; give dummy='empty', or a function that makes one"
            )
        if self._iteration is not None and self._iteration.running:
            self._iteration.give_way()
        declared = self._steps == "loader"
        iteration = Iteration(self._channel, loader, until, dummy, lookahead, declared=declared, throw=self._throw)
        self._looped, self._iteration = self._steps_of_loops, iteration
        return iteration.handed_out()

    @property
    def _steps_of_loops(self) -> tuple[int, int]:
        """How many steps of loops over :meth:`iterate` this rank has begun with a batch, and with a dummy."""
        (before, dummies_before), now = self._looped, self._iteration
        batches, dummies = (0, 0) if now is None else now.steps
        return before + batches, dummies_before + dummies

    def _check_not_over(self, what: str) -> None:
        if self._entered and self._enable and not self._is_open:
            raise JoinError(f"join.{what} is used after its block; write `with Join([...]) as join:` for each block")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "weight":
            raise AttributeError(f"Join has no attribute {name!r} to set; did you mean weight?")
        object.__setattr__(self, name, value)

    # -- for joinables ------------------------------------------------------------------------------------------------

    @property
    def channel(self) -> Channel:
        """The protocol of this block's group, for :class:`Burst` implementations."""
        return self._channel

    @property
    def collective(self) -> Collective:
        """The group of this block."""
        return self._collective

    # -- the context manager ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._entered:
            raise JoinError("this Join was entered before; build a new one for each block")
        for joinable in self._joinables:
            if id(joinable.join_target) in _blocks:
                raise JoinError(f"{joinable.join_name} is inside another Join block already")
        self._entered = True
        if not self._enable:
            self._configure()
            self._report = JoinReport()
            return self
        members = [Member(joinable, hook_of(joinable, self._kwargs)) for joinable in self._joinables]
        self._scope = Scope(members, self._throw, self._timeout)
        self._channel = self._open_channel()
        self._is_open = True
        self._attached: list[Joinable] = []
        self._limit_before: timedelta | None = None  # of the group's operations
        try:
            settings = {"throw_on_early_termination": self._throw, "timeout": self._timeout, **self._kwargs}
            if isinstance(self._steps, int):  # the number may differ
                settings |= {"steps": "declared", "weighted": self._weight is not None}
            elif self._steps is not None:
                settings |= {"steps": self._steps}
            check_agreement(self._collective, self._joinables, settings, self._channel.wait)
            self._channel.agree()
            if self._timeout is not None:  # no burst begins before all ranks have come to it
                self._limit_before = self._collective.limit(timedelta(seconds=2 * self._timeout))
            self._attach()
        except BaseException:
            self._leave()
            raise
        self._tally = replace(self._channel.tally)
        self._started = time.monotonic()
        for member in members:
            member.times.start(self._started)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._enable:
            self._unconfigure()
            return
        try:
            self._leave_block(error)
        finally:
            self._leave()

    def _attach(self) -> None:
        self._configure()
        try:
            for joinable in self._joinables:
                joinable.attach(self)
                self._attached.append(joinable)
        except BaseException as error:
            self._fail(error)
            raise

    def _leave_block(self, error: BaseException | None) -> None:
        iteration = None if self._iteration is None or not self._iteration.running else self._iteration
        if error is not None:
            if iteration is not None:
                iteration.fail(error)
            self._fail(error)
            return
        try:
            if iteration is not None:
                iteration.leave()
            ran_out = time.monotonic()
            outcome = self._channel.drain()
        except BaseException as failure:
            self._fail(failure)
            raise
        try:
            self._finish(outcome, ran_out)
            self._warn_of_no_loop()
        except BaseException as failure:
            cause = self._channel.explain(failure)
            if cause is not None:
                raise cause from failure
            self._channel.peers.leave(failure)  # others may wait for this rank
            raise

    def _fail(self, error: BaseException) -> None:
        """Leave the block with ``error``; raises what it comes of, if that is another rank's failure."""
        cause = self._channel.fail(error)
        if cause is not None:
            raise cause from error

    def _warn_of_no_loop(self) -> None:
        if self._steps == "loader" and self._iteration is None:
            warnings.warn(
                "steps='loader' is for loops over join.iterate, and there was none in the block, so headers were sent;"
                " write for batch in join.iterate(loader), or give the number of steps",
                stacklevel=3,
            )

    def _open_channel(self) -> Channel:
        key = id(self._collective)
        channel = _channels.get(key)
        if channel is None and not isinstance(self._steps, int):
            channel = LockstepChannel(self._collective)
        elif isinstance(self._steps, int):
            if channel is not None:
                raise JoinError("steps= needs a block of its own, and another is open on this group")
            channel = DeclaredChannel(self._collective, self._steps, weighted=self._weight is not None)
        assert channel is not None
        channel.open(self._scope)
        _channels[key] = channel
        return channel

    def _finish(self, outcome: Outcome, ran_out: float) -> None:
        """All ranks have run out: synchronise state, and gather the report."""
        in_loop = None if self._iteration is None else self._iteration.joined_at
        joined_at = (ran_out if in_loop is None else in_loop) - self._started
        ended_at = time.monotonic() - self._started
        if outcome.even:
            outcome = self._compare_steps()
        self._restore_limit()  # state may take its time
        mine, members = self._scope.members, [member for scope in self._channel.scopes for member in scope.members]
        if outcome.even:
            for member in mine:
                member.joinable.synchronise_own(self._channel.leader)
        else:  # everything was shadowed, so everything is synchronised: also what belongs to a block around this one
            for member in members:
                member.joinable.synchronise(self._channel.leader)
        for member in mine:
            member.hook.post_hook(outcome.last)
        self._gather_report(outcome.even, joined_at, ended_at)

    def _compare_steps(self) -> Outcome:
        """Ranks that ran out together may have made different numbers of steps that nobody announces."""
        mine = torch.tensor([member.joinable.own_steps for member in self._scope.members])
        steps = [cast("list[int]", each.tolist()) for each in self._collective.all_gather(mine)]
        if steps.count(steps[0]) == len(steps):
            return Outcome(even=True, last=True)
        most = max(steps, key=sum)
        self._channel.leader = steps.index(most)
        return Outcome(even=False, last=steps[self._collective.rank] == most)

    def _gather_report(self, even: bool, joined_at: float, ended_at: float) -> None:
        spent = self._channel.tally.since(self._tally)
        busiest = max(self._scope.announcing, key=lambda member: member.steps)
        steps, shadowed = busiest.steps, max(member.shadowed for member in self._scope.announcing)
        if not (steps or shadowed):  # on any rank: nothing in the loops' bodies is announced, as in an evaluation
            steps, shadowed = self._steps_of_loops
        mine = RankReport(
            rank=self._collective.rank,
            steps=steps,
            shadowed=shadowed,
            joined_at=joined_at,
            ended_at=ended_at,
            idle=spent.idle,
            headers=spent.headers,
            header_bytes=spent.nbytes,
            step_times=tuple(busiest.times.counts),
        )
        report = JoinReport.gather(self._collective, mine, even)
        if len({row.headers for row in report.ranks}) > 1:
            raise ProtocolError(
                "other collectives ran on the group inside the block and were mistaken for this package's: ranks sent"
                f" {[row.headers for row in report.ranks]} headers. Run them after the block, or make them a joinable"
            )
        self._report = report

    def _leave(self) -> None:
        with ExitStack() as calls:
            calls.callback(self._close_channel)
            calls.callback(self._restore_limit)
            calls.callback(self._unconfigure)
            for joinable in self._attached:  # the last attached is the first detached
                calls.callback(joinable.detach)

    def _restore_limit(self) -> None:
        if self._limit_before is not None:
            self._collective.limit(self._limit_before)
            self._limit_before = None

    def _close_channel(self) -> None:
        self._is_open = False
        self._channel.close(self._scope)
        if not self._channel.scopes:
            del _channels[id(self._collective)]

    def _notify(self, joinable: Any) -> Work | None:
        if not self._enable:
            return None
        if any(member.joinable is joinable for member in self._scope.announcing):
            return self._channel.announce(joinable)
        self._channel.follow(joinable)
        return None

    def _configure(self) -> None:
        for position, joinable in enumerate(self._joinables):
            _blocks[id(joinable)] = _blocks[id(joinable.join_target)] = self
            _set_config(joinable, JoinConfig(self._enable, self._enable and self._throw, position == 0))

    def _unconfigure(self) -> None:
        for joinable in self._joinables:
            _blocks.pop(id(joinable), None)
            _blocks.pop(id(joinable.join_target), None)
            _set_config(joinable, JoinConfig.construct_disabled_join_config())


def _set_config(joinable: Joinable, config: JoinConfig) -> None:
    object.__setattr__(joinable, "_join_config", config)
