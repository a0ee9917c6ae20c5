"""Headers, the messages by which active ranks announce bursts: who sends them, their code, and the one under way.

A header is a few counters in one whole number, summed over all ranks. Every rank, active or joined, contributes 0 or 1
to every counter; the sums are all that a rank needs to know of the others. The number of counters depends on the bursts
in the list and not on the number of ranks::

    ACTIVE, LEADER, STOPPING, FRESH,  then, for each burst,  announced, *flags

``ACTIVE`` counts the ranks that announce. ``LEADER`` is 1 while the leader is among them. ``STOPPING`` counts the
exhausted ranks under ``throw_on_early_termination``, ``FRESH`` those that send their first header after their last
input. A burst's ``announced`` counts the ranks that announce it: any number but 0 or ``ACTIVE`` means that the ranks
have diverged.

A counter has as many bits as the world size, so sums never overflow: those of a DDP module are 63 bits at most up to 31
ranks. On gloo the cost of a small all-reduce grows with its elements.

To *apply* a header is to act on one that was sent earlier: it raises what the header reports (ranks that diverged), and
finds a new leader if the old one has left and any burst needs a leader. All ranks apply header i after burst i and
before header i+1; or, if burst i was foreseen and headers travel in messages, which take their time,

- before burst i+1 and after header i+1, if burst i+1 needs the leader, or was not foreseen itself;
- else before header i+2.

*Foreseen bursts.* Nobody waits for a header that announces what was expected. All ranks see the same headers in the
same order, so all expect the same burst next: the one that came one period ago, or, before there is a period, the
backward if there is one kind of them (``Burst.runs_ahead``). A rank that announces another burst than the expected one
reads its header first, finds the difference if there is one, and raises :class:`ProtocolError`, of which those that ran
what was expected learn as of any failure::

    rank that announces what is expected           rank that announces something else
    ------------------------------------           ----------------------------------
    header (starts)                                header (awaited)
    the burst                                      ProtocolError: the note says why; sends nothing more
    its next header, or a collective breaks        .
    PeerError                                      .

What a foreseen burst must know of the ranks, it takes from the header before its own (``Headers.active_for``). A rank
that has left between these two has not been told what the others are told in the burst, so it is checked before the
next header (``Burst.check_leavers``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NoReturn

import torch

from join.collectives import Collective, Sum
from join.collectives._torch_private import profiled
from join.errors import ProtocolError, described
from join.failure.guard import Guard
from join.joinable import Burst, Joinable, JoinHook
from join.report.rank_report import BINS

ACTIVE, LEADER, STOPPING, FRESH = range(4)
_FIXED = 4
_LONGEST_PERIOD = 64  # bursts


class Header:
    """One summed header.

    Args:
        counts: the counters.
        offsets: where each burst's section starts.

    Attributes:
        active: how many ranks announced.
        leader_alive: whether the leading rank announced.
        stopping: whether an exhausted rank ends the block for all.
        fresh: how many ranks had just run out of inputs.
        announcements: the bursts that were announced, by index, and by how many ranks each.
        diverged: whether active ranks announced different bursts.
        flags: for each burst, by index, how many ranks set each of its flags.
    """

    def __init__(self, counts: Sequence[int], offsets: Sequence[int]) -> None:
        self.counts = counts
        self.active, leaders, stopping, self.fresh = counts[:_FIXED]
        self.leader_alive, self.stopping = leaders > 0, stopping > 0
        self.announcements = {index: counts[at] for index, at in enumerate(offsets) if counts[at]}
        self.diverged = not {self.active}.issuperset(self.announcements.values())
        ends = (*offsets[1:], len(counts))
        self.flags = [counts[begin + 1 : end] for begin, end in zip(offsets, ends, strict=False)]


class HeaderCode:
    """Packs and unpacks headers.

    Args:
        flag_counts: the number of flags of each burst that can be announced.
        world_size: the number of ranks.
    """

    def __init__(self, flag_counts: Sequence[int], world_size: int) -> None:
        self.offsets: list[int] = []
        fields = _FIXED
        for flag_count in flag_counts:
            self.offsets.append(fields)
            fields += 1 + flag_count
        self._size, self._world_size = world_size.bit_length(), world_size
        self.ones = [1 << self._size * place for place in range(fields)]
        """For each field, this rank's contribution that sets it to 1."""
        self.bits = fields * self._size
        """Size of a header in bits."""
        # Headers repeat step by step: what they say is kept, since unpacking is half of the cost of reading one.
        self.unpack = cache(self._unpack)
        self.of_all = cache(self._of_all)

    def _unpack(self, total: int) -> Header:
        """Read the sum of all contributions."""
        mask = (1 << self._size) - 1
        return Header([total >> self._size * place & mask for place in range(len(self.ones))], self.offsets)

    def _of_all(self, index: int, leader_alive: bool) -> Header:
        """Return the header in which all ranks announce burst ``index``."""
        total = self._world_size * (self.ones[ACTIVE] + self.ones[self.offsets[index]])
        return self.unpack(total + self.ones[LEADER] if leader_alive else total)


@dataclass(eq=False)
class Member:
    """A joinable in a block.

    Attributes:
        joinable: the object.
        hook: its hook for this block.
        followers: the members that act after each of its bursts, if it announces; they have none themselves.
        shadowed: how many bursts this rank shadowed.
        times: how many of the bursts that this rank announced took how long, by bin of a report, each from the one
            before.
        announced_at: when this rank announced the last of them, on the monotonic clock; at first, entered the block.
        burst: the joinable, if it announces by nature and not only because it comes first.
        interjects: whether its bursts come between another one and its followers.
        announced_in: the last header that announced it.
    """

    joinable: Joinable
    hook: JoinHook
    followers: list[Member] = field(default_factory=list["Member"])
    shadowed: int = 0
    times: list[int] = field(default_factory=lambda: [0] * BINS)
    announced_at: float = 0.0
    burst: Burst | None = field(init=False)
    interjects: bool = field(init=False)
    announced_in: LastHeader = field(init=False)

    def __post_init__(self) -> None:
        self.burst = self.joinable if isinstance(self.joinable, Burst) else None
        self.interjects = self.burst is not None and self.burst.interjects


@dataclass(eq=False)
class Scope:
    """One block's members and settings.

    Bursts announce. So does a plain joinable that has no announcing one before it in the list. Every other plain
    joinable follows the nearest announcing one before it: it acts once after each of its bursts.

    Attributes:
        members: all joinables of the block, in the order of the list.
        throw: ``throw_on_early_termination`` of the block.
        timeout: seconds a header may take, or ``None``.
        weight: ``Join.weight`` in a plain loop.
        announcing: the members that announce; filled from ``members``.
    """

    members: Sequence[Member]
    throw: bool
    timeout: float | None
    weight: float | None = None
    announcing: list[Member] = field(default_factory=list[Member], init=False)

    def __post_init__(self) -> None:
        for member in self.members:
            if not member.joinable.communicates:
                continue
            if member.burst is not None or not self.announcing:
                self.announcing.append(member)
            else:
                self.announcing[-1].followers.append(member)


class Roster:
    """The members that announce on a group. It does not change: a block that opens or closes puts another in its place.

    Args:
        scopes: the blocks that are open, the innermost last.
        world_size: the number of ranks.

    Attributes:
        scopes: these blocks.
        listed: all that are listed in them, including those that do not announce.
        announcing: all that announce in them, in the order in which headers count them.
        index: of each member, by the ``id`` of its joinable.
        bursts: those that announce by nature, with their index.
        may_be_pending: those that may be announced before they run.
        code: packs the headers.
        flagged: those of ``bursts`` that have flags.
        first: the index of what is expected before anything is known: the only one that announces, but for bursts that
            interject, or the only one that runs backwards (``Burst.runs_ahead``); ``None`` if there is no such one.
        is_alone: whether nothing else announces, but for bursts that interject.
        early: the backward, if there is one kind of them, and it may be announced in the forward, before it runs: not
            under ``timeout``, where a header means that the burst starts now.
        needing_leader: the indices of bursts that may need to know the lowest active rank.
        tracks_leader: whether there are any.
        throws: whether all ranks raise as soon as one has run out, as the innermost block says.
        timeout: seconds after which a rank that does not come is an error, if any, as the innermost block says.
        awaited: the indices of those whose headers are awaited for that (``Burst.breaks_in_time``).
    """

    def __init__(self, scopes: Sequence[Scope], world_size: int) -> None:
        self.scopes = scopes
        self.listed = [member for scope in scopes for member in scope.members]
        self.announcing = [member for scope in scopes for member in scope.announcing]
        self.index = {id(member.joinable): index for index, member in enumerate(self.announcing)}
        bursts = [member.burst for member in self.announcing]
        self.bursts = [(index, burst) for index, burst in enumerate(bursts) if burst is not None]
        self.may_be_pending = [burst for _, burst in self.bursts if type(burst).fulfil is not Burst.fulfil]
        flag_counts = [0 if burst is None else burst.flag_count for burst in bursts]
        self.code = HeaderCode(flag_counts, world_size)
        self.flagged = [(index, burst) for index, burst in self.bursts if burst.flag_count]
        self.throws, self.timeout = (scopes[-1].throw, scopes[-1].timeout) if scopes else (False, None)
        self.needing_leader = {index for index, burst in self.bursts if burst.tracks_leader}
        self.tracks_leader = bool(self.needing_leader)
        limited = {index for index, burst in self.bursts if burst.breaks_in_time}
        self.awaited = set(range(len(self.announcing))) - limited if self.timeout is not None else set[int]()
        regular = [index for index, member in enumerate(self.announcing) if not member.interjects]
        backwards = [index for index, burst in self.bursts if burst.runs_ahead]
        self.is_alone = len(regular) == 1
        self.first = regular[0] if self.is_alone else backwards[0] if len(backwards) == 1 else None
        is_early = len(backwards) == 1 and self.timeout is None
        self.early = self.announcing[backwards[0]].burst if is_early else None
        self.needing_leader.update(backwards if is_early else ())  # one in the forward may cover buffers

    def devices(self) -> list[torch.device]:
        """Those on which what is listed communicates."""
        return [member.joinable.join_device for member in self.listed]


@dataclass
class Tally:
    """The headers that a rank has sent, and how long it has waited for headers while joined."""

    headers: int = 0
    nbytes: int = 0
    idle: float = 0.0

    def since(self, earlier: Tally) -> Tally:
        """Return the difference to an earlier tally."""
        return Tally(self.headers - earlier.headers, self.nbytes - earlier.nbytes, self.idle - earlier.idle)


@dataclass(slots=True)
class LastHeader:
    """The header that this rank has sent last, which may be under way; each one takes the place of the one before.

    Attributes:
        number: how many headers this rank has sent up to it.
        before: the one before it, until this one is applied.
        work: its sum over all ranks; ``None`` if all ranks know it without one.
        member: whose burst this rank announced in it, if any.
        expected: the index of the member whose burst all ranks expected in it, if any.
        header: what was read of it, once it was.
        is_applied: whether it was acted on, or there is nothing to do.
        knows_leader: whether the leader from its burst on is known.
        waiting: called with that leader, once it is.
    """

    number: int = 0
    before: LastHeader | None = None
    work: Sum | None = None
    member: Member | None = None
    expected: int | None = None
    header: Header | None = None
    is_applied: bool = True
    knows_leader: bool = True
    waiting: list[Callable[[int], None]] = field(default_factory=list[Callable[[int], None]])


class Foresight:
    """Expects bursts to go on as they did when they last were like this; the same on all ranks.

    Args:
        roster: who announces.
    """

    def __init__(self, roster: Roster) -> None:
        self.expected = roster.first
        """The index of the member that is to announce next, if that is known."""
        self._roster = roster
        self._past: list[int] = []
        self._period = 0  # what came so many bursts ago comes next; 0 if that is not known

    def saw(self, index: int) -> None:
        """Note whose burst was announced."""
        roster, past = self._roster, self._past
        if roster.announcing[index].interjects:
            return
        past.append(index)
        if index != self.expected or not self._period:
            self._period = _period_of(past)
        if len(past) > 4 * _LONGEST_PERIOD:
            del past[: -2 * _LONGEST_PERIOD]
        self.expected = past[-self._period] if self._period else roster.first


def _period_of(past: Sequence[int]) -> int:
    """How long ago the end of ``past`` was as it is now, for as many bursts as possible; 0 if its last one is new."""
    best, longest, count = 0, 0, len(past)
    for ago in range(1, min(count, _LONGEST_PERIOD)):
        length = 0
        while length < count - ago and past[-1 - length] == past[-1 - length - ago]:
            length += 1
        if length > longest:
            best, longest = ago, length
    return best


class Headers:
    """The headers of one group, of which one at a time is under way, or two where they travel in messages.

    Args:
        collective: the ranks.
        guard: waits for them.
        roster: who announces; another one takes its place as blocks open and close.
    """

    def __init__(self, collective: Collective, guard: Guard, roster: Roster) -> None:
        self.use(roster)
        self.tally = Tally()
        self.leader = 0
        """The rank that speaks for all where one must: the lowest active one; after a block, the last joiner."""
        self.last = LastHeader()
        self.depth = 1
        """How many headers may be under way."""
        self.before_next: Callable[[], None] | None = None
        """Called once, before the next header: checks what ranks have entered with, by a sum on the same line."""
        self._collective, self._guard = collective, guard
        self._rank, self._world_size = collective.rank, collective.world_size

    def use(self, roster: Roster) -> None:
        """Let those of another roster announce from now on; called at the same place on all ranks."""
        self.roster, self.foresight = roster, Foresight(roster)

    def agree(self) -> None:
        """Find out what carries headers; called when all ranks have entered the group's first block."""
        self.line = self._collective.line()
        self.depth = self.line.depth

    def make_ready(self) -> None:
        """See to it that all ranks are known to have entered with the same, before anything is sent in the block."""
        if self.before_next is not None:
            check, self.before_next = self.before_next, None
            try:
                check()
            except ProtocolError as error:
                self._guard.closed = described(error)  # all ranks find that out here
                raise

    # -- sending ------------------------------------------------------------------------------------------------------

    def exchange(self, fields: list[int], *, active: bool = False) -> Header:
        """Send a header in which this rank announces no burst, and wait for it.

        Args:
            fields: the fields that this rank sets to 1.
            active: whether it announces that it is active.
        """
        started = time.monotonic()
        self.send(fields, active=active)
        try:
            return self._read(self.last)
        finally:
            if not active:
                self.tally.idle += time.monotonic() - started

    def send(self, fields: Sequence[int] = (), index: int | None = None, *, active: bool = True) -> Sum:
        """Start a header, in which this rank announces member ``index``, if any."""
        if self.before_next is not None:
            self.make_ready()
        roster, code, number = self.roster, self.roster.code, 0
        for place in fields:
            number += code.ones[place]
        if active:
            number += code.ones[ACTIVE] + (code.ones[LEADER] if self.leader == self._rank else 0)
        if index is not None:
            number += code.ones[code.offsets[index]]
        for other, burst in roster.flagged:
            for place, flag in enumerate(burst.flags(other == index), code.offsets[other] + 1):
                if flag:
                    number += code.ones[place]
        member = None if index is None else roster.announcing[index]
        before, expected = self.last if self.last.number else None, self.foresight.expected
        self.last = LastHeader(
            self.tally.headers + 1, before, None, member, expected, is_applied=False, knows_leader=False
        )
        if member is not None and index is not None:
            member.announced_in = self.last
            if not roster.is_alone:
                self.foresight.saw(index)
        if self._guard.timeout is not None:
            self._guard.arrive()
        with profiled("header"):
            work = self.last.work = self.line.sum(number, code.bits)
        self.tally.headers += 1
        self.tally.nbytes += work.nbytes
        return work

    def set_announced_by_all(self, index: int, *, leader_alive: bool) -> None:
        """Set the last header without sending one: all ranks are known to run a burst of member ``index`` now.

        Args:
            index: the member.
            leader_alive: whether the leader has data.
        """
        member = self.roster.announcing[index]
        header = self.roster.code.of_all(index, leader_alive)
        # There is nothing to apply but a leader that is gone.
        self.last = LastHeader(member=member, header=header, is_applied=leader_alive, knows_leader=leader_alive)
        member.announced_in = self.last

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self) -> Header:
        """Wait for the last header, without passing judgement on it."""
        last = self.last
        return last.header or self._read(last)

    def _read(self, last: LastHeader) -> Header:
        if last.before is not None and last.before.header is None:
            self._read(last.before)
        assert last.work is not None
        self._guard.awaits_header = last.number
        self._guard.wait(last.work)
        last.header = self.roster.code.unpack(last.work.total())
        if last.member is None:
            for index in last.header.announcements:
                self.roster.announcing[index].announced_in = last
                if not self.roster.is_alone:
                    self.foresight.saw(index)
        return last.header

    def is_foreseen(self, index: int, last: LastHeader | None = None) -> bool:
        """Return whether all ranks expected this burst in the last header, so that those that run it do not wait.

        Args:
            index: that of the member whose burst it is.
            last: another header than the last one, if it is in that.
        """
        last = last or self.last
        return index == last.expected and last.before is not None and not self.roster.throws

    def active_for(self, burst: Burst) -> int:
        """Return how many ranks are active as far as all know that run ``burst``, which is in the last header.

        Where it was foreseen, that is how many announced in the header before; else in its own, for which this waits.
        """
        before = self.last.before
        if before is not None and self.is_foreseen(self.roster.index[id(burst)]):
            return (before.header or self._read(before)).active
        return self.read().active

    def announced(self, burst: Burst) -> int:
        """Return how many ranks announced ``burst`` in the last header that announced it; waits for it."""
        index = self.roster.index[id(burst)]
        last = self.roster.announcing[index].announced_in
        return (last.header or self._read(last)).announcements.get(index, 0)

    def flags(self, burst: Burst) -> Sequence[int]:
        """Return how many ranks set each flag of ``burst`` in the last header that announced it; waits for it."""
        index = self.roster.index[id(burst)]
        last = self.roster.announcing[index].announced_in
        return (last.header or self._read(last)).flags[index]

    def flags_beside(self, burst: Burst) -> tuple[Sequence[int], int]:
        """Return how many ranks set each flag of ``burst`` in the last header of any burst; and how many announced."""
        header = self.read()
        return header.flags[self.roster.index[id(burst)]], header.active

    def confirm(self) -> None:
        """Wait for the last header and make sure that all active ranks announced the same, unless that was foreseen.

        Raises:
            ProtocolError: if they did not.
            EarlyTerminationError: if a rank is exhausted under ``throw_on_early_termination``.
        """
        member = self.last.member
        if member is not None and self.is_foreseen(self.roster.index[id(member.joinable)]):
            return
        header = self.read()
        if header.stopping:
            self._guard.raise_early_termination(exhausted=False)
        self.check()

    # -- acting on a header -------------------------------------------------------------------------------------------

    def apply_due(self, elect: Callable[[bool], int]) -> None:
        """Act on headers that were not acted on before, but for the last one, if its burst was foreseen."""
        self.apply_before(elect)
        last = self.last
        if not (last.is_applied or self._was_foreseen(last)):
            self.apply(last, elect)

    def apply_before(self, elect: Callable[[bool], int], index: int | None = None) -> None:
        """Act on the header before the last one, if that is not done; only if it is due before burst ``index`` runs."""
        before = self.last.before
        if before is None or before.is_applied:
            return
        if index is None or index in self.roster.needing_leader or not self.is_foreseen(index):
            self.apply(before, elect)

    def _was_foreseen(self, last: LastHeader) -> bool:
        if last.expected is None or not self.is_foreseen(last.expected, last):
            return False
        if last.member is None:
            return last.header is not None and last.expected in last.header.announcements
        return self.roster.announcing[last.expected] is last.member

    def apply(self, last: LastHeader, elect: Callable[[bool], int]) -> None:
        """Act on a header, which was not acted on before; ``elect`` finds a new leader among active ranks."""
        header = last.header or self._read(last)
        if header.diverged:
            self._raise_diverged(last)
        last.is_applied, before = True, last.before
        if before is not None and before.header is not None and before.header.active > header.active:
            for index in header.announcements:
                burst = self.roster.announcing[index].burst
                if burst is not None and self.is_foreseen(index, last):
                    burst.check_leavers()
        last.before = None
        if not (last.knows_leader or header.leader_alive):
            self._find_leader(last, elect)
        for use in last.waiting:
            use(self.leader)

    def find_leader(self, elect: Callable[[bool], int]) -> int:
        """Return the leader from the last header's burst on: a new one, if the old one was not among its ranks.

        Called at the same place on all ranks, if at all before the header is applied.
        """
        return self._find_leader(self.last, elect)

    def _find_leader(self, last: LastHeader, elect: Callable[[bool], int]) -> int:
        if not last.knows_leader:
            last.knows_leader = True
            if self.roster.tracks_leader and not (last.header or self._read(last)).leader_alive:
                self.leader = elect(last.member is not None)
        return self.leader

    def when_leader_is_known(self, use: Callable[[int], None]) -> None:
        """Call ``use`` with the leader of the last header's burst, once that is known without waiting for it."""
        if self.last.is_applied:
            use(self.leader)
        else:
            self.last.waiting.append(use)

    def check(self) -> None:
        """Raise a :class:`ProtocolError` if active ranks announced different bursts in the last header."""
        if self.read().diverged:
            self._raise_diverged(self.last)

    def _raise_diverged(self, last: LastHeader) -> NoReturn:
        own, announcing, header = last.member, self.roster.announcing, last.header
        assert header is not None
        names = [f"{count} x {announcing[index].joinable.join_name}" for index, count in header.announcements.items()]
        looping = header.active - sum(header.announcements.values())
        names += [f"{looping} x join.iterate"] if looping else []
        self._guard.raise_alone(
            ProtocolError(
                f"{header.active} active ranks announced different bursts: {', '.join(names)}; rank"
                f" {self._rank} announced {'none' if own is None else own.joinable.join_name}. All ranks"
                " must call forward, backward and step in the same order [J088]"
            )
        )
