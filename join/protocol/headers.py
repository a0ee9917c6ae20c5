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
before header i+1.

*Running ahead.* A backward pass cannot stop to read its header. As long as only one burst of the group is of that kind
(``Burst.runs_ahead``), it need not: a rank that announced another burst reads its header first, finds the difference,
and raises :class:`ProtocolError`, of which the rank that ran ahead learns as of any failure. With several such bursts,
each reads its header first.
"""

from __future__ import annotations

import time
from bisect import bisect
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
from join.report.rank_report import BINS, EDGES

ACTIVE, LEADER, STOPPING, FRESH = range(4)
_FIXED = 4


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


class StepTimes:
    """Counts the times between the bursts that one rank announces, in the bins of a report."""

    def __init__(self) -> None:
        self.counts = [0] * BINS
        """How many bursts took how long, by bin."""
        self._last = 0.0

    @property
    def total(self) -> int:
        """How many bursts were announced."""
        return sum(self.counts)

    def start(self, now: float) -> None:
        """Let the first burst begin at ``now``, in seconds of a monotonic clock."""
        self._last = now

    def step(self, now: float) -> None:
        """Count a burst that is announced at ``now``."""
        took, self._last = now - self._last, now
        self.counts[bisect(EDGES, took, 1, BINS) - 1] += 1


@dataclass(eq=False)
class Member:
    """A joinable in a block.

    Attributes:
        joinable: the object.
        hook: its hook for this block.
        followers: the members that act after each of its bursts, if it announces; they have none themselves.
        shadowed: how many bursts this rank shadowed.
        times: how long the bursts took that this rank announced, each from the one before.
        burst: the joinable, if it announces by nature and not only because it comes first.
        interjects: whether its bursts come between another one and its followers.
        header: the last one that announced it.
    """

    joinable: Joinable
    hook: JoinHook
    followers: list[Member] = field(default_factory=list["Member"])
    shadowed: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    burst: Burst | None = field(init=False)
    interjects: bool = field(init=False)
    header: Header = field(init=False)

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
        announcing: the members that announce; filled from ``members``.
    """

    members: Sequence[Member]
    throw: bool
    timeout: float | None
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
        ahead: the one that need not wait for its header (``Burst.runs_ahead``), if there is just one of that kind.
        early: that one, if it may be announced in the forward, before its backward runs: not under ``timeout``, where a
            header means that the burst starts now.
        tracks_leader: whether any burst needs to know the lowest active rank.
        throws: whether all ranks raise as soon as one has run out, as the innermost block says.
        timeout: seconds after which a rank that does not come is an error, if any, as the innermost block says.
        awaits_all: whether every header is awaited, so that no burst runs ahead of its own.
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
        self.awaits_all = self.throws or self.timeout is not None
        self.tracks_leader = any(burst.tracks_leader for _, burst in self.bursts)
        running_ahead = [self.announcing[index] for index, burst in self.bursts if burst.runs_ahead]
        self.ahead = running_ahead[0] if len(running_ahead) == 1 else None
        self.early = self.ahead.burst if self.ahead is not None and self.timeout is None else None

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
        work: its sum over all ranks; ``None`` if all ranks know it without one.
        member: whose burst this rank announced in it, if any.
        header: what was read of it, once it was.
        is_applied: whether it was acted on, or there is nothing to do.
        knows_leader: whether the leader from its burst on is known.
        waiting: called with that leader, once it is.
    """

    work: Sum | None = None
    member: Member | None = None
    header: Header | None = None
    is_applied: bool = True
    knows_leader: bool = True
    waiting: list[Callable[[int], None]] = field(default_factory=list[Callable[[int], None]])


class Headers:
    """The headers of one group, of which one at a time is under way.

    Args:
        collective: the ranks.
        guard: waits for them.
        roster: who announces; another one takes its place as blocks open and close.
    """

    def __init__(self, collective: Collective, guard: Guard, roster: Roster) -> None:
        self.roster = roster
        self.tally = Tally()
        self.leader = 0
        """The rank that speaks for all where one must: the lowest active one; after a block, the last joiner."""
        self.last = LastHeader()
        self.before_next: Callable[[], None] | None = None
        """Called once, before the next header: checks what ranks have entered with, by a sum on the same line."""
        self._collective, self._guard = collective, guard
        self._rank, self._world_size = collective.rank, collective.world_size

    def agree(self) -> None:
        """Find out what carries headers; called when all ranks have entered the group's first block."""
        self.line = self._collective.line()

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
            return self.read()
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
        self.last = LastHeader(None, member, is_applied=False, knows_leader=False)
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
        member.header = self.roster.code.of_all(index, leader_alive)
        # There is nothing to apply but a leader that is gone.
        self.last = LastHeader(None, member, member.header, is_applied=leader_alive, knows_leader=leader_alive)

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self) -> Header:
        """Wait for the last header, without passing judgement on it."""
        last = self.last
        if last.header is None:
            assert last.work is not None
            self._guard.wait(last.work)
            last.header = self.roster.code.unpack(last.work.total())
            for index in last.header.announcements:
                self.roster.announcing[index].header = last.header
        return last.header

    def all_announced(self) -> bool:
        """Return whether all ranks announced a burst in the last header, so that none has joined; waits for it."""
        return self.read().active == self._world_size

    def announced(self, burst: Burst) -> int:
        """Return how many ranks announced ``burst`` in the last header; waits for it."""
        return self.read().announcements.get(self.roster.index[id(burst)], 0)

    def flags(self, burst: Burst) -> Sequence[int]:
        """Return how many ranks set each flag of ``burst`` in the last header that announced it; waits for it."""
        if self.last.header is None:
            self.read()
        index = self.roster.index[id(burst)]
        return self.roster.announcing[index].header.flags[index]

    def flags_beside(self, burst: Burst) -> tuple[Sequence[int], int]:
        """Return how many ranks set each flag of ``burst`` in the last header of any burst; and how many announced."""
        header = self.read()
        return header.flags[self.roster.index[id(burst)]], header.active

    def confirm(self) -> Header:
        """Wait for the last header and make sure that all active ranks announced the same.

        Raises:
            ProtocolError: if they did not.
            EarlyTerminationError: if a rank is exhausted under ``throw_on_early_termination``.
        """
        header = self.read()
        if header.stopping:
            self._guard.raise_early_termination(exhausted=False)
        if header.diverged:
            self.raise_diverged(header)
        return header

    # -- acting on a header -------------------------------------------------------------------------------------------

    def apply(self, elect: Callable[[bool], int]) -> None:
        """Act on the last header, which was not acted on before; ``elect`` finds a new leader among active ranks."""
        last = self.last
        header = last.header or self.read()
        if header.diverged:
            self.raise_diverged(header)
        last.is_applied = True
        if not (last.knows_leader or header.leader_alive):
            self.find_leader(elect)
        for use in last.waiting:
            use(self.leader)

    def find_leader(self, elect: Callable[[bool], int]) -> int:
        """Return the leader from the last header's burst on: a new one, if the old one was not among its ranks.

        Called at the same place on all ranks, if at all before the header is applied.
        """
        last = self.last
        if not last.knows_leader:
            last.knows_leader = True
            if self.roster.tracks_leader and not self.read().leader_alive:
                self.leader = elect(last.member is not None)
        return self.leader

    def when_leader_is_known(self, use: Callable[[int], None]) -> None:
        """Call ``use`` with the leader of the last header's burst, once that is known without waiting for it."""
        if self.last.is_applied:
            use(self.leader)
        else:
            self.last.waiting.append(use)

    def raise_diverged(self, header: Header) -> NoReturn:
        """Active ranks announced different bursts: raise, and tell those that could not wait for their header."""
        own, announcing = self.last.member, self.roster.announcing
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
