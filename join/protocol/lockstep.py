"""The protocol in a loop over ``Join.iterate``: :class:`LockstepChannel`.

There all ranks run the same loop body as often, with or without data, so every rank issues its collectives itself: no
burst is announced and none is shadowed. Who has data in a step is known from the loop's own roll calls, which
``join.loop.iterate`` tells of, so whatever a burst asks a header for is computed::

    rank with data                                 rank without data
    --------------                                 -----------------
    begin:  header (nothing is announced)          the same
    step:   the body, by the user's own code       the body, on a dummy batch
    ...                                            ...

With a ``timeout``, all ranks meet before each step, and again before each burst.

A rank that leaves the loop alone, or leaves out of a step what others run in it, comes to a place where nobody else
comes to: the next roll call, or the agreement of all that leave. While it waits there it asks the others how far they
are. If one of them is in a burst, or a collective of the body's own, that this rank has left behind, it raises
:class:`ProtocolError`, and the others learn of it as of any failure (``join.failure.peers``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from typing_extensions import override

from join.batch import StepBatch
from join.collectives import Work
from join.collectives.board import Progress
from join.collectives.timeouts import timeouts
from join.collectives.work import DONE
from join.errors import JoinError, ProtocolError
from join.joinable import Burst, Joinable
from join.protocol.announced import Channel, Outcome
from join.protocol.header import ACTIVE, LEADER, Header
from join.protocol.late_use import LateUse
from join.protocol.members import Member

_REMEMBERED = 256  # steps; ranks are never as far from each other, but with a lookahead beyond that

ONE_AT_A_TIME = (
    "one loop over join.iterate in another, on the same process group, is not possible. Run the inner one before or"
    " after the outer one, or without join.iterate: an evaluation with DDP communicates nothing"
)


class LockstepChannel(Channel):
    """The protocol on one group, whose blocks may contain loops in lockstep."""

    _in_last_burst = 0  # the ranks that had data in the loop's last burst
    _last_active = 0  # these, of the last loop in which some ranks ran out before others

    begun = 0
    """How many bursts this rank has begun in the loop, but for those that interject: they may come in any step."""
    meetings = 0
    """How many meetings of the loop it has come to."""
    has_left = False
    """Whether it has left the loop before its end."""
    _last: Member | None = None  # whose burst it has begun last
    _issued_before = 0  # collectives on the group, before the loop
    _still: tuple[dict[int, Progress], float] = ({}, 0.0)  # how far the others were, and since when

    @override
    def _arrange(self) -> None:
        super()._arrange()
        self._computed: dict[tuple[int, tuple[bool, ...], bool], Header] = {}  # of what: it repeats

    @override
    def progress(self) -> Progress:
        return (
            super()
            .progress()
            ._replace(
                loop=self.loop,
                step=self.steps,
                bursts=self.begun,
                burst="" if self._last is None else self._last.joinable.join_name,
                meetings=self.meetings,
                issued=self.collective.issued() - self._issued_before,
                left=self.has_left,
            )
        )

    @override
    def announces_in_forward(self, burst: Burst, *, saves_header: bool, has_buffers: bool) -> bool:
        if self.in_lockstep:  # nothing is sent, and a backward that this rank skips is owed by its forward
            return self.early is burst
        return super().announces_in_forward(burst, saves_header=saves_header, has_buffers=has_buffers)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All ranks begin a loop: one header, awaited.

        Raises:
            JoinError: in the middle of another loop.
            ProtocolError: on all ranks, if some do something else.
            PeerError: if a rank has failed.
        """
        if self.closed:
            self._refuse()
        if self.leave_loop is not None:
            self.leave_loop()
        if self.in_lockstep:
            raise JoinError(ONE_AT_A_TIME)
        self.fulfil()
        self.settle()
        self._outstanding = []
        header = self._exchange([ACTIVE, LEADER] if self.leader == self._rank else [ACTIVE])
        if header.failed:
            self.close_with(self.peers.failures(header.failed))
        if header.announcements:
            self.confirm()
        if header.active < self._world_size:
            missing = self._world_size - header.active
            self._break_off_with(
                ProtocolError(
                    f"{header.active} ranks began a loop over join.iterate, and {missing} had left the block. Also a"
                    " rank without batches loops over join.iterate"
                )
            )
        self._unsettled, self._leads = False, True
        self.in_lockstep = True
        self.late_use = LateUse(self._rank)
        self._all_ranks = (1 << self._world_size) - 1
        self._in_last_burst = 0
        self._set_active(self._all_ranks)
        self.begun = self.steps = self.meetings = 0
        self.has_left, self._last, self._issued_before = False, None, self.collective.issued()
        self.loop += 1
        self._ended = 0  # how many steps of the loop have ended
        self._at_ends = deque([0], maxlen=_REMEMBERED)  # how many bursts this rank had begun then, the last at the end
        self._meeting = self.collective.line(2) if self.timeout is not None else None
        self._met: Work | None = None  # the meeting that this rank has come to, and not all others
        self.roll_calls = self.collective.line(1)
        for line in (self.roll_calls, self._meeting):  # and all ranks meet once more before they use them
            if line is not None:
                line.restart()

    def meet(self, doing: str) -> None:
        """With a ``timeout``, wait for all ranks: roll calls come a step late, but one that sleeps is to be missed."""
        if self._meeting is not None:
            now = time.monotonic()
            self._away, self._last_sent = now - self._last_sent, now
            self.meetings += 1
            work = self._meeting.sum(0, 1)
            self.wait(work, doing)

    def step(self, active: int) -> None:
        """A step begins; the one before has ended.

        Args:
            active: the ranks that have data in it, as a bit mask.
        """
        if self.closed:
            self._refuse()
        if active != self.active_ranks:
            self._set_active(active)
        self.steps += 1

    def _set_active(self, active: int) -> None:
        self.active_ranks, self.first_with_data = active, _lowest(active)
        self.all_have_data = active == self._all_ranks
        self._see_whether_shadowing()

    def end(self) -> None:
        """All ranks leave the loop together."""
        self.end_step()
        self.batch = StepBatch.DATA
        self.in_lockstep = self.shadowing = False
        if self.late_use is not None:
            self.late_use.loop_ended()
            if self.late_use.is_ruled_out or (self.steps == 1 and self.begun):
                self.late_use = None
        if not self.all_have_data:
            self.all_have_data = True
            self._last_active = self._in_last_burst or self.active_ranks
            for _, burst in self._bursts:
                burst.synchronise_own(_lowest(self._last_active))

    def end_step(self) -> None:
        """A step ends: before anything else, a backward that this rank skipped, since the others wait in it."""
        if self.closed:
            self._refuse()
        self.fulfil()
        if self._unsettled:
            self.settle()
        if self._ended < self.steps:
            self._ended = self.steps
            self._at_ends.append(self.begun)

    def leave_first(self, leave: Callable[[], None] | None) -> None:
        """This rank has broken out of the loop, and is in its last batch no more; the loop is left in due form later.

        Args:
            leave: leaves it, before anything else is announced; ``None`` where that begins, or there is nothing left.
        """
        self.leave_loop = leave
        self._see_whether_shadowing()

    def _see_whether_shadowing(self) -> None:
        has_broken_out = self.leave_loop is not None
        self.shadowing = self.in_lockstep and not has_broken_out and not self.active_ranks >> self._rank & 1

    # -- ranks that do not run the same -------------------------------------------------------------------------------

    def agree_to_leave(self) -> None:
        """This rank has left the loop before its end: wait until all have, at the same place.

        Raises:
            ProtocolError: if this rank has left alone.
            PeerError: if another one has, or has failed, or is gone.
            JoinTimeoutError: if another one does not come within ``timeout``.
        """
        self.has_left = True
        pause, started = 1e-3, time.monotonic()
        while True:
            told = self.peers.ask()
            self._look_for_left_out(told)
            if len(told) == self._world_size - 1 and all(map(self._has_left_here, told.values())):
                return
            self._look()
            self.peers.look_for_silent(told)
            if self.timeout is not None and time.monotonic() - started > self.timeout:
                raise self._time_out()
            time.sleep(pause)
            pause = min(2 * pause, timeouts().look)

    def _has_left_here(self, other: Progress) -> bool:
        if other.loop > self.loop:
            return True  # it has agreed to leave, with this rank, and gone on
        return other.left and (other.loop, other.step, other.bursts) == (self.loop, self.steps, self.begun)

    @override
    def _look(self) -> None:
        super()._look()
        if self.in_lockstep and not self.leaving:
            self._look_for_left_out(self.peers.ask())

    def _look_for_left_out(self, told: dict[int, Progress]) -> None:
        """This rank waits behind a step: another may be in something that this one has left out of it.

        Raises:
            ProtocolError: which is known to this rank alone.
        """
        here = {rank: other for rank, other in told.items() if other.loop == self.loop}
        for rank, other in here.items():
            is_behind = other.step <= self._ended  # in a step that this rank has ended
            before = self._begun_by_the_end_of(other.step) if is_behind else self.begun
            is_elsewhere = other.bursts > before or other.meetings > self.meetings
            if self.has_left and (is_elsewhere or other.step > self.steps):
                self._left_alone(rank)
            if is_behind and is_elsewhere:
                what = other.burst if other.bursts == before + 1 else "something"
                self.left_out(what, range(other.step, other.step + 1), rank)
        now, mine = time.monotonic(), self.progress().issued
        moved = {rank: other._replace(beat=0, heard=0) for rank, other in told.items()}
        if moved != self._still[0]:
            self._still = moved, now
        for rank, other in here.items():
            if other.step <= self._ended and 0 < mine < other.issued and now - self._still[1] > timeouts().still:
                self.left_out("a collective of the body's own", range(other.step, other.step + 1), rank)

    def _begun_by_the_end_of(self, step: int) -> int:
        """How many bursts this rank had begun then; or somewhat later, if that was long ago."""
        return self._at_ends[max(step - self._ended - 1, -len(self._at_ends))]

    def _left_alone(self, rank: int) -> NoReturn:
        raise ProtocolError(
            f"rank {self._rank} left the loop over join.iterate in step {self.steps}, and rank {rank} went on. End it"
            " on all ranks at the same place of the same step, by something that all ranks know"
        )

    def left_out(self, what: str, steps: range, rank: int) -> NoReturn:
        """This rank has left something out of one of these steps, which another rank has run: raise.

        Raises:
            ProtocolError: which is known to this rank alone.
        """
        where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        raise ProtocolError(
            f"rank {self._rank} left {what} out of {where} of join.iterate, and rank {rank} did not. All ranks must"
            " run the same body at every step, also on a dummy, or they wait for each other for ever; to leave a batch"
            " out, use join.weight, with 0 for it"
        )

    # -- bursts -------------------------------------------------------------------------------------------------------

    @override
    def announce(self, joinable: Joinable, *, confirm: bool = True) -> Work:
        if self.leave_loop is not None:
            self.leave_loop()
        if not self.in_lockstep:
            return super().announce(joinable, confirm=confirm)
        if self.closed:
            self._refuse()
        self.fulfil(but=joinable)
        if self._unsettled:
            self.settle()
        index = self._index[id(joinable)]
        member = self._members[index]
        if self.shadowing:
            member.shadowed += 1
        else:
            member.times.step(time.monotonic())
        if self._meeting is not None:
            self.meet(f"announced {joinable.join_name} in step {self.steps} of join.iterate")
        self._compute(index)
        self._outstanding = list(member.followers)
        return DONE

    @override
    def follow(self, joinable: Joinable) -> None:
        if self.leave_loop is not None:
            self.leave_loop()
        if not self.in_lockstep:
            super().follow(joinable)
            return
        if self.closed:
            self._refuse()
        self.fulfil(complete=False)
        self._outstanding = [member for member in self._outstanding if member.joinable is not joinable]

    def _compute(self, index: int) -> None:
        """What a header would have said that all ranks sent to announce member ``index``."""
        member = self._members[index]
        flags = () if member.burst is None else tuple(member.burst.declared_flags(weighted=False))
        leads = self.leader == self.first_with_data  # lower ranks come back in a second loop
        header = self._computed.get((index, flags, leads))
        if header is None:
            header = self._assumed(index, self._world_size, flags, leader_alive=leads)
            self._computed[index, flags, leads] = header
        if not member.interjects:
            self.begun, self._last = self.begun + 1, member
        self._in_last_burst = self.active_ranks
        if header is not self._header or not leads:  # else, nothing comes of it that did not the last time
            self._assume(member, header)

    @override
    def protest(self, why: str) -> None:
        if not self.in_lockstep:
            super().protest(why)
        elif not self.leaving:
            raise ProtocolError(why)  # the others learn of it as of any exception in the body

    @override
    def elect(self, candidate: bool) -> int:
        if not self.in_lockstep:
            return super().elect(candidate)
        return self.first_with_data

    # -- leaving ------------------------------------------------------------------------------------------------------

    @override
    def _can_part(self) -> bool:
        return not self.in_lockstep and super()._can_part()

    @override
    def drain(self) -> Outcome:
        outcome = super().drain()
        if outcome.even and self._last_active:
            # Everybody has made every step, but what is this rank's own (buffers) is that of the dummies.
            last = bool(self._last_active >> self._rank & 1)
            self.leader = _lowest(self._last_active)
            return Outcome(even=False, last=last)
        return outcome


def _lowest(ranks: int) -> int:
    """The lowest of the ranks in a bit mask."""
    return (ranks & -ranks).bit_length() - 1
