"""Protocol that synchronises the ranks of one process group: :class:`Channel`, and :class:`Lockstep` for its loops.

In a plain block, a rank is *active* while it runs the body, and *joined* once it is out of data. One header
(``join.protocol.headers``) announces every burst of collectives, and all ranks run the burst::

    active rank                                    joined rank
    -----------                                    -----------
    announce: apply the headers that are due       apply the headers that are due
              header  (starts; awaited if it       header  (awaited)
              announces what was not expected)
    the burst, by the user's own code              main_hook of the announced burst
    its followers, by the user's own code          main_hooks of its followers
    ...                                            ... until a header shows that no rank is active
    leave:    the burst that is still pending
              apply the headers that are due

``join.protocol.headers`` says when a header is due. If the old leader has left and any burst needs a leader, rows of
all ranks follow, which say who is the lowest. Under ``throw_on_early_termination`` each header is awaited before its
burst. Under ``timeout`` it is awaited too, except for the bursts of DDP and ZeRO, whose collectives fail by themselves.
The header of a backward is awaited before the reducer waits for gradients.

In a loop over ``Join.iterate`` all ranks run the same body equally often, with or without data. Every rank issues its
collectives itself, so no burst is announced and none is shadowed. The loop's own roll calls (``join.loop``) say how
many ranks have data in a step, and which of them is the lowest. So the channel computes the contents of each header
instead of sending it::

    rank with data                                 rank without data
    --------------                                 -----------------
    begin:  header (nothing is announced)          the same
    step:   the body, by the user's own code       the body, on a dummy batch
    ...                                            ...

With a ``timeout``, all ranks wait for each other before each step, and again before each burst.
``join.protocol.progress`` finds ranks that do not run the same body.

*Pending bursts.* A burst may be announced before it runs. Until then it is *pending* (``Burst.is_pending``). A rank
that is about to announce another burst, or to leave, first *flushes* the pending one: it runs the burst and contributes
nothing. A rank that fails sends nothing more (``join.failure``).

Blocks that are open at the same time on one process group share one channel, which serves the bursts of all of them.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

import torch

from join.agreement import Values
from join.batch import PLAIN, Step
from join.collectives import DONE, Collective, Sum
from join.collectives._torch_private import profiled
from join.collectives.board import Progress
from join.collectives.line import SUMS
from join.collectives.timeouts import TIMEOUTS
from join.errors import JoinError, JoinTimeoutError, PeerError, ProtocolError
from join.failure.guard import ENTERS, Guard
from join.joinable import Joinable, values_of
from join.protocol.headers import Header, Headers, Member, Roster, Scope, SentHeader
from join.protocol.messages import WORD, Messages
from join.protocol.progress import LateUse, LoopProgress
from join.scaling import Scaling
from join.transfer import broadcast_tensors

ONE_AT_A_TIME = (
    "A loop over join.iterate ran inside another one on the same process group. Run the inner loop before or after the"
    " outer one, or iterate over its loader directly: an evaluation with DDP does not communicate. [J090]"
)


class Phase(Enum):
    """Activity of this rank in a block."""

    PLAIN = auto()
    """It runs the plain part of the block, and announces its bursts."""
    READING = auto()
    """A loop over ``Join.iterate`` has begun, and reads batches: before its first step, or between two steps."""
    RUNNING = auto()
    """It is in the body of a loop, in a step."""
    LEFT = auto()
    """It has left the body of a loop by ``break``, and waits for no other rank yet."""
    ENDING = auto()
    """It leaves the loop together with all ranks, or its block fails in the loop."""
    DRAINING = auto()
    """It has left the body of the block without an exception, and shadows the bursts of other ranks."""


IN_LOOP = Phase.READING, Phase.RUNNING, Phase.LEFT
"""The phases between the begin of a loop on this rank and its end, or the failure of its block."""


@dataclass(eq=False)
class Place:
    """Position of this rank in the innermost of the blocks that are open on a process group.

    A block that is entered in the body of a loop is a part of this body.

    Attributes:
        phase: The activity of this rank.
        step: The step of the loop that runs; while the loop reads, the step before. Outside, and after a ``break``, it
            is ``PLAIN``. In a step, all ranks run all bursts themselves, so none is announced.
        loop: The loop over ``Join.iterate`` that has begun last, even if it has ended.
    """

    phase: Phase = Phase.PLAIN
    step: Step = PLAIN
    loop: Lockstep | None = None

    @property
    def step_of_body(self) -> Step:
        """The step in whose body this rank is; ``PLAIN`` if it is in none, as while a loop reads."""
        return self.step if self.phase is Phase.RUNNING else PLAIN


@dataclass(frozen=True)
class Outcome:
    """End of a block.

    Attributes:
        even: Whether all ranks were out of data at the same time.
        last: Whether this rank was among the last with data.
        shadowed: Whether some ranks shadowed bursts of other ranks, so that their own state is out of date.
        source: The rank whose state the other ranks receive.
    """

    even: bool
    last: bool
    shadowed: bool
    source: int


class Channel:
    """The protocol on one process group, for all blocks that are open on it.

    Args:
        collective: The process group.
    """

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.thread = threading.current_thread()
        """The thread that has entered the first block."""
        self.roster = self._empty_roster = Roster((), collective.world_size)
        self.guard = Guard(collective, self.progress, self._look_for_skipped)
        self.messages = Messages(collective, self.guard)
        self.headers = Headers(collective, self.messages, self.guard, self.roster)
        self.scaling = Scaling()
        self.place = Place()
        """The place of this rank in the innermost block."""
        self.moved = 0
        """The number of times that this rank has moved without a burst, as far as the user of the block knows."""
        self.late_use: LateUse | None = None
        """The search for a consumer that reads ahead of the loop body, during a loop and after it; ``None`` if there
        is no such consumer."""
        self._outstanding: list[Member] = []  # the followers that have not acted since the last announcement
        self._shadowed: Joinable | None = None  # the joinable whose main_hook runs

    # -- blocks -------------------------------------------------------------------------------------------------------

    def begin_to_open(self, timeout: float | None) -> None:
        """Run pending bursts and set up the lines that carry messages, before a block is entered.

        Args:
            timeout: The ``timeout`` of the block.

        Raises:
            JoinError: If the channel is closed, or followers of the last burst did not notify.
        """
        if not self.roster.scopes:
            self.guard.begin()
        self.prepare(event="another block was entered")
        self.guard.timeout = timeout
        self.agree()

    def open(self, scope: Scope) -> None:
        """Add the members of a block that is entered; called once the message of entering has been sent.

        Args:
            scope: The members and settings of the block.
        """
        self._set_roster(Roster((*self.roster.scopes, scope), self.collective.world_size))
        if not self.place.step.in_loop:
            self.scaling.unit = 1.0  # the last one may come from a small batch at the end of another block

    def agree(self) -> None:
        """Take the lines that carry messages, which the first call for a group sets up on all ranks."""
        self.guard.doing = ENTERS
        self.messages.line = self.collective.line()
        self.sums = self.collective.line(SUMS)
        """Line for sums between the collectives of a burst: one of these, if the ranks have no line beside them."""
        self.guard.watch.use(self.collective.board())
        self.guard.doing = ""

    def close(self, scope: Scope) -> None:
        """Remove the members of a block that is left."""
        scopes = tuple(each for each in self.roster.scopes if each is not scope)
        if not scopes:
            self.place = Place()
        elif self.place.phase is Phase.DRAINING:  # of the block that is left
            self.place.phase = Phase.PLAIN
        self._set_roster(Roster(scopes, self.collective.world_size) if scopes else self._empty_roster)
        self.messages.resize(header=self.roster.code.bits)
        for member in scope.announcing:  # otherwise they and the last header refer to each other
            member.announced_in = SentHeader()
        if not scopes:
            self.headers.last = SentHeader()
            self.guard.end()

    def _set_roster(self, roster: Roster) -> None:
        self.roster = roster
        self.headers.use(roster)
        # All ranks enter and leave a block together, even inside another one, which some have left.
        if not self.place.step.in_loop:  # in the body of a loop, the lowest rank with a batch stays the leader
            self.headers.leader = 0
        self.guard.timeout = roster.timeout
        self._outstanding = []

    def _look_for_skipped(self) -> None:
        """Raise an error if this rank, which waits, has skipped a burst that other ranks run in a loop."""
        place = self.place
        if place.loop is not None and place.step.in_loop:
            place.loop.progress.look_for_skipped(self.guard.ask())

    def progress(self) -> Progress:
        """Return the progress of this rank, for other ranks that wait for it; called in another thread."""
        headers, place = self.headers.tally.headers, self.place
        loop, phase = place.loop, place.phase
        reached = Progress(issued=self.moved) if loop is None else loop.progress.place()
        announcer, where = self.headers.last.member, ""
        doing = "has announced nothing" if announcer is None else f"announced {announcer.joinable.join_name}"
        if phase is Phase.DRAINING:
            steps = reached.step or max((each.steps for each in self.roster.announcing), default=0)
            since = f" since step {steps}" if steps else ""
            doing, where = "is out of data", f"out of data{since}, waits for the others at the end of the block"
        elif phase is Phase.LEFT or (reached.left and phase is Phase.ENDING):
            where = f"left join.iterate in step {reached.step}"
        elif place.step.in_loop:
            where = f"in step {reached.step} of join.iterate" if reached.step else "begins join.iterate"
        doing = f"{doing} (header {headers})"
        if waits := self.guard.doing:  # read once, since another thread calls this
            doing, where = waits, f"{waits.partition(' with ')[0]}, waits for the others"
        return reached._replace(headers=headers, doing=doing, place=where)

    # -- the active side ----------------------------------------------------------------------------------------------

    def announce(self, joinable: Joinable) -> Sum[int]:
        """Announce to all ranks that this rank is about to run a burst.

        Args:
            joinable: The joinable that issues the burst; it is an announcing member.

        Returns:
            The sum of the header, which may not be complete yet.

        Raises:
            JoinError: If the announcement is made in a ``main_hook`` or inside a CUDA graph, if the channel is closed,
                or if followers of the burst before it did not notify.
            ProtocolError: If active ranks announced different bursts.
            EarlyTerminationError: If a rank is out of data under ``throw_on_early_termination``.
            PeerError: If another rank has failed.
            JoinTimeoutError: If a rank does not arrive within ``timeout``.
        """
        if self._shadowed is not None:
            self._refuse_in_main_hook(joinable, self._shadowed)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._refuse_in_graph(joinable)
        index = self.roster.index[id(joinable)]
        member = self.roster.announcing[index]
        if member.burst.interjects:
            self.prepare(joinable)
        else:
            self.prepare(joinable, "the next burst was announced")
            self._outstanding = list(member.followers)
        member.steps += 1
        headers, loop, step = self.headers, self.place.loop, self.place.step
        if loop is not None and step.in_loop:  # all ranks run the burst, and can compute the contents of the header
            if not member.burst.interjects:
                loop.progress.bursts, loop.progress.last_member = loop.progress.bursts + 1, member
            if self.guard.timeout is not None:
                loop.wait_for_all(f"announced {joinable.join_name} in step {step.number} of join.iterate")
            headers.set_announced_by_all(index)
            return DONE
        work = headers.send(index)
        if index != headers.last.expected:
            headers.confirm()  # first, since ranks that run the expected burst take part in nothing else
        elif index in self.roster.awaited:
            headers.read()
        return work

    def follow(self, joinable: Joinable) -> None:
        """Record that a follower is about to run its burst.

        Args:
            joinable: The follower.

        Raises:
            JoinError: If the joinable before it has not announced a burst since the follower last notified.
        """
        if self._shadowed is not None:
            self._refuse_in_main_hook(joinable, self._shadowed)
        self.end_left_loop()
        if self.guard.closed:
            self.guard.raise_closed()
        self.flush(complete=False)
        for member in self._outstanding:
            if member.joinable is joinable:
                self._outstanding.remove(member)
                return
        if not self.place.step.in_loop:  # in a loop, the body may skip followers
            reason = (
                f"{joinable.join_name} notified, but the joinable that it follows in the list had announced no burst."
                " Call notify_join_context in it once after each burst of that joinable, put it first in the list, or"
                " derive its class from join.Burst. [J082]"
            )
            self.guard.post_and_raise(JoinError(reason))

    def _refuse_in_main_hook(self, joinable: Joinable, shadowed: Joinable) -> NoReturn:
        raise JoinError(
            f"The main_hook of {shadowed.join_name} announced {joinable.join_name}. A main_hook issues the collectives"
            " of a burst that another rank has announced, and announces nothing itself. Call only the code"
            " that communicates in it, not the code that calls notify_join_context. [J080]"
        )

    def _refuse_in_graph(self, joinable: Joinable) -> NoReturn:
        error = JoinError(
            f"A CUDA graph captures {joinable.join_name}, but its replays announce nothing, so the other ranks would"
            " wait forever. Run it without a graph in the block, or capture only parts that do not communicate"
            " (torch.cuda.make_graphed_callables on a submodule). [J502]"
        )
        self.guard.post_and_raise(error)

    def _refuse_missing(self, event: str) -> NoReturn:
        missing = ", ".join(follower.joinable.join_name for follower in self._outstanding)
        error = JoinError(
            f"{missing} did not notify before {event}. Call notify_join_context in it once after each burst of the"
            " joinable that it follows in the list. If it communicates at other times, put it first in the list, or"
            " derive its class from join.Burst. If it has no collectives in the loop, set communicates = False. [J081]"
        )
        self.guard.post_and_raise(error)

    def prepare(self, but: Joinable | None = None, event: str = "") -> None:
        """Leave a loop that a ``break`` ended, flush pending bursts and apply due headers, before an announcement.

        Args:
            but: The joinable that is about to announce; its own burst is not flushed.
            event: What is about to happen, if all followers must have notified before it.

        Raises:
            JoinError: If the channel is closed, a loop was left inside an accumulation window, or a follower has not
                notified.
            ProtocolError: If active ranks announced different bursts in the last header, or left a loop differently.
            PeerError, JoinTimeoutError: If another rank does not leave the loop.
        """
        if self.guard.closed:
            self.guard.raise_closed()
        if self.place.phase is Phase.LEFT:
            self.end_left_loop()
        for burst in self.roster.may_be_pending:
            if burst.is_pending and burst is not but:
                self.flush(but)  # runs all pending bursts; the loop is here, too, to save this call in most steps
                break
        if event and self._outstanding and not self.place.step.in_loop:  # the body of a loop may skip followers
            self._refuse_missing(event)
        if not self.headers.last.is_applied:  # in a step of a loop, it always is
            self.headers.apply()

    def flush(self, but: Joinable | None = None, *, complete: bool = True) -> None:
        """Run pending bursts.

        Args:
            but: A joinable whose burst stays pending.
            complete: Whether to run the followers of these bursts as well.
        """
        flushed = False
        for burst in self.roster.may_be_pending:
            if burst.is_pending and burst is not but:
                burst.fulfil()
                flushed = True
        if flushed and complete:
            self.complete_followers()

    def complete_followers(self) -> None:
        """Run the ``main_hook`` of each follower that has not acted since the last announcement."""
        outstanding, self._outstanding = self._outstanding, []
        for follower in outstanding:
            self._run_main_hook(follower)

    def meet(self, doing: str, *, vote: bool = False) -> bool:
        """Wait between bursts until all ranks do the same, as :meth:`check_same` does when nothing is pending."""
        self.prepare()
        return self.check_same(doing, vote=vote)

    def check_same(self, doing: str, parts: Sequence[str] = (), values: Values = (), *, vote: bool = False) -> bool:
        """Check that all ranks do the same, with the same arguments and values, when nothing is pending.

        Args:
            doing: What this rank does, as a predicate.
            parts: The arguments of this rank, as texts.
            values: The values of this rank that are equal on all ranks now.
            vote: The vote of this rank.

        Returns:
            Whether all ranks vote.

        Raises:
            ProtocolError: If they do not. All ranks raise it, and the block has ended.
            PeerError, JoinTimeoutError: If another rank fails, or does not arrive within ``timeout``.
        """
        try:
            answer = self.messages.check(self.messages.start(doing, parts, values, vote=vote))
        except ProtocolError as error:
            self.guard.close_and_raise(error)
        return answer.votes == self.collective.world_size

    # -- the joined side ----------------------------------------------------------------------------------------------

    def drain(self) -> Outcome:
        """Shadow the bursts of other ranks until all ranks are out of data.

        Returns:
            The end of the block.

        Raises:
            EarlyTerminationError: If another rank is active under ``throw_on_early_termination``.
            PeerError: If another rank has failed.
            ProtocolError: If active ranks announced different bursts.
            JoinTimeoutError: If a rank does not arrive within ``timeout``.
        """
        self.end_left_loop()
        place, loop = self.place, self.place.loop
        if loop is not None and place.step.in_loop:  # of a block around this one: no burst is shadowed in its body
            loop.meet()
        else:
            place.phase = Phase.DRAINING
        self.prepare(event="the block ended")
        headers, outcome = self.headers.tally.headers, self._shadow_all()
        # If nothing followed an uneven loop, every rank has made every step, on dummies if it had no data.
        if loop is not None and outcome.even and headers == loop.ended_at_header:
            step = loop.last_with_data
            if 0 < step.contributors < self.collective.world_size:
                return Outcome(even=False, last=not step.is_dummy, shadowed=False, source=step.first_with_data)
        return outcome

    def _shadow_all(self) -> Outcome:
        headers, fresh = self.headers, True
        while True:
            started = time.monotonic()
            headers.send(active=False, fresh=fresh)
            header = headers.read()
            headers.tally.idle += time.monotonic() - started
            if header.active == 0:
                headers.last.is_applied = True
                even = header.fresh == self.collective.world_size
                return Outcome(even=even, last=fresh, shadowed=not even, source=headers.leader)
            if self.roster.throws:
                self.guard.raise_early_termination(exhausted=True)
            fresh = False
            self._shadow(header)
            self.prepare()

    def _shadow(self, header: Header) -> None:
        """Run the bursts that a header announces, and their followers unless they have to wait; contribute nothing."""
        if header.diverged:
            self.headers.raise_diverged()
        for index in header.announcements:
            member = self.roster.announcing[index]
            member.shadowed += 1
            self._run_main_hook(member)
            self._outstanding += member.followers
            # A burst that interjects runs before the followers.
            if self._outstanding and not any(burst.holds_followers for _, burst in self.roster.bursts):
                self.complete_followers()

    def _run_main_hook(self, member: Member) -> None:
        outer, self._shadowed = self._shadowed, member.joinable
        try:
            with profiled("shadow", member):
                member.hook.main_hook()
        finally:
            self._shadowed = outer

    # -- around loops over Join.iterate -------------------------------------------------------------------------------

    def exit_loop(self, loop: Lockstep) -> None:
        """Continue with the plain part of the block, after a loop that has ended on all ranks."""
        loop.ended_at_header = self.headers.tally.headers
        loop.progress.last_member = None  # it refers to a module, and the loop may outlive the block
        self.headers.leader = 0  # in the rest of the block, which all ranks reach
        self.messages.resize(loop=WORD)
        if self.late_use is not None:
            self.late_use.end_loop(loop.step)
        self._outstanding = []  # in a loop, the body may skip followers
        self.place.phase, self.place.step = Phase.PLAIN, PLAIN

    def synchronise_own(self, joinables: Sequence[Joinable], source: int) -> None:
        """Copy the state that each rank has for itself from one rank, after a loop or block that shadowed nothing.

        Args:
            joinables: The joinables whose objects have such state.
            source: The rank to copy from.
        """
        with profiled("copy"):
            tensors = [tensor for joinable in joinables for tensor in joinable.own_tensors()]
            broadcast_tensors(self.collective, tensors, source)
        for joinable in joinables:
            with profiled("synchronise", joinable.join_name):
                joinable.synchronise_own(source)

    def end_left_loop(self) -> None:
        """Leave the loop that this rank has left by ``break``, if any, together with all other ranks."""
        if self.place.phase is Phase.LEFT and self.place.loop is not None:
            self.place.loop.leave()


class Lockstep(ABC):
    """One loop over ``Join.iterate``, in which all ranks of a process group run every burst, on dummies without data.

    This class is the protocol of the loop; ``join.loop.Loop`` adds the batches.

    Args:
        channel: The channel of the process group.
    """

    progress: LoopProgress  # set when the loop begins
    """The progress of this rank in the loop."""
    place: Place | None = None
    """The place in the block in which the loop has begun; ``None`` before."""
    ended_at_header: int = -1
    """The number of headers that this rank had sent when the loop ended on all ranks."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self._guard = channel, channel.guard
        self.step = self.last_with_data = PLAIN
        """The current step, and the last step in which a rank had data."""

    def begin(self) -> None:
        """Begin the loop on all ranks, with one awaited header.

        Raises:
            JoinError: If another loop has not ended.
            ProtocolError: If some ranks do not begin a loop. All ranks raise it.
            PeerError: If a rank has failed.
        """
        channel, collective = self.channel, self.channel.collective
        if self._guard.closed:
            self._guard.raise_closed()
        if channel.place.step.in_loop:
            raise JoinError(ONE_AT_A_TIME)
        channel.prepare(event="a loop over join.iterate began")
        channel.headers.send()
        header = channel.headers.read()
        if channel.roster.throws and header.active < collective.world_size:
            self._guard.raise_early_termination(exhausted=False)
        channel.prepare()  # first, since ranks that announce a burst have not left the block
        if header.active < collective.world_size:
            self._guard.post_and_raise(
                ProtocolError(
                    f"{header.active} ranks began a loop over join.iterate after"
                    f" {collective.world_size - header.active} ranks had left the block. Run the loop on all ranks,"
                    " including ranks without batches. [J091]"
                )
            )
        channel.headers.tally.loops += 1
        self.progress = LoopProgress(collective, channel.headers.tally.loops)
        self.step, self.place = Step(in_loop=True, contributors=collective.world_size), channel.place
        self.place.phase, self.place.step, self.place.loop = Phase.READING, self.step, self
        channel.late_use = LateUse(collective.rank)
        channel.headers.leader = 0  # all ranks have begun the loop

    def wait_for_all(self, doing: str, vote: bool = False) -> bool:
        """Wait for all ranks. With a ``timeout`` this is called before each step and each burst.

        Roll calls are read one round late, so they do not find a rank that is blocked now.

        Args:
            doing: The activity of this rank, for the error of a rank that waits.
            vote: The vote of this rank.

        Returns:
            Whether any rank votes.
        """
        self._guard.arrive()
        messages = self.channel.messages
        return messages.check(messages.start("waited for all ranks in join.iterate", vote=vote), doing).votes > 0

    def end_step(self) -> None:
        """End a step, after running a backward that this rank has skipped and the other ranks wait in."""
        self.channel.prepare()
        progress = self.progress
        progress.ended_steps, progress.bursts_in_ended_steps = progress.steps, progress.bursts

    def meet(self, vote: bool = False) -> bool:
        """End the step together with all ranks, before collectives that could hang if a rank skipped part of the step.

        Args:
            vote: The vote of this rank.

        Returns:
            Whether any rank votes.

        Raises:
            ProtocolError: If this rank skipped a burst or a collective in the step.
            PeerError: If another rank did.
        """
        self.end_step()
        votes = self.wait_for_all(f"ended step {self.progress.steps} of join.iterate", vote)
        devices = self.channel.roster.devices()
        if devices and all(device.type == "cpu" for device in devices):
            self.progress.issued_before = self.progress.issued()  # no rank has a collective of the CPU underway
        return votes

    def end(self) -> None:
        """End the loop, after its last step on all ranks.

        Only the state that each rank has for itself, such as buffers, is copied. State that should be equal on all
        ranks is compared.

        Raises:
            ProtocolError: If ranks hold different values. All ranks raise it.
        """
        # `source` had data in the last step with data. Even without a burst, its forwards may have changed buffers.
        channel, source = self.channel, self.last_with_data.first_with_data
        channel.exit_loop(self)
        listed = channel.roster.listed
        channel.check_same("compares its state", values=values_of(listed))
        channel.synchronise_own(listed, source)

    # -- left by ``break`` --------------------------------------------------------------------------------------------

    @abstractmethod
    def leave(self) -> None:
        """End a loop that this rank has left by ``break``, together with all ranks, before anything is announced."""

    def agree_to_leave(self) -> None:
        """Wait until all ranks have left the loop in the same place before its end.

        Raises:
            ProtocolError: If this rank left the loop alone.
            PeerError: If another rank left it alone, failed, or disappeared.
            JoinTimeoutError: If another rank does not arrive within ``timeout``.
        """
        guard, others, pause, started = self._guard, dict[int, Progress](), 0.0, time.monotonic()
        limit = float("inf") if guard.timeout is None else guard.timeout
        try:
            with profiled("wait"):
                while not self.progress.all_have_left_here(others):
                    time.sleep(pause)
                    pause = min(2 * pause + 1e-3, TIMEOUTS.look)
                    others = guard.ask()
                    self.progress.look_for_skipped(others)
                    guard.look()
                    guard.look_for_silent(others)
                    if time.monotonic() - started > limit:
                        raise guard.timeout_error()
        except (PeerError, JoinTimeoutError) as error:
            guard.close_and_raise(error)  # the other ranks know the error, or this rank has posted it
