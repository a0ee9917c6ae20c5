"""What keeps the ranks of one group in step: :class:`Channel`.

A rank is *active* while it runs the body of a ``Join`` block and *joined* once it has run out of inputs. Every burst of
collectives is announced, and what was announced is run by everybody. How ranks learn of announcements is the mode's
business (``join.protocol.mode``); here stands what is the same in all modes.

*Pending bursts.* A burst may be announced before it runs. Until then it is pending (``Burst.is_pending``); whoever is
about to announce something else, or to leave, runs it first with nothing to say: it is flushed. A rank that fails sends
nothing more (``join.failure.peers``).

Blocks that are open at the same time on one group share one channel: its bursts are those of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

from join.agreement import check_equal, values_of
from join.batch import Step, StepBatch
from join.collectives import Collective, Work
from join.collectives._torch_private import profiled
from join.collectives.board import Progress
from join.errors import JoinError, ProtocolError
from join.failure.guard import Guard
from join.joinable import Burst, Joinable
from join.protocol.header import Header
from join.protocol.headers import Headers
from join.protocol.late_use import LateUse
from join.protocol.members import Member, Roster, Scope
from join.protocol.mode import Mode, Outcome
from join.scaling import Scaling


def _asks(part: str) -> Any:
    """A property that reads an attribute of a part of the channel, without a call of a function in Python."""
    return property(attrgetter(part))


@dataclass(frozen=True)
class UnevenLoop:
    """The last loop over ``Join.iterate``, in which some ranks ran out before others.

    Attributes:
        source: the lowest rank that had data in the last step.
        had_data: whether this rank had.
        headers: the count of headers at the end of the loop. While that is still the count, nothing came after it.
    """

    source: int
    had_data: bool
    headers: int


class Channel:
    """The protocol on one group, for all blocks that are open on it: a :class:`join.joinable.BlockChannel`.

    Args:
        collective: the group.
        make_mode: makes the mode of its blocks; loops over ``Join.iterate`` put another one in its place.
    """

    # Asked by joinables at every step, in which each call of a function in Python would cost a microsecond.
    leader: int = _asks("headers.leader")
    closed: str = _asks("guard.closed")
    is_in_loop_body: bool = _asks("mode.is_in_loop_body")
    all_ranks_run_bursts: bool = _asks("mode.all_ranks_run_bursts")
    step: Step = _asks("mode.step")

    late_use: LateUse | None = None
    """In a loop and after it: looks for consumers that read ahead of the loop's body, until that is ruled out."""

    def __init__(self, collective: Collective, make_mode: Callable[[Channel], Mode]) -> None:
        self.collective = collective
        self.has_run_out = False
        """Whether this rank has left the body of a block without an exception, and shadows what others do."""
        self.loop = 0
        """The number of the loop over ``Join.iterate``; of the last one, outside."""
        self.roster = Roster((), collective.world_size)
        self.guard = Guard(collective, self.progress, lambda: self.mode.look())
        self.headers = Headers(collective, self.guard, self.roster)
        self.read, self.confirm, self.flags = self.headers.read, self.headers.confirm, self.headers.flags
        self.when_led = self.headers.when_led
        self.announced, self.all_announced = self.headers.announced, self.headers.all_announced
        self.ran_out_last = True
        """At the end of a block: whether this rank was among the last that had data."""
        self._use(make_mode(self))
        self._outstanding: list[Member] = []  # followers that have not acted since the last announcement
        self._shadows: Joinable | None = None  # whose main_hook runs
        self._place = Progress()  # where this rank was at the end of the last loop
        self.scaling = Scaling()
        self._uneven_loop: UnevenLoop | None = None

    # -- blocks -------------------------------------------------------------------------------------------------------

    def open(self, scope: Scope) -> None:
        """Let the members of a block that is entered announce, after what is under way has come to an end."""
        is_first = not self.roster.scopes
        roster = Roster((*self.roster.scopes, scope), self.collective.world_size)
        if is_first:
            self.guard.begin()
        self.prepare()
        self._arrange(roster)

    def agree(self) -> None:
        """Exchange what ranks must know of each other; called when all have entered."""
        self.headers.agree()
        self._sums = self.collective.sums()
        self.guard.peers.use(self.collective.board())

    def close(self, scope: Scope) -> bool:
        """Take out the members of a block that is left; return whether it was the last one of the group."""
        self.has_run_out = False  # of a block around this one
        left = tuple(each for each in self.roster.scopes if each is not scope)
        self._arrange(Roster(left, self.collective.world_size))
        if not left:
            self.headers.announced_by_me = None
            self.guard.end()
        return not left

    def _arrange(self, roster: Roster) -> None:
        self.roster = self.headers.roster = roster
        self.guard.timeout = roster.timeout
        self._outstanding = []

    def _use(self, mode: Mode) -> None:
        self.mode = mode
        self.announces_in_forward = mode.announces_in_forward

    def progress(self) -> Progress:
        """How far this rank is, for others who wait for it; called in another thread."""
        headers, place = self.headers.tally.headers, self.mode.place() or self._place
        sender = self.headers.announced_by_me
        doing = "has run out of inputs" if sender is None else f"announced {sender.joinable.join_name}"
        return place._replace(headers=headers, doing=self.guard.doing or f"{doing} (header {headers})")

    # -- the active side ----------------------------------------------------------------------------------------------

    def announce(self, joinable: Joinable, *, confirm: bool = True) -> Work:
        """Tell all ranks that this rank is about to run a burst of ``joinable``; the header's sum, under way.

        Args:
            joinable: an announcing member.
            confirm: whether to read the header at once where its verdict matters; a burst that does something between
                its announcement and its collectives passes ``False`` and calls :meth:`confirm` itself.
        """
        if self.mode.leave_broken_loop is not None:
            self.mode.leave_broken_loop()
        if self._shadows is not None:
            self._refuse_in_main_hook(joinable, self._shadows)
        index = self.roster.index[id(joinable)]
        member, mode = self.roster.announcing[index], self.mode
        self.prepare(joinable)
        if not member.interjects:
            if self._outstanding and (left_out := self._left_out_error(joinable)):
                self.guard.break_off(left_out)
            self._outstanding = list(member.followers)
        if mode.step.shadowing:
            member.shadowed += 1
        else:
            member.times.step(time.monotonic())
        return mode.announce(index, confirm=confirm)

    def follow(self, joinable: Joinable) -> None:
        """Note that a follower is about to run its burst."""
        if self._shadows is not None:
            self._refuse_in_main_hook(joinable, self._shadows)
        self.end_broken_loop()
        if self.guard.closed:
            self.guard.raise_closed()
        self.flush(complete=False)
        for member in self._outstanding:
            if member.joinable is joinable:
                self._outstanding.remove(member)
                return
        if not self.mode.all_ranks_run_bursts:  # in a loop, followers may be left out
            why = (
                f"{joinable.join_name} follows another joinable, but notified without an announcement of that one"
                " before it. Call it once after each burst of the joinable before it in the list, put it first, or"
                " derive it from join.Burst [J082]"
            )
            self.guard.break_off(JoinError(why))

    def _refuse_in_main_hook(self, joinable: Joinable, shadowed: Joinable) -> NoReturn:
        raise JoinError(
            f"the main_hook of {shadowed.join_name} announced {joinable.join_name}. A main_hook issues the collectives"
            " of a burst that another rank has announced, and announces nothing itself: call what communicates in it,"
            " and not what calls notify_join_context [J080]"
        )

    def _left_out_error(self, announced: Joinable | None) -> JoinError | None:
        """The error for members that did not notify before ``announced`` did, or before the block ended."""
        if self.mode.all_ranks_run_bursts:
            return None
        before = "the block ended" if announced is None else f"{announced.join_name} announced"
        missing = ", ".join(follower.joinable.join_name for follower in self._outstanding)
        return JoinError(
            f"{before} before {missing} notified. A joinable that follows another must notify once after each of its"
            " bursts; one that keeps its own time comes first in the list, or derives from join.Burst; one without"
            " collectives in the loop has communicates = False [J081]"
        )

    def prepare(self, but: Joinable | None = None) -> None:
        """Flush what is pending, and apply the last header; called before anything else is announced."""
        if self.guard.closed:
            self.guard.raise_closed()
        for burst in self.roster.may_be_pending:
            if burst.is_pending and burst is not but:
                self.flush(but)
        if not self.headers.is_applied:
            self.headers.apply(self.mode.elect)

    def flush(self, but: Joinable | None = None, *, complete: bool = True) -> None:
        """Run what is announced and pending, and, if ``complete``, the followers that go with it."""
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
        """Take part in what the others do until all have run out of inputs; raises what :meth:`Mode.drain` does."""
        self.has_run_out = True
        self.prepare()
        if self._outstanding and (left_out := self._left_out_error(None)):
            raise left_out
        is_at_its_end = self._uneven_loop is not None and self._uneven_loop.headers == self.headers.tally.headers
        outcome = self.mode.drain()
        if outcome.even and is_at_its_end and self._uneven_loop is not None:
            # Everybody has made every step, on dummies where there was no data.
            self.headers.leader = self._uneven_loop.source
            return Outcome(even=False, last=self._uneven_loop.had_data, shadowed=False)
        return outcome

    def shadow(self, header: Header) -> None:
        """Run with nothing to say what ``header`` announces."""
        if header.diverged:
            self.headers.raise_diverged(header)
        for index in header.announcements:
            self.roster.announcing[index].shadowed += 1
            self.shadow_member(self.roster.announcing[index])

    def shadow_member(self, member: Member) -> None:
        """Run one burst of ``member`` with nothing to say, and its followers, unless they have to wait."""
        self._run_main_hook(member)
        self._outstanding += member.followers
        if not self.holds_followers():
            self.complete_followers()

    def _run_main_hook(self, member: Member) -> None:
        around, self._shadows = self._shadows, member.joinable
        try:
            with profiled("shadow", member.joinable.join_name):
                member.hook.main_hook()
        finally:
            self._shadows = around

    def holds_followers(self) -> bool:
        """Whether an interjecting burst is to come before the followers may act."""
        return any(burst.holds_followers for _, burst in self.roster.bursts)

    # -- loops over Join.iterate --------------------------------------------------------------------------------------

    def enter_loop(self, mode: Mode) -> None:
        """Change to the mode of a loop that begins."""
        self.loop += 1
        self.late_use = LateUse(self.collective.rank)
        self._outstanding = []
        self._use(mode)

    def leave_loop(self, mode: Mode, *, source: int, had_data: bool, uneven: bool) -> None:
        """Change back to the mode of the block; called when the loop is over on all ranks.

        Nothing is copied but what each rank has for itself. What all should hold alike is compared.

        Args:
            mode: of the block around it.
            source: the lowest rank that had data in the last step.
            had_data: whether this rank had.
            uneven: whether some ran out before others.

        Raises:
            ProtocolError: on all ranks, if they hold different values.
        """
        loop = self.mode
        self._place = loop.place() or self._place
        self._use(mode)
        if self.late_use is not None:
            self.late_use.has_ended = True
        self._uneven_loop = UnevenLoop(source, had_data, self.headers.tally.headers) if uneven else None
        self._outstanding = []  # in a loop, a follower may be left out
        listed = [member.joinable for member in self.roster.listed]
        try:
            check_equal(self.collective, values_of(listed), self.guard.wait)
        except ProtocolError as error:
            self.guard.close_and_raise(error)  # on all ranks
        for joinable in listed:
            with profiled("synchronise", joinable.join_name):
                joinable.synchronise_own(source)

    # -- failing ------------------------------------------------------------------------------------------------------

    def protest(self, why: str) -> None:
        """Raise a :class:`ProtocolError` for what this rank alone knows, at the end of a burst."""
        self.guard.break_off(ProtocolError(why))

    # -- what joinables ask for ---------------------------------------------------------------------------------------

    def sum(self, number: float) -> Callable[[], float]:
        """Start summing a number over all ranks; what is returned waits for it.

        Beside the collectives of the group where ranks share memory, else among them.
        """
        work = self._sums.sum_float(number)

        def total() -> float:
            self.guard.wait(work, "sums weights or contributors")
            return work.total()

        return total

    def flags_beside(self, burst: Burst) -> tuple[Sequence[int], int]:
        """How many ranks set each flag of ``burst`` in the last header, whatever that announced; how many announced."""
        header = self.headers.read()
        return header.flags(self.roster.index[id(burst)]), header.active

    def lead(self) -> int:
        """The rank that leads from the last header's burst on; called at the same place on all ranks."""
        return self.headers.lead(self.mode.elect)

    @property
    def targets(self) -> Sequence[object]:
        """The objects that are listed in the blocks of the group."""
        return [member.joinable.join_target for member in self.roster.listed]

    def end_broken_loop(self) -> None:
        """If this rank has broken out of a loop, leave it with all others."""
        if self.mode.leave_broken_loop is not None:
            self.mode.leave_broken_loop()

    @property
    def watches_calls(self) -> bool:
        """Whether what a module is called on is to be looked at: at the beginning of a loop, and where data ends."""
        return self.mode.step.batch is not StepBatch.DATA or self.late_use is not None

    def module_called(self) -> None:
        """Check that a module may be called here; see :meth:`LateUse.called`."""
        if self.late_use is not None:
            self.late_use.called()
            if self.late_use.is_ruled_out:
                self.late_use = None

    def module_runs_on(self, arguments: Any) -> None:
        """Check that a module's arguments belong to the step under way; see :meth:`LateUse.used`."""
        if self.late_use is not None:
            self.late_use.used(arguments)
