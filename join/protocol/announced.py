"""The protocol that keeps the ranks of one group in step: :class:`Channel`.

A rank is *active* while it runs the body of a ``Join`` block and *joined* once it has run out of inputs. Every burst of
collectives is announced by one header (``join.protocol.header``), and what was announced is run by everybody::

    active rank                                    joined rank
    -----------                                    -----------
    announce: settle the previous header           settle the previous header
              header  (starts, not awaited)        header  (awaited)
    the burst, by the user's own code              main_hook of the announced burst
    its followers, by the user's own code          main_hooks of its followers
    ...                                            ... until a header shows that nobody is active
    leave:    the burst that is still owed
              settle the previous header

*Settling* means to read a header that was sent earlier: it raises what the header reports (a failed peer, ranks that
diverged), and elects a new leader (one more all-reduce, min of rank) if the old one has left and anyone needs a leader.
All ranks settle header i after burst i and before header i+1, so what they raise they raise at the same place.

*Owed bursts.* A burst may be announced before it runs. Until then it is owed; whoever is about to announce something
else, to leave, or to fail runs it first with nothing to say.

*Failing.* A rank that raises between two bursts runs what it owes and says in one more header that it fails; all others
raise when they have read it, and the group works afterwards. One that raises inside a burst of its own, whose
collectives are half done, sends nothing more. Both leave a note first (``join.failure.peers``)::

    rank that fails between bursts                   every other rank
    the burst that is owed                           the same, as announced
    header: FAILED                                   header: what it announces, or has joined
    main_hook of what was announced, if anything     the burst, or its main_hook
    raises its own exception                         reads the header: PeerError

*Running ahead.* A backward pass cannot stop to read its header. As long as only one burst of the channel is of that
kind (``Burst.runs_ahead``), it need not: whoever announced something else reads its header before its burst, finds the
difference, and shadows the burst that ran ahead before it raises :class:`ProtocolError`. With several of them, each
reads its header first.

Blocks that are open at the same time on one group share one channel: its bursts are those of all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from join.batch import StepBatch
from join.collectives import Collective, Sum, Work
from join.collectives.board import Progress
from join.collectives.broken import is_broken
from join.collectives.timeouts import timeouts
from join.errors import EarlyTerminationError, JoinError, JoinTimeoutError, PeerError, ProtocolError
from join.failure.peers import Peers
from join.failure.waiting import is_done_within
from join.joinable import Burst, BurstState, Joinable
from join.protocol.header import ACTIVE, FAILED, FRESH, LEADER, STOPPING, Header, HeaderCode
from join.protocol.late_use import LateUse
from join.protocol.members import Member, Scope

logger = logging.getLogger("join")


@dataclass
class Tally:
    """What a channel has sent and how long it has waited while joined."""

    headers: int = 0
    nbytes: int = 0
    idle: float = 0.0

    def count(self, nbytes: int) -> None:
        """A header of so many bytes was sent."""
        self.headers += 1
        self.nbytes += nbytes

    def since(self, earlier: Tally) -> Tally:
        """What came on top of an earlier state."""
        return Tally(self.headers - earlier.headers, self.nbytes - earlier.nbytes, self.idle - earlier.idle)


@dataclass(frozen=True)
class Outcome:
    """How a block ended.

    Attributes:
        even: whether all ranks ran out of inputs together.
        last: whether this rank was among the last.
    """

    even: bool
    last: bool


class Channel:
    """The protocol on one group, for all blocks that are open on it."""

    declared = False
    """Whether ranks know each other's steps, so that headers need not be sent."""
    weighted = False
    """Where they do: whether ``join.weight`` is in use."""
    leaving = False
    """Whether this rank leaves with an exception; then nothing else is its business."""
    in_lockstep = False
    """Whether all ranks run the same steps (``Join.iterate``), so that nothing is announced or shadowed."""
    active_ranks = 0
    """There: which ranks have data in this step, as a bit mask."""
    loop = 0
    """There: the number of the loop."""
    shadowing = False
    """There: whether this rank has no data in this step."""
    batch = StepBatch.DATA
    """There: what it has instead."""
    all_have_data = True
    """There: whether all ranks have data in this step."""
    first_with_data = 0
    """There: the lowest of the ranks that have."""
    steps = 0
    """There: how many steps this rank has begun."""
    late_use: LateUse | None = None
    """There, and after it: looks for consumers that read ahead of the loop's body, until it is ruled out."""
    leave_loop: Callable[[], None] | None = None
    """There: leaves the loop in due form, where this rank has broken out of it; comes before whatever asks what there
    is to announce."""
    throws = False
    """Whether all ranks raise as soon as one has run out."""
    timeout: float | None = None
    """Seconds after which a rank that does not come is an error, if any."""
    early: Burst | None = None
    """The burst that may announce long before it runs, if any."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self._rank, self._world_size = collective.rank, collective.world_size
        self.scopes: list[Scope] = []
        self.tally = Tally()
        self.leader = 0
        """The rank that speaks for all where one must: the lowest active one; after a block, the last joiner."""
        self.closed = ""
        """Why nothing can be announced any more, if so."""
        self.group_is_usable = True
        """Whether nothing is half done on the group, after an exception."""
        self._members: list[Member] = []
        self._arrange()
        self._work: Sum | None = None
        self._header: Header | None = None  # the last header sent, once it was read
        self._last_of: dict[int, Header] = {}  # by joinable: the last header that announced it
        self._unsettled = False
        self._leads = True  # the leader is that of the last header
        self._was_active = False
        self._sent_by: Member | None = None
        self._outstanding: list[Member] = []  # followers that have not acted since the last announcement
        self._last_sent = time.monotonic()
        self._away = 0.0
        self._doing = ""  # what this rank waits for, where that is no header
        self._parts_until = 0.0  # when a rank that fails gives up the group
        self.peers = Peers(collective, collective.next_block(), self.progress)  # at last: its thread asks for progress

    # -- membership ---------------------------------------------------------------------------------------------------

    def open(self, scope: Scope) -> None:
        """A block is entered: what is under way comes to an end, then its members can announce."""
        self.fulfil()
        self.settle()
        self.scopes.append(scope)
        self._arrange()

    def agree(self) -> None:
        """All ranks have entered: exchange what else is to be known on entering."""
        self._line = self.collective.line()
        self.peers.use(self.collective.board())

    def close(self, scope: Scope) -> None:
        """A block is left."""
        self.scopes.remove(scope)
        self._arrange()
        if not self.scopes:
            self.peers.end()
            if not self.group_is_usable:
                self.collective.hold()

    def progress(self) -> Progress:
        """How far this rank is, for others who wait for it; called in another thread."""
        if self._doing:
            doing = self._doing
        else:
            sender = self._sent_by
            doing = "has run out of inputs" if sender is None else f"announced {sender.joinable.join_name}"
            doing += f" (header {self.tally.headers})"
        return Progress(headers=self.tally.headers, doing=doing)

    def _arrange(self) -> None:
        self._members = [member for scope in self.scopes for member in scope.announcing]
        self._index = {id(member.joinable): index for index, member in enumerate(self._members)}
        self._bursts = [(index, member.burst) for index, member in enumerate(self._members) if member.burst is not None]
        self._owing = [burst for _, burst in self._bursts if type(burst).fulfil is not Burst.fulfil]
        flag_counts = [0 if member.burst is None else member.burst.flag_count for member in self._members]
        self._code = HeaderCode(flag_counts, self._world_size)
        running_ahead = [self._members[index] for index, burst in self._bursts if burst.runs_ahead]
        self._ahead = running_ahead[0] if len(running_ahead) == 1 else None
        self._tracks_leader = any(burst.tracks_leader for _, burst in self._bursts)
        self._outstanding = []
        if self.scopes:
            self.throws, self.timeout = self.scopes[-1].throw, self.scopes[-1].timeout
        # Whether every header is awaited, so that no burst runs ahead of its own.
        self._awaits_all = self.throws or self.timeout is not None
        self.early = None if self._ahead is None or not self._can_be_early() else self._ahead.burst

    def _can_be_early(self) -> bool:
        """Not where another burst may come in between (``Burst.comes_between``). And not under ``timeout``.

        There an announcement means that the burst starts now, or a rank that sleeps between the two would not be
        missed.
        """
        return self.timeout is None and not any(burst.comes_between for _, burst in self._bursts)

    def someone_may_contribute_unseen(self) -> bool:
        """Whether the last header may not have counted a rank that contributes to its burst."""
        return False

    @property
    def targets(self) -> list[object]:
        """The objects that are listed in the blocks of the group."""
        return [member.joinable.join_target for scope in self.scopes for member in scope.members]

    @property
    def ranks_with_data(self) -> int | None:
        """The ranks that have data in this step, as a bit mask, where all ranks run it, with data or without.

        ``None`` elsewhere: a rank without data shadows then.
        """
        return self.active_ranks if self.in_lockstep else None

    @property
    def is_in_loop_body(self) -> bool:
        """Whether this rank is in the body of a loop over ``Join.iterate``, and has not broken out of it."""
        return self.in_lockstep and self.leave_loop is None

    @property
    def foresees_bursts(self) -> bool:
        """Whether ranks without data know what comes by declared numbers of steps, so that no header can tell them."""
        return self.declared

    def announces_in_forward(self, burst: Burst, *, saves_header: bool, has_buffers: bool) -> bool:
        """Whether a module's backward is announced when its forward begins.

        Args:
            burst: the backward.
            saves_header: whether one header then does for both.
            has_buffers: whether the forward broadcasts buffers.
        """
        return self.early is burst and saves_header

    def module_called(self) -> None:
        """A module is called, and has sent nothing yet.

        Raises:
            ProtocolError: if batches are taken in another thread.
        """
        if self.late_use is not None:
            self.late_use.called()

    def end_broken_loop(self) -> None:
        """If this rank has broken out of a loop over ``Join.iterate``, leave it with all others that have.

        Comes before whatever asks what there is to announce.
        """
        if self.leave_loop is not None:
            self.leave_loop()

    @property
    def watches_calls(self) -> bool:
        """Whether what a module is called on is to be looked at: at the beginning of a loop, and where data ends."""
        return self.batch is not StepBatch.DATA or self.late_use is not None

    def module_runs_on(self, arguments: Any) -> None:
        """A module runs on these arguments.

        Raises:
            ProtocolError: if they show that batches are read ahead of the loop's body.
        """
        if self.late_use is not None:
            self.late_use.used(arguments)
            if self.late_use.is_ruled_out and not self.in_lockstep:
                self.late_use = None

    @property
    def has_several_bursts(self) -> bool:
        """Whether ranks could announce different bursts at all, so that a header's verdict matters."""
        return len(self._members) > 1

    # -- the active side ----------------------------------------------------------------------------------------------

    def announce(self, joinable: Joinable, *, confirm: bool = True) -> Work:
        """Tell all ranks that this rank is about to run a burst of ``joinable``.

        Args:
            joinable: an announcing member.
            confirm: whether to read the header at once where its verdict matters; a burst that does something between
                its announcement and its collectives passes ``False`` and calls :meth:`confirm` itself.

        Returns:
            The header's sum over all ranks, under way.
        """
        index = self._index[id(joinable)]
        member = self._members[index]
        if self.closed:
            self._refuse()
        self.fulfil(but=joinable)
        if self._outstanding and not member.interjects:
            missing = ", ".join(follower.joinable.join_name for follower in self._outstanding)
            self._break_off(
                f"{joinable.join_name} announced before {missing} notified. A joinable that follows another must notify"
                " once after each of its bursts; one that keeps its own time comes first in the list, or derives from"
                " join.Burst"
            )
        if self._unsettled:
            self.settle()
        work = self._send([ACTIVE, LEADER] if self.leader == self._rank else [ACTIVE], index)
        self._sent_by = member
        if not member.interjects:
            self._outstanding = list(member.followers)
        member.times.step(time.monotonic())
        if self._awaits_all or (member is not self._ahead and confirm and self.has_several_bursts):
            self.confirm()
        return work

    def follow(self, joinable: Joinable) -> None:
        """Note that a follower is about to run its burst."""
        if self.closed:
            self._refuse()
        self.fulfil(complete=False)
        for member in self._outstanding:
            if member.joinable is joinable:
                self._outstanding.remove(member)
                return
        self._break_off(
            f"{joinable.join_name} follows another joinable, but notified without an announcement of that one before"
            " it. Call it once after each burst of the joinable before it in the list, put it first, or derive it from"
            " join.Burst"
        )

    def confirm(self) -> Header:
        """Wait for the last header and make sure that all active ranks announced the same.

        Raises:
            ProtocolError: if they did not.
            EarlyTerminationError: if a rank is exhausted under ``throw_on_early_termination``.
            PeerError: if a rank has failed in the same step.
            JoinTimeoutError: if a rank does not announce within ``timeout``.
        """
        header = self.read()
        if header.stopping:
            self._stop(header, exhausted=False)
        if header.diverged:
            self._end_diverged(header)
        return header

    def read(self) -> Header:
        """Wait for the last header, without passing judgement on it."""
        if self._header is None:
            assert self._work is not None
            self.wait(self._work)
            self._header = self._code.unpack(self._work.total())
            for index in self._header.announcements:
                self._last_of[id(self._members[index].joinable)] = self._header
        return self._header

    def wait(self, work: Work, doing: str = "") -> None:
        """Wait for ``work`` of the control line, and look meanwhile whether others fail.

        Args:
            work: what to wait for.
            doing: what this rank is doing, for the others to read; empty for the last header.

        Raises:
            PeerError: if another rank has failed, or is gone.
            JoinTimeoutError: if a rank does not come within ``timeout``, or another one has waited for so long.
        """
        try:
            if work.is_completed():
                work.wait()
            else:
                self._doing = doing
                self._wait_and_look(work)
                self._doing = ""
            if self.timeout is not None and self._away >= self.timeout / 2:  # the others may have given up this rank
                self.peers.look_again()
        except (PeerError, JoinTimeoutError) as error:
            self.close_with(error)
        except JoinError:
            raise  # known to this rank alone
        except RuntimeError as error:
            cause = self.explain(error)
            if cause is None:
                raise
            raise cause from error

    def _wait_and_look(self, work: Work) -> None:
        started = time.monotonic()
        patience = float("inf") if self.timeout is None else self.timeout
        while not is_done_within(work, min(timeouts().look, patience)):
            self._look()
            now = time.monotonic()
            if now - started >= patience:
                raise self._time_out()
            if self.leaving and now >= self._parts_until:
                raise TimeoutError("the others do not come to the next header")

    def _look(self) -> None:
        """This rank waits: see whether another one has failed."""
        self.peers.look()

    def _time_out(self, *, in_collective: bool = False) -> JoinTimeoutError:
        mine, told = self.progress(), self.peers.ask(limit=timeouts().note)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        missing = [rank for rank in others if rank not in told or _is_behind(told[rank], mine)]
        here = [(rank, progress) for rank, progress in [*told.items(), (self._rank, mine)] if rank not in missing]
        doing = "; ".join(f"rank {rank} {progress.doing}" for rank, progress in sorted(here))
        if missing:
            text = (
                f"waited {self.timeout:g} s for ranks {missing}, which announced nothing. {doing}. They are late, or in"
                " a collective that this rank does not come to: in join.iterate, run the whole body on all ranks; else"
                " list what it belongs to (a sharded optimizer), wrap it (joinables.SharedCall), or loop over"
                " join.iterate"
            )
        elif in_collective:
            text = f"a collective was not done in {2 * (self.timeout or 0):g} s, twice the timeout: {doing}"
        else:
            text = f"waited {self.timeout:g} s, and all wait, for different things: {doing}. All must run the same"
        error = JoinTimeoutError(f"{text}. The process group has a collective pending and cannot be used any more")
        self.peers.leave(error)
        return error

    def all_announced(self) -> bool:
        """Whether all ranks announced a burst in the last header, so that none has joined; waits for it."""
        return self.read().active == self._world_size

    def announced(self, burst: Burst) -> int:
        """How many ranks announced ``burst`` in the last header; waits for it."""
        return self.read().announcements.get(self._index[id(burst)], 0)

    def flags(self, burst: Burst) -> Sequence[int]:
        """How many ranks set each flag of ``burst`` in the last header that announced it; waits for that header."""
        if self._unsettled:
            self.read()
        return self._last_of[id(burst)].flags(self._index[id(burst)])

    def fulfil(self, but: Joinable | None = None, *, complete: bool = True) -> None:
        """Run what is announced and owed, and, if ``complete``, the followers that go with it."""
        owed = False
        for burst in self._owing:
            if burst.state is BurstState.OWED and burst is not but:
                burst.fulfil()
                owed = True
        if owed and complete:
            self.complete_followers()

    def complete_followers(self) -> None:
        """Run the followers that have not acted since the last announcement."""
        outstanding, self._outstanding = self._outstanding, []
        for follower in outstanding:
            follower.hook.main_hook()

    def settle(self) -> None:
        """Act on the previous header, if it was not acted on before and there is something to do."""
        if not self._unsettled:
            return
        header = self.read()
        if header.diverged:
            self._end_diverged(header)
        self._unsettled = False
        if header.failed:
            self.close_with(self.peers.failures(header.failed))
        if not self._leads:
            self.lead()

    def lead(self) -> int:
        """The rank that leads from the last header's burst on: a new one, if the old one was not among its ranks.

        Called at the same place on all ranks, if at all before the header is settled.
        """
        if not self._leads:
            self._leads = True
            if self._tracks_leader and not self.read().leader_alive:
                self.leader = self.elect(self._was_active)
        return self.leader

    def elect(self, candidate: bool) -> int:
        """Find the lowest rank among the candidates: one all-reduce, awaited."""
        vote = torch.tensor([self._rank if candidate else self._world_size])
        self.collective.all_reduce(vote, "min").wait()
        return int(vote.item())

    # -- the joined side ----------------------------------------------------------------------------------------------

    def drain(self) -> Outcome:
        """Shadow the active ranks until nobody is active, and find the last joiner.

        Raises:
            EarlyTerminationError: if another rank is active under ``throw_on_early_termination``.
            PeerError, ProtocolError, JoinTimeoutError: as for active ranks.
        """
        if self.closed:
            self._refuse()
        self.fulfil()
        self.settle()
        fresh = True
        while True:
            fields = [FRESH] if fresh else []
            header = self._exchange([*fields, STOPPING] if self.throws else fields)
            if header.active == 0:
                self._unsettled = False
                if header.failed:
                    self.close_with(self.peers.failures(header.failed))
                even = header.fresh == self._world_size
                if not even:
                    self.leader = self.elect(fresh)
                return Outcome(even=even, last=fresh)
            if self.throws:
                self._stop(header, exhausted=True)
            fresh = False
            self._shadow(header)
            self.settle()

    def fail(self, error: BaseException) -> JoinError | None:
        """Leave the block with ``error``, and see to it that the others learn why.

        Returns:
            What to raise instead, if ``error`` comes of another rank's failure.
        """
        cause = self.explain(error)
        if cause is not None or self.closed:
            return cause
        self.closed = f"this rank raised {type(error).__name__}"
        self.leaving = True
        parts = self._can_part()
        self.peers.leave(error, parts=parts)
        if not (parts and self._part()):
            self.group_is_usable = False
            if parts:
                self.peers.leave(error)
        if isinstance(error, JoinError):
            error.group_is_usable = self.group_is_usable
        return None

    def explain(self, error: BaseException) -> JoinError | None:
        """What to raise instead of ``error``, if it is a collective that broke because of another rank's failure."""
        cause = self.peers.cause_of(error)
        if cause is None and self.timeout is not None and is_broken(error, stores=False):
            cause = self._time_out(in_collective=True)  # the others are there, but do not come to its end
        if cause is not None:
            self.closed = self.closed or f"{type(cause).__name__}: {cause}"
            self.group_is_usable = False
        return cause

    def _can_part(self) -> bool:
        """Whether this rank is between two bursts, so that the next header can tell the others that it fails."""
        return not any(burst.state is BurstState.RUNNING for _, burst in self._bursts)

    def _part(self) -> bool:
        """Come to the next header with the others, who learn there that this rank fails; whether they have come."""
        self._parts_until = time.monotonic() + timeouts().part
        try:
            if any(burst.state is BurstState.OWED for burst in self._owing):
                self.read()  # the others have come to it, too, or are given up
            self.fulfil()
            self.complete_followers()
            self.settle()
            header = self._exchange([FAILED])
            if header.active and not header.stopping:
                self._shadow(header)
        except JoinError as told:  # the block is over for everybody: nobody listens
            return told.group_is_usable
        except Exception as secondary:
            # The user's exception is under way and must not be replaced by ours.
            logger.info("could not tell the peers about the exception: %s", secondary)
            return Channel._can_part(self)  # it may have come after the collectives
        return True

    def _shadow(self, header: Header) -> None:
        if header.diverged:
            self._end_diverged(header)
        for index in header.announcements:
            self._members[index].shadowed += 1
            self._shadow_member(self._members[index])

    def _shadow_member(self, member: Member) -> None:
        if member.burst is None:
            member.hook.main_hook()
        else:
            member.burst.state = BurstState.RUNNING
            member.hook.main_hook()
            member.burst.state = BurstState.IDLE
        self._outstanding += member.followers
        if not any(burst.holds_followers for _, burst in self._bursts):
            self.complete_followers()

    # -- headers ------------------------------------------------------------------------------------------------------

    def _send(self, fields: Sequence[int], announcing: int | None) -> Work:
        fields = list(fields)
        if announcing is not None:
            fields.append(self._code.offsets[announcing])
        for index, burst in self._bursts:
            if burst.flag_count:
                first = self._code.offsets[index] + 1
                fields += [first + i for i, flag in enumerate(burst.flags(index == announcing)) if flag]
        self._was_active = announcing is not None
        self._header, self._unsettled, self._leads = None, True, False
        now = time.monotonic()
        self._away, self._last_sent = now - self._last_sent, now
        self._work = self._line.sum(self._code.pack(fields), self._code.bits)
        self.tally.count(self._work.nbytes)
        return self._work

    def _assumed(self, index: int, active: int, flags: tuple[bool, ...], *, leader_alive: bool) -> Header:
        """What a header would have said, where none is sent.

        Args:
            index: the member that ``active`` ranks would have announced.
            active: how many these are.
            flags: what all of these would have said of its burst.
            leader_alive: whether the leader is among them.
        """
        at = self._code.offsets[index]
        counts = [0] * self._code.fields
        counts[ACTIVE], counts[LEADER], counts[at] = active, int(leader_alive), active
        for place, told in enumerate(flags):
            counts[at + 1 + place] = active if told else 0
        return Header(counts, self._code.offsets)

    def _assume(self, member: Member, header: Header) -> None:
        """Take ``header`` for the last one, which announced ``member``."""
        self._header = self._last_of[id(member.joinable)] = header
        self._leads = header.leader_alive
        self._unsettled = not self._leads  # nothing to settle but a leader that is gone

    def _exchange(self, fields: Sequence[int]) -> Header:
        started = time.monotonic()
        self._sent_by = None
        self._send(fields, None)
        try:
            return self.read()
        finally:
            self.tally.idle += time.monotonic() - started

    def _end_diverged(self, header: Header) -> NoReturn:
        """Active ranks announced different bursts: raise, after helping the one that could not wait."""
        ahead = self._ahead if self.has_several_bursts else self._members[0]
        others_ran_ahead = ahead is not None and ahead is not self._sent_by and not self._awaits_all
        if ahead is not None and others_ran_ahead and self._members.index(ahead) in header.announcements:
            self._shadow_member(ahead)
        names = [f"{n} x {self._members[index].joinable.join_name}" for index, n in header.announcements.items()]
        names += [f"{header.looping} x join.iterate"] if header.looping else []
        mine = "none" if self._sent_by is None else self._sent_by.joinable.join_name
        self.close_with(
            ProtocolError(
                f"{header.active} active ranks announced different bursts: {', '.join(names)}; rank"
                f" {self.collective.rank} announced {mine}. All ranks must call forward, backward and step in the same"
                " order"
            )
        )

    def _refuse(self) -> NoReturn:
        raise JoinError(f"the Join block is over ({self.closed}); leave it before you go on")

    def _stop(self, header: Header, *, exhausted: bool) -> NoReturn:
        """A rank is exhausted under ``throw_on_early_termination``: all raise that, unless there is worse to tell."""
        if header.failed:
            self.close_with(self.peers.failures(header.failed))
        self.terminate_early(exhausted=exhausted)

    def terminate_early(self, *, exhausted: bool) -> NoReturn:
        """Raise what ``throw_on_early_termination`` asks for; ``exhausted`` says whether it is this rank that is."""
        mine = f"Rank {self._rank} exhausted all inputs."
        others = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        self.close_with(EarlyTerminationError(mine if exhausted else others))

    def close_with(self, error: JoinError) -> NoReturn:
        """Raise ``error``, after which nothing can be announced any more."""
        self.closed = f"{type(error).__name__}: {error}"
        self.group_is_usable &= error.group_is_usable
        raise error

    def protest(self, why: str) -> None:
        """Raise a :class:`ProtocolError` for what this rank alone knows, at the end of a burst, unless it leaves."""
        if not self.leaving:
            self._break_off_with(ProtocolError(why))

    def _break_off(self, why: str) -> NoReturn:
        """Raise for a mistake that this rank alone may have made, after telling the others."""
        self._break_off_with(JoinError(why))

    def _break_off_with(self, error: JoinError) -> NoReturn:
        self.fail(error)
        error.group_is_usable = self.group_is_usable
        self.close_with(error)


def _is_behind(told: Progress, mine: Progress) -> bool:
    """Whether a rank has not come to where this one waits."""
    places = [(each.headers, each.loop, each.step, each.meetings) for each in (told, mine)]
    return places[0] < places[1]
