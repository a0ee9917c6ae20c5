"""Protocol that keeps the ranks of one process group in step: :class:`Channel`, and :class:`Lockstep` for its loops.

A rank is *active* while it runs the body of a ``Join`` block and *joined* once it has run out of inputs. In a plain
block every burst of collectives is announced by one header (``join.protocol.headers``), and all ranks run the burst::

    active rank                                    joined rank
    -----------                                    -----------
    announce: apply the previous header            apply the previous header
              header  (starts; awaited if it       header  (awaited)
              announces what was not expected)
    the burst, by the user's own code              main_hook of the announced burst
    its followers, by the user's own code          main_hooks of its followers
    ...                                            ... until a header shows that no rank is active
    leave:    the burst that is still pending
              apply the previous header

Applying a header elects a new leader, by one more all-reduce, if the old one has left and any burst needs a leader.
Under ``throw_on_early_termination`` each header is awaited before its burst. So it is under ``timeout``, but for DDP's
and ZeRO's, whose collectives break; that of a backward is awaited before the reducer waits for gradients.

In a loop over ``Join.iterate`` all ranks run the same body equally often, with or without data, so every rank issues
its collectives itself: no burst is announced and none is shadowed. The loop's own roll calls (``join.loop``) say which
ranks have data in a step, so the channel computes what headers would report::

    rank with data                                 rank without data
    --------------                                 -----------------
    begin:  header (nothing is announced)          the same
    step:   the body, by the user's own code       the body, on a dummy batch
    ...                                            ...

With a ``timeout``, all ranks meet before each step, and again before each burst. ``join.protocol.progress`` finds ranks
that do not run the same body.

*Pending bursts.* A burst may be announced before it runs. Until then it is pending (``Burst.is_pending``); a rank that
is about to announce another burst, or to leave, first flushes the pending one: it runs the burst and contributes
nothing. A rank that fails sends nothing more (``join.failure``).

Blocks that are open at the same time on one group share one channel: its bursts are those of all of them.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from join.agreement import Values, check_equal, values_of
from join.batch import Step
from join.collectives import Collective, Work
from join.collectives._torch_private import profiled
from join.collectives.base import BARRIERS, DONE, ROLL_CALLS, SUMS
from join.collectives.board import Progress
from join.collectives.timeouts import timeouts
from join.errors import JoinError, JoinTimeoutError, PeerError, ProtocolError
from join.failure.guard import Guard
from join.joinable import Burst, Joinable
from join.protocol.headers import FRESH, STOPPING, Header, Headers, LastHeader, Member, Roster, Scope
from join.protocol.progress import LateUse, LoopProgress
from join.report.rank_report import BINS, EDGES
from join.scaling import Scaling
from join.transfer import OwnTensors

ONE_AT_A_TIME = (
    "one loop over join.iterate in another, on the same process group, is not possible. Run the inner one before or"
    " after the outer one, or without join.iterate: an evaluation with DDP communicates nothing [J090]"
)


@dataclass(frozen=True)
class Outcome:
    """How a block ended.

    Attributes:
        even: whether all ranks ran out of inputs together.
        last: whether this rank was among the last.
        shadowed: whether ranks have shadowed bursts of others, so that their state is stale.
    """

    even: bool
    last: bool
    shadowed: bool


@dataclass(frozen=True)
class LastLoop:
    """The last loop over ``Join.iterate``.

    Attributes:
        place: where this rank was at its end.
        uneven: whether some ranks ran out before others.
        source: the lowest rank that had data in the last burst, or step.
        had_data: whether this rank had.
        headers: the count of headers at the end of the loop. While that is still the count, nothing came after it.
    """

    place: Progress = field(default_factory=Progress)
    uneven: bool = False
    source: int = 0
    had_data: bool = True
    headers: int = 0


class Channel:
    """The protocol on one group, for all blocks that are open on it.

    Args:
        collective: the group.
    """

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.roster = Roster((), collective.world_size)
        self.guard = Guard(collective, self.progress, self._look)
        self.headers = Headers(collective, self.guard, self.roster)
        self.scaling = Scaling()
        self.lockstep: Lockstep | None = None
        """The loop over ``Join.iterate`` that is under way, in which all ranks run every burst themselves."""
        self.step = Step()
        """The step of a loop over ``Join.iterate`` that is under way."""
        self.is_in_loop_body = False
        """Whether this rank is in the body of such a loop, and has not broken out of it."""
        self.loops = 0
        """How many such loops have begun."""
        self.late_use: LateUse | None = None
        """In a loop and after it: looks for consumers that read ahead of the loop's body, until that is ruled out."""
        self.has_run_out = False
        """Whether this rank has left the body of a block without an exception, and shadows the bursts of others."""
        self.keeps_own_state = True
        """At the end of a block: whether this rank was among the last that had data, or has made the most steps."""
        self._outstanding: list[Member] = []  # followers that have not acted since the last announcement
        self._shadowed: Joinable | None = None  # whose main_hook runs
        self._last_loop = LastLoop()

    # -- blocks -------------------------------------------------------------------------------------------------------

    def open(self, scope: Scope) -> None:
        """Let the members of a block that is entered announce, after what is under way has come to an end."""
        is_first = not self.roster.scopes
        roster = Roster((*self.roster.scopes, scope), self.collective.world_size)
        if is_first:
            self.guard.begin()
        self.prepare()
        if not self.headers.last.is_applied:
            self.headers.apply(self.headers.last, self.elect)
        if self._outstanding and (error := self._left_out_error("another block was entered")):
            self.guard.raise_alone(error)
        self._set_roster(roster)

    def agree(self) -> None:
        """Find out what carries messages; called when all ranks have entered the group's first block."""
        self.headers.agree()
        self._sums = self.collective.line(SUMS)
        self.guard.peers.use(self.collective.board())

    def close(self, scope: Scope) -> bool:
        """Take out the members of a block that is left; return whether it was the last one of the group."""
        self.has_run_out = False  # of a block around this one
        scopes = tuple(other for other in self.roster.scopes if other is not scope)
        self._set_roster(Roster(scopes, self.collective.world_size))
        for member in scope.announcing:  # or they and the last header hold each other
            member.announced_in = LastHeader()
        if not scopes:
            self.headers.last = LastHeader()
            self.guard.end()
        return not scopes

    def _set_roster(self, roster: Roster) -> None:
        self.roster = roster
        self.headers.use(roster)
        self.guard.timeout = roster.timeout
        self._outstanding = []

    def _place(self) -> Progress:
        """Return where this rank is in a loop, or was in the last one."""
        return self._last_loop.place if self.lockstep is None else self.lockstep.progress.place()

    def _look(self) -> None:
        """Raise an error if this rank, which waits, has left out a burst that others run in a loop."""
        if self.lockstep is not None:
            self.lockstep.progress.look_for_left_out(self.guard.peers.ask())

    def progress(self) -> Progress:
        """Return how far this rank is, for others that wait for it; called in another thread."""
        headers, place = self.headers.tally.headers, self._place()
        sender = self.headers.last.member
        doing = "has announced nothing" if sender is None else f"announced {sender.joinable.join_name}"
        doing = f"{'has run out of inputs' if self.has_run_out else doing} (header {headers})"
        return place._replace(headers=headers, doing=self.guard.doing or doing)

    # -- the active side ----------------------------------------------------------------------------------------------

    def announce(self, joinable: Joinable) -> Work:
        """Tell all ranks that this rank is about to run a burst of ``joinable``; return the header's sum, under way.

        Args:
            joinable: an announcing member.
        """
        if self.lockstep is not None and self.lockstep.leave is not None:
            self.lockstep.leave()
        if self._shadowed is not None:
            self._refuse_in_main_hook(joinable, self._shadowed)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._refuse_in_graph(joinable)
        index = self.roster.index[id(joinable)]
        member = self.roster.announcing[index]
        self.prepare(joinable)
        if not member.interjects:
            if self._outstanding and (error := self._left_out_error(f"{joinable.join_name} announced")):
                self.guard.raise_alone(error)
            self._outstanding = list(member.followers)
        if self.step.shadowing:
            member.shadowed += 1
        else:
            now = time.monotonic()
            took, member.announced_at = now - member.announced_at, now
            member.times[bisect(EDGES, took, 1, BINS) - 1] += 1
        if self.lockstep is not None:
            self.lockstep.announce(member, index)
            return DONE
        headers = self.headers
        work = headers.send((), index)
        if index != headers.last.expected or self.roster.throws:
            headers.confirm()  # before anything else, which ranks that run what is expected would not take part in
        elif index in self.roster.awaited:
            headers.read()
        if headers.depth > 1:
            headers.apply_before(self.elect, index)
        return work

    def follow(self, joinable: Joinable) -> None:
        """Note that a follower is about to run its burst."""
        if self._shadowed is not None:
            self._refuse_in_main_hook(joinable, self._shadowed)
        self.end_broken_loop()
        if self.guard.closed:
            self.guard.raise_closed()
        self.flush(complete=False)
        for member in self._outstanding:
            if member.joinable is joinable:
                self._outstanding.remove(member)
                return
        if self.lockstep is None:  # in a loop, followers may be left out
            why = (
                f"{joinable.join_name} follows another joinable, but notified without an announcement of that one"
                " before it. Call it once after each burst of the joinable before it in the list, put it first, or"
                " derive it from join.Burst [J082]"
            )
            self.guard.raise_alone(JoinError(why))

    def _refuse_in_main_hook(self, joinable: Joinable, shadowed: Joinable) -> NoReturn:
        raise JoinError(
            f"the main_hook of {shadowed.join_name} announced {joinable.join_name}. A main_hook issues the collectives"
            " of a burst that another rank has announced, and announces nothing itself: call what communicates in it,"
            " and not what calls notify_join_context [J080]"
        )

    def _refuse_in_graph(self, joinable: Joinable) -> NoReturn:
        error = JoinError(
            f"{joinable.join_name} is captured in a CUDA graph, whose replays announce nothing: the other ranks would"
            " wait for ever. Run it without a graph in the block, or capture parts of it that do not communicate"
            " (torch.cuda.make_graphed_callables on a submodule) [J502]"
        )
        self.guard.raise_alone(error)

    def _left_out_error(self, event: str) -> JoinError | None:
        """The error for members that did not notify before an ``event``; ``None`` in a loop, where they need not."""
        if self.lockstep is not None:
            return None
        missing = ", ".join(follower.joinable.join_name for follower in self._outstanding)
        return JoinError(
            f"{event} before {missing} notified. A joinable that follows another must notify once after each of its"
            " bursts; one that keeps its own time comes first in the list, or derives from join.Burst; one without"
            " collectives in the loop has communicates = False [J081]"
        )

    def prepare(self, but: Joinable | None = None) -> None:
        """Flush pending bursts, and apply the last header; called before anything else is announced."""
        if self.guard.closed:
            self.guard.raise_closed()
        for burst in self.roster.may_be_pending:
            if burst.is_pending and burst is not but:
                self.flush(but)
        headers = self.headers
        if headers.depth > 1:
            headers.apply_due(self.elect)
        elif not headers.last.is_applied:
            headers.apply(headers.last, self.elect)

    def flush(self, but: Joinable | None = None, *, complete: bool = True) -> None:
        """Run pending bursts, and, if ``complete``, the followers that go with them."""
        flushed = False
        for burst in self.roster.may_be_pending:
            if burst.is_pending and burst is not but:
                burst.fulfil()
                flushed = True
        if flushed and complete:
            self.complete_followers()

    def complete_followers(self) -> None:
        """Run the followers that have not acted since the last announcement."""
        outstanding, self._outstanding = self._outstanding, []
        for follower in outstanding:
            self._run_main_hook(follower)

    # -- the joined side ----------------------------------------------------------------------------------------------

    def drain(self) -> Outcome:
        """Take part in the bursts of others until all ranks are out of data.

        Raises:
            EarlyTerminationError: if another rank is active under ``throw_on_early_termination``.
            PeerError, ProtocolError, JoinTimeoutError: as for active ranks.
        """
        self.has_run_out = True
        self.prepare()
        if self._outstanding and (error := self._left_out_error("the block ended")):
            raise error
        loop, headers = self._last_loop, self.headers.tally.headers
        outcome = self._shadow_all()
        if outcome.even and loop.uneven and loop.headers == headers:
            # Everybody has made every step, on dummies where there was no data.
            self.headers.leader = loop.source
            return Outcome(even=False, last=loop.had_data, shadowed=False)
        return outcome

    def _shadow_all(self) -> Outcome:
        headers = self.headers
        fresh, throws = True, self.roster.throws
        while True:
            fields = [FRESH] if fresh else []
            header = headers.exchange([*fields, STOPPING] if throws else fields)
            if header.active == 0:
                headers.last.is_applied = True
                headers.apply_before(self.elect)
                even = header.fresh == self.collective.world_size
                return Outcome(even=even, last=fresh, shadowed=not even)
            if throws:
                self.guard.raise_early_termination(exhausted=True)
            fresh = False
            self._shadow(header)
            self.prepare()

    def _shadow(self, header: Header) -> None:
        """Run the bursts that ``header`` announces, and contribute nothing; their followers too, unless they wait."""
        if header.diverged:
            self.headers.check()
        for index in header.announcements:
            if self.headers.depth > 1:
                self.headers.apply_before(self.elect, index)
            member = self.roster.announcing[index]
            member.shadowed += 1
            self._run_main_hook(member)
            self._outstanding += member.followers
            for _, burst in self.roster.bursts:
                if burst.holds_followers:  # an interjecting burst comes before them
                    break
            else:
                self.complete_followers()

    def _run_main_hook(self, member: Member) -> None:
        around, self._shadowed = self._shadowed, member.joinable
        try:
            with profiled("shadow", member.joinable.join_name):
                member.hook.main_hook()
        finally:
            self._shadowed = around

    # -- loops over Join.iterate --------------------------------------------------------------------------------------

    def begin_loop(self) -> Lockstep:
        """Begin a loop on all ranks: one header, awaited.

        Raises:
            JoinError: in the middle of another loop.
            ProtocolError: on all ranks, if some do something else.
            PeerError: if a rank has failed.
        """
        if self.guard.closed:
            self.guard.raise_closed()
        self.end_broken_loop()
        if self.lockstep is not None:
            raise JoinError(ONE_AT_A_TIME)
        self.prepare()
        world_size = self.collective.world_size
        header = self.headers.exchange([], active=True)
        if header.announcements:
            self.headers.confirm()
        if header.active < world_size:
            self.guard.raise_alone(
                ProtocolError(
                    f"{header.active} ranks began a loop over join.iterate, and {world_size - header.active} had left"
                    " the block. Also a rank without batches loops over join.iterate [J091]"
                )
            )
        self.prepare()
        self.loops += 1
        self.late_use = LateUse(self.collective.rank)
        self._outstanding = []
        self.lockstep, self.is_in_loop_body = Lockstep(self), True
        self.step = Step(contributors=self.collective.world_size)
        return self.lockstep

    def end_loop(self, *, source: int, had_data: bool, uneven: bool) -> None:
        """End the loop, after its last step on all ranks.

        Only buffers and the like are copied, which each rank has for itself. State that all should hold alike is
        compared.

        Args:
            source: the lowest rank that had data in the last burst, or step.
            had_data: whether this rank had.
            uneven: whether some ran out before others.

        Raises:
            ProtocolError: on all ranks, if they hold different values.
        """
        place = self._place()
        self.lockstep, self.is_in_loop_body, self.step = None, False, Step()
        if self.late_use is not None:
            self.late_use.has_ended = True
        self._last_loop = LastLoop(place, uneven, source, had_data, self.headers.tally.headers)
        self._outstanding = []  # in a loop, a follower may be left out
        listed = [member.joinable for member in self.roster.listed]
        self.check_equal(values_of(listed))
        tensors = [tensor for joinable in listed for tensor in joinable.own_tensors()]
        self.synchronise_own(OwnTensors(self.collective, tensors, source, ()), listed, source)

    def check_equal(self, values: Values) -> None:
        """Make sure that all ranks hold the same values; called at the same place on all.

        Raises:
            ProtocolError: on all ranks, if they do not.
        """
        try:
            check_equal(self.collective, values, self.guard.wait)
        except ProtocolError as error:
            self.guard.raise_on_all(error)

    def synchronise_own(self, tensors: OwnTensors, joinables: Sequence[Joinable], source: int) -> None:
        """Copy what each rank has for itself, from rank ``source``, where nothing was shadowed."""
        with profiled("copy"):
            tensors.receive()
        for joinable in joinables:
            with profiled("synchronise", joinable.join_name):
                joinable.synchronise_own(source)

    def end_broken_loop(self) -> None:
        """Leave with all other ranks the loop that this rank has broken out of, if any."""
        if self.lockstep is not None and self.lockstep.leave is not None:
            self.lockstep.leave()

    def module_called(self) -> None:
        """Check that a module may be called here, before it sends anything; see :meth:`LateUse.called`."""
        if self.late_use is not None:
            self.late_use.called()
            if self.late_use.is_ruled_out:
                self.late_use = None

    # -- for joinables ------------------------------------------------------------------------------------------------

    def sum(self, number: float) -> Callable[[], float]:
        """Start summing a number over all ranks, amid the collectives of a burst; the function returned waits for it.

        Beside the collectives of the group where ranks have a line of their own, else among them.
        """
        work = self._sums.sum_float(number)

        def total() -> float:
            self.guard.wait(work, "sums weights or contributors")
            return work.total()

        return total

    def elect(self, candidate: bool) -> int:
        """Return the lowest rank among the candidates; ``candidate`` says whether this rank is one."""
        if self.lockstep is not None:
            return self.step.first_with_data
        rank, world_size = self.collective.rank, self.collective.world_size
        vote = torch.tensor([rank if candidate else world_size], device="cpu")
        with profiled("elect a leader"):
            self.collective.all_reduce(vote, "min").wait()
        return int(vote.item())

    def find_leader(self) -> int:
        """Return the leader from the last header's burst on; called at the same place on all ranks."""
        return self.headers.find_leader(self.elect)

    def leader_for(self, burst: Burst) -> int:
        """Return the leader as far as all know that run ``burst``, as of :meth:`Headers.active_for`."""
        foreseen = self.headers.is_foreseen(self.roster.index[id(burst)])
        return self.headers.leader if foreseen else self.find_leader()


class Lockstep:
    """One loop over ``Join.iterate`` on a process group, whose ranks all run every burst, on dummies without data.

    Args:
        channel: the group's.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._guard = channel, channel.guard
        self.progress = LoopProgress(channel.collective, channel.loops)
        """How far this rank is in the loop."""
        self.leave: Callable[[], None] | None = None
        """Leaves with all others the loop that this rank has broken out of, before anything is announced."""
        self.last_burst: tuple[int, bool] | None = None
        """Of the last burst: the lowest rank with data in it, and whether this one had data."""
        self.is_uneven = False
        """Whether some rank had no data in the last step in which others had."""
        collective = channel.collective
        self._meetings = collective.line(BARRIERS)
        self.barrier = None if self._guard.timeout is None else self._meetings
        """The line on which all ranks wait for each other, with a ``timeout``."""
        self.roll_calls = collective.line(ROLL_CALLS)
        """The line on which the loop's roll calls are held."""
        for line in (self.roll_calls, self._meetings):  # and all ranks meet once more before they use them
            line.restart()

    def announce(self, member: Member, index: int) -> None:
        """Note that all ranks run a burst of ``member`` now. Nothing is sent, since all know what a header would say.

        Args:
            member: an announcing one.
            index: its place in the roster.
        """
        step, headers = self._channel.step, self._channel.headers
        if not member.interjects:
            self.progress.begun, self.progress.last = self.progress.begun + 1, member
        if self.barrier is not None:
            self.wait_for_all(f"announced {member.joinable.join_name} in step {step.number} of join.iterate")
        self.last_burst = step.first_with_data, step.has_data
        # Not always: lower ranks come back in a second loop.
        headers.set_announced_by_all(index, leader_alive=headers.leader == step.first_with_data)

    def wait_for_all(self, doing: str) -> None:
        """With a ``timeout``, wait for all ranks: roll calls are a step late, and a rank that sleeps is to be found."""
        assert self.barrier is not None
        self._guard.arrive()
        self._guard.wait(self.barrier.sum(0, 1), doing)

    def end_step(self) -> None:
        """End a step: first run a backward that this rank has skipped, since the others wait in it."""
        self._channel.prepare()
        progress = self.progress
        progress.ended, progress.begun_by_then = progress.steps, progress.begun

    def meet(self) -> None:
        """End the step with all ranks: what communicates next does not know of the loop, or who left something out.

        Raises:
            ProtocolError: on this rank, if it left something out of the step; on the others, PeerError.
        """
        self.end_step()
        self._guard.wait(self._meetings.sum(0, 1), f"ended step {self.progress.steps} of join.iterate")

    def end(self) -> None:
        """All ranks leave the loop together."""
        self.end_step()
        step = self._channel.step
        source, had_data = self.last_burst or (step.first_with_data, step.has_data)
        self._channel.end_loop(source=source, had_data=had_data, uneven=self.is_uneven)

    # -- left by ``break`` --------------------------------------------------------------------------------------------

    def mark_broken(self, leave: Callable[[], None]) -> None:
        """Note that this rank left the body by ``break``; ``leave`` is called before anything else is announced."""
        self.leave = leave
        self._channel.is_in_loop_body = self._channel.step.shadowing = False

    def return_to_body(self) -> None:
        """Take the loop up again in the step in which it was broken, to leave it with the others or to fail there."""
        self.leave = None
        self._channel.is_in_loop_body, self._channel.step.shadowing = True, not self._channel.step.has_data

    def agree_to_leave(self) -> None:
        """Wait until all ranks have left the loop, before its end, at the same place.

        Raises:
            ProtocolError: if this rank has left alone.
            PeerError: if another one has, or has failed, or is gone.
            JoinTimeoutError: if another one does not arrive within ``timeout``.
        """
        try:
            with profiled("wait"):
                self._wait_until_all_have_left()
        except (PeerError, JoinTimeoutError) as error:
            self._guard.raise_on_all(error)  # the others know of it, or this rank has told them

    def _wait_until_all_have_left(self) -> None:
        peers, timeout = self._guard.peers, self._guard.timeout
        pause, started = 1e-3, time.monotonic()
        while True:
            others = peers.ask()
            self.progress.look_for_left_out(others)
            if self.progress.all_have_left_here(others):
                return
            peers.look()
            peers.look_for_silent(others)
            if timeout is not None and time.monotonic() - started > timeout:
                raise self._guard.timeout_error()
            time.sleep(pause)
            pause = min(2 * pause, timeouts().look)
