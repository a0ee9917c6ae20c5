"""One block on this rank, from entering it to leaving it: :class:`OpenBlock`.

What all ranks do on entering and on leaving, in this order::

    enter    the first block of a group: one all-reduce: do all ranks list the same? (``join.agreement``); and what
                carries headers (shared memory: an object broadcast and an all-reduce)
             later ones: a sum on the line of headers tells; it is awaited before the first header
             joinables attach (a pending bucket rebuild of DDP is done now)
    exit     drain: headers and shadowed bursts until nobody is active
             an all-gather on the line of headers: who was last, a digest of what should be equal
                (``join.agreement``) and of the steps that each rank has made, and the report
             meanwhile, if nothing was shadowed: a broadcast of what each rank has for itself (``OwnTensors``)
             ranks whose steps differ are uneven, too
             uneven: one copy of all state from a last joiner (``join.transfer``), each joinable's ``synchronise``
             else: tensors of other sizes than last time, each joinable's ``synchronise_own``
             each hook's ``post_hook``

All of it is the same on an active and on a joined rank, which has no other rank to wait for by then.

*Entering does not wait.* A block that is entered with what an earlier one on the group was entered with
(``Collective.agreed``) sends its digest and goes on; it waits for those of others when it sends its first header. Only
then may a burst begin, and ranks that list different objects have sent nothing that could be mistaken. Other blocks,
and those inside others, wait at once.
"""

from __future__ import annotations

import atexit
import struct
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from join.agreement import Values, check_same, digest, digest_of, raise_difference, start_check, values_of
from join.collectives import Collective, Work
from join.collectives._torch_private import profiled
from join.collectives.board import Progress
from join.errors import JoinError, ProtocolError
from join.failure.peers import Peers
from join.joinable import Joinable, JoinConfig
from join.loop import Loops
from join.protocol.channel import Channel, Outcome
from join.protocol.headers import Scope
from join.report import JoinReport, RankReport
from join.transfer import Exchange, OwnTensors, copy_state

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


class _End(NamedTuple):
    """What a rank tells when all have run out, ahead of its row of the report.

    Attributes:
        last: whether it was among the last that had data.
        headers: how many headers it sent.
        total_steps: if nothing was shadowed, how many steps it made by itself (``Joinable.own_steps``),
        own_steps: and a digest of how many with each joinable,
        values: and a digest of what all ranks should hold alike.
    """

    last: bool
    headers: int
    total_steps: int = 0
    own_steps: int = 0
    values: int = 0


_END = struct.Struct("<?4q")


def _report_of(rows: Sequence[bytes], even: bool) -> JoinReport:
    return JoinReport(tuple(RankReport.of(rank, row[_END.size :]) for rank, row in enumerate(rows)), even)


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
        """Check that all ranks list the same; wait for that if it is new, else before the first header.

        Raises:
            ProtocolError: on all ranks, if they have not entered with the same.
        """
        collective, channel, agreed = self._collective, self.channel, self._collective.agreed
        self._digest = digest("\n".join(entered_with))
        is_first = not agreed
        try:
            with profiled("enter"):
                if is_first:
                    check_same(collective, "Join", entered_with, channel.guard.wait)
                channel.agree()
                if not is_first:
                    check = start_check(collective, channel.headers.line, "Join", entered_with, channel.guard.wait)
                    if self._digest in agreed and len(channel.roster.scopes) == 1:
                        channel.headers.before_next = check
                    else:
                        check()
                agreed.setdefault(self._digest, ())
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
            member.announced_at = self._started

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

    def end(self, error: BaseException | None, loops: Loops) -> Callable[[], JoinReport] | None:
        """Take part in what others still do; called when the user's code has come to its end.

        Args:
            error: what the code has raised, if anything; it goes up after this.
            loops: those over ``Join.iterate``.

        Returns:
            Tells what has happened on all ranks, if there was no error.
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

    def _finish(self, outcome: Outcome, ran_out: float, loops: Loops) -> Callable[[], JoinReport]:
        """Gather the report, and synchronise state; called when all ranks have run out."""
        headers, collective = self.channel.headers, self._collective
        row = self._row(ran_out, loops)
        joinables = [member.joinable for member in self._scope.members]
        end, values = _End(outcome.last, row.headers), list[tuple[str, Mapping[str, Any]]]()
        if not outcome.shadowed:
            values, own_steps = values_of(joinables), [joinable.own_steps for joinable in joinables]
            end = end._replace(total_steps=sum(own_steps), own_steps=digest(repr(own_steps)), values=digest_of(values))
        work = headers.line.gather(_END.pack(*end) + row.packed())
        own: OwnTensors | None = None
        if not outcome.shadowed:
            tensors = [tensor for joinable in joinables for tensor in joinable.own_tensors()]
            own = OwnTensors(collective, tensors, headers.leader, collective.agreed[self._digest])
        with profiled("compare"):
            self.channel.guard.wait(work, "has left its block")
        rows = work.rows()
        outcome = self._compare(outcome, [_End(*_END.unpack_from(row)) for row in rows], values)
        self._restore_limit()  # state may take its time
        if own is None or outcome.shadowed:
            self._copy_all(headers.leader)
        else:
            collective.agreed[self._digest] = own.layout
            self.channel.synchronise_own(own, joinables, headers.leader)
        for member in self._scope.members:
            member.hook.post_hook(outcome.last)
        return partial(_report_of, rows, outcome.even)

    def _row(self, ran_out: float, loops: Loops) -> RankReport:
        """Return this rank's row of the report."""
        joined_at, ended_at = ran_out - self._started, time.monotonic() - self._started
        spent, announcing = self.channel.headers.tally.since(self._tally), self._scope.announcing
        busiest = max(announcing, key=lambda member: sum(member.times) + member.shadowed)  # the same on all ranks
        steps, shadowed = sum(busiest.times), busiest.shadowed
        if not (steps or shadowed):  # on any rank: nothing in the loops' bodies is announced, as in an evaluation
            steps, shadowed = loops.steps
        sent, times = (spent.idle, spent.headers, spent.nbytes), tuple(busiest.times)
        return RankReport(self._collective.rank, steps, shadowed, joined_at, ended_at, *sent, times)

    def _compare(self, outcome: Outcome, ends: Sequence[_End], values: Values) -> Outcome:
        """Find out from whom state is copied, if from anybody: ranks that ran out together may have made other steps.

        Raises:
            ProtocolError: if ranks have made the same steps, and do not hold the same.
        """
        if len({end.headers for end in ends}) > 1:
            raise ProtocolError(
                "other collectives ran on the group inside the block and were mistaken for this package's: ranks sent"
                f" {[end.headers for end in ends]} headers. Run them after the block, or make them a joinable [J079]"
            )
        headers, rank = self.channel.headers, self._collective.rank
        if outcome.shadowed:
            self.channel.keeps_own_state = outcome.last
            headers.leader = next(rank for rank, end in enumerate(ends) if end.last)
        elif len({end.own_steps for end in ends}) > 1:  # steps that nobody announces
            headers.leader = max(range(len(ends)), key=lambda rank: ends[rank].total_steps)
            # Each rank has made steps of its own, and just one is copied.
            self.channel.keeps_own_state = headers.leader == rank
            last = ends[rank].own_steps == ends[headers.leader].own_steps
            return Outcome(even=False, last=last, shadowed=True)
        elif len({end.values for end in ends}) > 1:
            raise_difference(self._collective, values)
        return outcome

    def _copy_all(self, source: int) -> None:
        """Copy all state, also of a block around this one: everything was shadowed."""
        listed, exchanges = self.channel.roster.listed, list[tuple[str, Exchange]]()
        for member in listed:
            exchange = member.joinable.exchange(source)
            if exchange is not None:
                exchanges.append((member.joinable.join_name, exchange))
        if exchanges:
            with profiled("copy"):
                copy_state(self._collective, exchanges, source, self.channel.roster.devices())
        for member in listed:
            with profiled("synchronise", member.joinable.join_name):
                member.joinable.synchronise(source)

    def _restore_limit(self) -> None:
        if self._limit_before is not None:
            self._collective.limit(self._limit_before)
            self._limit_before = None

    def _close_channel(self) -> None:
        if self.channel.close(self._scope):
            del channels[id(self._collective)]
