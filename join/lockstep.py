"""The protocol in a loop over ``Join.iterate``: :class:`LockstepChannel`.

There all ranks run the same loop body as often, with or without data, so every rank issues its collectives itself: no
burst is announced and none is shadowed. Who has data in a step is known from the loop's own headers, which
``join.iteration`` tells of, so whatever a burst asks a header for is computed::

    rank with data                                 rank without data
    --------------                                 -----------------
    begin:  header (nothing is announced)          the same
    step:   the body, by the user's own code       the body, on a dummy batch
    ...                                            ...

With a ``timeout``, all ranks meet before each step, and again before each burst.

A rank that has left out of a step what others run in it raises as if the body had, and runs what it has missed like any
that leaves. Where ranks keep notes it sees that in those of the others: while it waits for the next window or at a
meeting, or when it begins another burst after such a step. Elsewhere a roll call tells it (``join.windows``), once what
it has run since has met what the others ran before.

A rank that leaves the loop early goes on for a while with what it sees the others begin, or else with what it knows of
the body: the bursts that it ran there the time before. It shadows them, so that the others come to where they can be
told (``join.farewell``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NoReturn

from typing_extensions import override

from join.collectives import Line, Work
from join.collectives.work import DONE
from join.errors import JoinError, PeerError, ProtocolError
from join.header import ACTIVE, LEADER, Header
from join.joinable import Joinable
from join.members import Member
from join.protocol import Channel, Outcome

ONE_AT_A_TIME = (
    "one loop over join.iterate in another, on the same process group, is not possible. Run the inner one before or"
    " after the outer one, or without join.iterate: an evaluation with DDP communicates nothing"
)


MEETING = -1
"""In the place of a burst's index: no burst, but a meeting of all ranks, before a step or a burst."""

_BITS = 16  # for an index, and for flags
_UNKNOWN = (1 << _BITS) - 1  # in the place of flags: whoever shadows the burst goes by its own view
_CODE = 2  # what is added to an index, of which the least is that of a meeting: no packed note is 0
_STEPS = 1 << 20  # that notes tell apart: ranks whose steps have bursts are never as far from each other
_COMPARE_SECONDS = 2.0  # how long a rank waits at most to compare notes,
_LOOK_SECONDS = 1e-4  # and how often it looks for them


@dataclass(frozen=True)
class Note:
    """What a rank has begun in a loop.

    Attributes:
        burst: the burst, by its index, or ``MEETING``.
        flags: what it says of the burst; ``None`` if that is not known.
    """

    burst: int
    flags: tuple[bool, ...] | None = None

    @cached_property
    def code(self) -> int:
        """The note as a number of 32 bits."""
        if self.flags is None or len(self.flags) >= _BITS:
            flags = _UNKNOWN
        else:
            flags = sum(1 << place for place, flag in enumerate(self.flags) if flag)
        return self.burst + _CODE | flags << _BITS

    def packed(self, step: int) -> int:
        """The note and the step it is of as one number of 52 bits."""
        return self.code | _packed_step(step)


def _packed_step(step: int) -> int:
    """A step in a packed note, with nothing in the place of the note."""
    return step % _STEPS << 2 * _BITS


class LockstepChannel(Channel):
    """The protocol on one group, whose blocks may contain loops in lockstep."""

    _in_last_burst = 0  # the ranks that had data in the loop's last burst
    _last_active = 0  # these, of the last loop in which some ranks ran out before others

    begun = 0
    """How many bursts this rank has begun in the loop, shadowed ones included, and with a ``timeout`` meetings."""
    last = Note(MEETING).packed(0)
    """The last of them, a packed note."""
    ran = 0
    """How many of them were neither meetings nor such as interject, which come with the first of all, in any step."""
    steps = 0
    """How many steps of the loop it has begun."""
    meets = False
    """Whether all ranks meet in each step, and before each burst."""

    knows_alone = False
    """Whether this rank has raised for something in the loop that no other knows."""
    missed: Sequence[Note] = ()
    """What this rank has yet to run to be even with the others, where it was told that it has left something out."""

    has_been_left: Callable[[], bool] = staticmethod(lambda: False)
    """Whether a rank has left the loop under way."""

    _lines: Sequence[Line] = ()

    @override
    def _arrange(self) -> None:
        super()._arrange()
        self._computed: dict[tuple[int, tuple[bool, ...], bool], tuple[Note, Header]] = {}  # of what: it repeats

    @override
    def somebody_has_left(self) -> bool:
        return self.in_lockstep and self.has_been_left()

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
            self.close_with(PeerError(self._failures(header.failed)))
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
        self._notes = self.collective.line(1)
        self.loop += 1
        self._all_ranks = (1 << self._world_size) - 1
        self._others = [rank for rank in range(self._world_size) if rank != self._rank]
        self._in_last_burst = 0
        self._set_active(self._all_ranks)
        self.begun = self.steps = self.ran = 0
        self._step_of_notes = _packed_step(0)
        self._in_step = self.knows_alone = self._differs = False
        self._sequence: list[Note] = []  # the bursts of a step so far
        self.missed = ()
        # Those of a step, as far as known: all, until one has shown it.
        self._usual = [Note(index) for index, member in enumerate(self._members) if self._is_of_its_own(member)]
        # Not on the roll calls' line: a rank that leaves answers the next of them before it has met the others.
        self.meets = self.timeout is not None
        self._meeting = self.collective.line(2) if self.meets else None
        self._met: Work | None = None  # the meeting that this rank has come to, and not all others
        self._lines = [line for line in (self._notes, self._meeting) if line is not None]
        for line in self._lines:  # and all ranks meet once more before they use it
            line.restart()
            line.watch(self._look_for_left_out)

    def _is_of_its_own(self, member: Member) -> bool:
        is_covered = member.burst is not None and member.burst.is_covered
        return not (member.interjects or (is_covered and self.early is not None))

    def meet(self, doing: str) -> None:
        """With a ``timeout``, wait for all ranks: roll calls come a step late, but one that sleeps is to be missed."""
        if self._meeting is not None:
            begun, last = self.begun, self.last
            self._note(Note(MEETING, ()))
            now = time.monotonic()
            self._away, self._last_sent = now - self._last_sent, now
            self._met = self._met or self._meeting.sum(0, 1)
            try:
                self.wait(self._met, doing)
            except JoinError:
                self.begun, self.last = begun, last  # the others have begun something else, and may come here later
                raise
            self._met = None

    def _look_for_left_out(self) -> None:
        """While this rank waits for the next window, or at a meeting: others may be in a burst that it has left out.

        Raises:
            ProtocolError: which is known to this rank alone.
        """
        if self.leaving:
            return
        ended = self.steps - self._in_step  # in the step under way, this rank may come to it yet
        is_met = self.begun > 0 and _is_meeting(self.last)
        numbers = (self.begun, self.begun + 1) if is_met else (self.begun + 1,)
        for number, rank in product(numbers, self._others):
            packed = self._notes.noted(rank, number)
            if packed is None:
                continue
            note, step = self.unpacked(packed)
            is_right = step > ended if number > self.begun else _is_meeting(packed)
            if is_right:
                continue
            self._raise_left_out([note], range(step, step + 1), rank)

    def has_missed(self, bursts: int, steps: range, rank: int) -> NoReturn:
        """Between two steps: this rank was told that it has left something out.

        Args:
            bursts: how many bursts.
            steps: in which steps.
            rank: one that has run them.

        Raises:
            ProtocolError: which is known to this rank alone.
        """
        usual = self._usual = list(self._sequence) or self._usual
        self.missed = [usual[-number % len(usual)] for number in range(bursts, 0, -1) if usual]
        self._raise_left_out(usual if bursts == len(usual) else [], steps, rank)

    def _raise_left_out(self, notes: Sequence[Note], steps: range, rank: int) -> NoReturn:
        left_out = [self._members[note.burst] for note in notes if 0 <= note.burst < len(self._members)]
        names = ", ".join(dict.fromkeys(member.joinable.join_name for member in left_out)) or "something"
        where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        self.knows_alone = True
        raise ProtocolError(
            f"rank {self._rank} left {names} out of {where} of join.iterate, and rank {rank} did not. All ranks must"
            " run the same body at every step, also on a dummy, or they wait for each other for ever; to leave a batch"
            " out, use join.weight, with 0 for it"
        )

    def step(self, active: int) -> None:
        """A step begins; the one before has ended.

        Args:
            active: the ranks that have data in it, as a bit mask.
        """
        if self.closed:
            self._refuse()
        if not self.leaving:
            sequence, steps = self._sequence, self.steps
            self._differs = steps == 1 or not sequence or len(sequence) != len(self._usual)
            # A step without bursts may be one of several that accumulate gradients.
            if sequence or (steps and not self._in_last_burst):
                self._usual = sequence
        self._sequence = []
        if active != self.active_ranks:
            self._set_active(active)
        self.steps += 1
        self._step_of_notes, self._in_step = _packed_step(self.steps), True

    def be_in(self, step: int, active: int) -> None:
        """What this rank shadows next is of this step, which it may have ended; ``active`` as for :meth:`step`."""
        self._step_of_notes = _packed_step(step)
        self._set_active(active)

    def _set_active(self, active: int) -> None:
        self.active_ranks, self._first_active = active, _lowest(active)
        self._see_whether_shadowing()

    def end(self) -> None:
        """All ranks leave the loop together."""
        self.end_step()
        self.in_lockstep = self.shadowing = False
        if self.active_ranks != self._all_ranks:
            self._last_active = self._in_last_burst or self.active_ranks
            for _, burst in self._bursts:
                burst.loop_ended(_lowest(self._last_active))

    def end_step(self) -> None:
        """A step ends: before anything else, a backward that this rank skipped, since the others wait in it."""
        if self.closed:
            self._refuse()
        self.fulfil()
        if self._unsettled:
            self.settle()
        self._in_step = False

    def leave_first(self, leave: Callable[[], None] | None) -> None:
        """This rank has broken out of the loop, and is in its last batch no more; the loop is left in due form later.

        Args:
            leave: leaves it, before anything else is announced; ``None`` where that begins, or there is nothing left.
        """
        self.leave_loop = leave
        self._see_whether_shadowing()

    def loop_over(self) -> None:
        """The loop is over for this rank, however it ended."""
        self.leave_first(None)
        self.look_no_more()

    def look_no_more(self) -> None:
        """Whatever others are in, this rank knows by other means that they are behind or ahead."""
        for line in self._lines:
            line.watch(None)

    def _see_whether_shadowing(self) -> None:
        has_broken_out = self.leave_loop is not None
        self.shadowing = self.in_lockstep and not has_broken_out and not self.active_ranks >> self._rank & 1

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
        if self.meets:
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

    def _compute(self, index: int, flags: tuple[bool, ...] | None = None) -> None:
        """What a header would have said that all ranks sent to announce member ``index``.

        Args:
            index: the member.
            flags: those of its burst; without, this rank's own view of them.
        """
        member = self._members[index]
        if flags is None:
            flags = () if member.burst is None else tuple(member.burst.declared_flags(weighted=False))
        leads = self.leader == self._first_active  # lower ranks come back in a second loop
        computed = self._computed.get((index, flags, leads))
        if computed is None:
            header = self._assumed(index, self._world_size, flags, leader_alive=leads)
            computed = self._computed[index, flags, leads] = Note(index, flags), header
        note, header = computed
        if self._differs:
            self._note_and_compare(note)
        else:
            self._note(note)
        if not member.interjects:
            self.ran += 1
            self._sequence.append(note)
        self._in_last_burst = self.active_ranks
        if header is not self._header or not leads:  # else, nothing comes of it that did not the last time
            self._assume(member, header)

    def _note(self, note: Note) -> None:
        begun = self.begun = self.begun + 1
        last = self.last = note.code | self._step_of_notes
        self._notes.note(begun, last)

    def _note_and_compare(self, note: Note) -> None:
        """Behind a step that was the first, or not as the one before: wait for all notes of the burst begun here.

        A rank that has left bursts out of that step alone is in a later step than others that have begun as many: what
        it runs now would meet what they still run there. In other steps nobody waits.

        Raises:
            ProtocolError: which is known to this rank alone.
        """
        begun, last = self.begun, self.last
        self._note(note)
        if not (self.leaving or self.meets) and self.keeps_notes:
            try:
                self._compare()
            except BaseException:
                self.begun, self.last = begun, last  # what this rank takes part in next is what the others have begun
                raise
        self._differs = False

    def _compare(self) -> None:
        deadline = time.monotonic() + _COMPARE_SECONDS
        awaited = self._others
        while True:
            late: list[int] = []
            for rank in awaited:
                packed = self._notes.noted(rank, self.begun)
                if packed is None:
                    late.append(rank)
                    continue
                note, step = self.unpacked(packed)
                if step < self.steps:
                    self._raise_left_out([note], range(step, step + 1), rank)
            if not late or time.monotonic() > deadline:
                return
            awaited = late
            time.sleep(_LOOK_SECONDS)

    @override
    def fail(self, error: BaseException) -> None:
        if not self.in_lockstep:  # there, the block of the loop tells the others
            super().fail(error)

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
        return self._first_active

    # -- leaving ------------------------------------------------------------------------------------------------------

    @property
    def keeps_notes(self) -> bool:
        """Whether a rank that leaves can see what the others have begun."""
        return self._notes.keeps_notes

    def next_note(self) -> int | None:
        """What another rank has begun next, of what this one has not, if the ranks keep notes; a packed note."""
        noted = [self._notes.noted(rank, self.begun + 1) for rank in self._others]  # its own it may have taken back
        found = [number for number in noted if number is not None]
        # Others may have taken back a meeting, and did for a burst; or one of a later step.
        return min(found, key=lambda number: (_is_meeting(number), self.unpacked(number)[1]), default=None)

    def unpacked(self, number: int) -> tuple[Note, int]:
        """The note of which ``number`` is the packed form, and its step."""
        rest, code = divmod(number, 1 << _BITS)
        step, flags = divmod(rest, 1 << _BITS)
        index = code - _CODE
        step = self.steps + (step - self.steps + _STEPS // 2) % _STEPS - _STEPS // 2
        is_known = 0 <= index < len(self._members)  # it may be of a block that is closed here
        burst = self._members[index].burst if is_known else None
        count = 0 if burst is None else burst.flag_count
        told = tuple(bool(flags >> place & 1) for place in range(count))
        return Note(index, None if flags == _UNKNOWN else told), step

    @property
    def expected(self) -> Note | None:
        """The burst that usually comes next in this step; ``None`` if it has none left."""
        if any(burst.holds_followers for _, burst in self._bursts):
            return next(Note(index) for index, burst in self._bursts if burst.interjects)
        # Before the first burst of all, accumulated gradients tell that one is due.
        usual = self._usual or [Note(index) for index, burst in self._bursts if burst.is_due]
        return next(iter(usual[len(self._sequence) :]), None)

    def shadow(self, note: Note) -> None:
        """Shadow a burst that others run, or take part in a meeting; what came before has ended (:meth:`end_step`)."""
        if note.burst == MEETING:
            self.meet("has left the loop over join.iterate")
            return
        self._compute(note.burst, note.flags)
        self._shadow_member(self._members[note.burst])

    def shadow_step(self, active: int) -> None:
        """The others begin a step; ``active`` as for :meth:`step`."""
        self.end_step()
        self.step(active)

    @override
    def drain(self) -> Outcome:
        outcome = super().drain()
        if outcome.even and self._last_active:
            # Everybody has made every step, but what is this rank's own (buffers) is that of the dummies.
            last = bool(self._last_active >> self._rank & 1)
            self.leader = _lowest(self._last_active)
            return Outcome(even=False, last=last)
        return outcome


def _is_meeting(number: int) -> bool:
    """Whether a packed note is of a meeting."""
    return number & ((1 << _BITS) - 1) == MEETING + _CODE


def _lowest(ranks: int) -> int:
    """The lowest of the ranks in a bit mask."""
    return (ranks & -ranks).bit_length() - 1
