"""One block on this rank, from entering it to leaving it: :class:`OpenBlock`.

What all ranks do on entering and on leaving, in this order::

    enter    one all-reduce: do all ranks list the same? (``join.agreement``)
             the first block of a group: what carries headers (shared memory: an object broadcast and an all-reduce)
             joinables attach (a pending bucket rebuild of DDP is done now)
    exit     drain: headers and shadowed bursts until nobody is active, and an election of the last joiner, if uneven
             nothing was shadowed: an all-gather of the steps that each rank has made, and of a digest of what should be
                equal (``join.agreement``); ranks whose steps differ are uneven, too
             uneven: each joinable's ``synchronise``, from the last joiner; else each one's ``synchronise_own``
             each hook's ``post_hook``
             one all-reduce for the report
"""

from __future__ import annotations

import atexit
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch

from join.agreement import check_same, digest_of, raise_difference, values_of
from join.collectives import Collective, Work
from join.collectives._torch_private import profiled
from join.collectives.board import Progress
from join.errors import JoinError, ProtocolError
from join.failure.peers import Peers
from join.joinable import Joinable, JoinConfig
from join.lockstep.loop import Loops
from join.protocol.channel import Channel, Outcome
from join.protocol.headers import Scope
from join.report import JoinReport, RankReport

channels: dict[int, Channel] = {}
"""One channel for each group on which blocks are open, by the ``id`` of its collective."""
_blocks: dict[int, Any] = {}  # by the id of a joinable, and of its target: a joinable must stay picklable in its block


def block_of(obj: Any) -> Any:
    """The ``Join`` whose block is open, and has this joinable, or has one that stands for this object."""
    return _blocks.get(id(obj))


def put_inside(join: Any, joinables: Sequence[Joinable], *, enable: bool, throw: bool) -> None:
    """Record that these joinables are in the block of ``join``."""
    for position, joinable in enumerate(joinables):
        _blocks[id(joinable)] = _blocks[id(joinable.join_target)] = join
        _set_config(joinable, JoinConfig(enable, throw, position == 0))


def put_outside(joinables: Sequence[Joinable]) -> None:
    """Record that these joinables are in no block any more."""
    for joinable in joinables:
        _blocks.pop(id(joinable), None)
        _blocks.pop(id(joinable.join_target), None)
        _set_config(joinable, JoinConfig.construct_disabled_join_config())


def _set_config(joinable: Joinable, config: JoinConfig) -> None:
    object.__setattr__(joinable, "_join_config", config)


@atexit.register
def _warn_of_open_blocks() -> None:
    if _blocks:
        warnings.warn(
            "a Join block was opened and not left, so that the other ranks wait for this one: call join.close()",
            stacklevel=1,
        )


def tell_not_entered(collective: Collective, error: BaseException) -> None:
    """Tell the other ranks, which wait for this one to enter, that it has failed; inside another block, that does."""
    if id(collective) not in channels:
        peers = Peers(collective, collective.next_block(), Progress)
        peers.post(error)
        peers.end()


class OpenBlock:
    """A block that this rank has entered and not left.

    Args:
        collective: the group.
        scope: the block's members and settings.

    Raises:
        JoinError: if it cannot be open now.
    """

    def __init__(self, collective: Collective, scope: Scope) -> None:
        self._collective, self._scope = collective, scope
        channel = channels.get(id(collective))
        if channel is None:
            channel = Channel(collective)
        channel.open(scope)
        channels[id(collective)] = self.channel = channel
        self._limit_before: timedelta | None = None  # of the group's operations
        self.undo = ExitStack()
        """What is to be done when the block is left, whatever happened in it: what was added last comes first."""
        self.undo.callback(self._close_channel)
        self.undo.callback(self._restore_limit)

    # -- entering -----------------------------------------------------------------------------------------------------

    def begin(self, entered_with: Sequence[str]) -> None:
        """Wait until all ranks have entered, and check that they list the same.

        Raises:
            ProtocolError: on all ranks, if they have not entered with the same.
        """
        try:
            with profiled("enter"):
                check_same(self._collective, "Join", entered_with, self.channel.guard.wait)
                self.channel.agree()
        except JoinError:
            raise
        except BaseException as error:  # of which this rank alone knows, while the others wait for it
            self.channel.guard.peers.post(error)
            raise
        if self._scope.timeout is not None:  # no burst begins before all ranks have come to it
            self._limit_before = self._collective.limit(timedelta(seconds=2 * self._scope.timeout))

    def attach(self, join: Any) -> None:
        """Attach the joinables, each to ``join``, whose block this is."""
        try:
            for member in self._scope.members:
                member.joinable.attach(join)
                self.undo.callback(member.joinable.detach)
        except BaseException as error:
            self._fail(error)
            raise

    def start(self) -> None:
        """Start the clocks; called right before the user's code runs."""
        self._tally = replace(self.channel.headers.tally)
        self._started = time.monotonic()
        for member in self._scope.members:
            member.times.start(self._started)

    def notify(self, caller: Any) -> Work | None:
        """Tell all ranks that this one is about to run a burst of ``caller``, if that announces; return the header.

        Args:
            caller: a joinable of the block, or what one stands for.

        Raises:
            TypeError: if what stands for it does not need to be told.
        """
        member = next(
            member
            for member in self._scope.members
            if member.joinable is caller or member.joinable.join_target is caller
        )
        joinable = member.joinable
        if joinable is not caller and member.burst is not None:
            raise TypeError(
                f"notify_join_context is not for a {type(caller).__name__}, which announces by itself; leave it out"
                " [J078]"
            )
        if member in self._scope.announcing:
            return self.channel.announce(joinable)
        self.channel.follow(joinable)
        return None

    # -- leaving ------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException | None, loops: Loops) -> JoinReport | None:
        """Take part in what others still do; called when the user's code has come to its end.

        Args:
            error: what the code has raised, if anything; it goes up after this.
            loops: those over ``Join.iterate``.

        Returns:
            What has happened on all ranks, if there was no error.
        """
        if error is not None:
            if loops.running is not None:
                loops.running.fail(error)
            self._fail(error)
            return None
        try:
            if loops.running is not None:
                loops.running.leave()
            ran_out = time.monotonic() if loops.joined_at is None else loops.joined_at
            return self._finish(self.channel.drain(), ran_out, loops)
        except BaseException as failure:
            self._fail(failure)  # others may wait for this rank
            raise

    def _fail(self, error: BaseException) -> None:
        """Leave the block with ``error``; raises what it comes of, if that is another rank's failure."""
        cause = self.channel.guard.fail(error)
        if cause is not None:
            raise cause from error

    def _finish(self, outcome: Outcome, ran_out: float, loops: Loops) -> JoinReport:
        """Synchronise state, and gather the report; called when all ranks have run out."""
        joined_at, ended_at = ran_out - self._started, time.monotonic() - self._started
        headers, members = self.channel.headers, self._scope.members
        if outcome.shadowed:
            self.channel.keeps_own_state = outcome.last
        else:
            outcome = self._compare(outcome)
            # If their steps differ, each rank has made steps of its own, and just one is taken over.
            self.channel.keeps_own_state = headers.leader == self._collective.rank
        self._restore_limit()  # state may take its time
        if not outcome.shadowed:
            for member in members:
                with profiled("synchronise", member.joinable.join_name):
                    member.joinable.synchronise_own(headers.leader)
        else:  # everything was shadowed, so everything is synchronised: also what belongs to a block around this one
            for member in self.channel.roster.listed:
                with profiled("synchronise", member.joinable.join_name):
                    member.joinable.synchronise(headers.leader)
        for member in members:
            member.hook.post_hook(outcome.last)
        spent, announcing = headers.tally.since(self._tally), self._scope.announcing
        busiest = max(announcing, key=lambda member: member.times.total + member.shadowed)  # the same on all ranks
        steps, shadowed = busiest.times.total, busiest.shadowed
        if not (steps or shadowed):  # on any rank: nothing in the loops' bodies is announced, as in an evaluation
            steps, shadowed = loops.steps
        row = RankReport(
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
        with profiled("report"):
            report = JoinReport.gather(self._collective, row, outcome.even)
        if len({row.headers for row in report.ranks}) > 1:
            raise ProtocolError(
                "other collectives ran on the group inside the block and were mistaken for this package's: ranks sent"
                f" {[row.headers for row in report.ranks]} headers. Run them after the block, or make them a joinable"
                " [J079]"
            )
        return report

    def _compare(self, outcome: Outcome) -> Outcome:
        """Ranks that ran out together may have made different numbers of steps that nobody announces.

        Raises:
            ProtocolError: if they have made the same, and do not hold the same.
        """
        joinables = [member.joinable for member in self._scope.members]
        values = values_of(joinables)
        own = torch.tensor([*(joinable.own_steps for joinable in joinables), digest_of(values)], device="cpu")
        ranks = [cast("list[int]", row.tolist()) for row in self._collective.all_gather(own)]
        made = [row[:-1] for row in ranks]
        if made.count(made[0]) == len(made):
            if ranks.count(ranks[0]) < len(ranks):
                raise_difference(self._collective, values)
            return outcome
        most = max(made, key=sum)
        self.channel.headers.leader = made.index(most)
        return Outcome(even=False, last=made[self._collective.rank] == most, shadowed=True)

    def _restore_limit(self) -> None:
        if self._limit_before is not None:
            self._collective.limit(self._limit_before)
            self._limit_before = None

    def _close_channel(self) -> None:
        if self.channel.close(self._scope):
            del channels[id(self._collective)]
