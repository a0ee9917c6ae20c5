"""Headers, the messages in which active ranks announce bursts: their code, their order, and how they are read.

A header is a few counters in one whole number, which is summed over all ranks. Every rank, active or joined, adds 0 or
1 to every counter, and the sums are all that a rank needs to know of the others. The number of counters depends on the
bursts in the list, not on the number of ranks::

    ELSEWHERE, LEADER, ACTIVE, FRESH,  then, for each burst,  announced, *flags

- ``ELSEWHERE`` counts the ranks that are not at a header (``join.protocol.messages``); nothing else holds then.
- ``ACTIVE`` counts the ranks that announce.
- ``LEADER`` is 1 while the leader is among these ranks.
- ``FRESH`` counts the ranks that send their first header after the end of their data.
- ``announced`` of a burst counts the ranks that announce the burst. Any number except 0 and ``ACTIVE`` means that the
  ranks have diverged.

A counter has as many bits as the world size, so a sum never overflows; ``LEADER`` has one, as one rank adds to it. The
header of a DDP module takes 63 bits at most up to 63 ranks. The size matters because the cost of a small all-reduce on
gloo grows with the number of elements.

To *apply* a header is to act on one that was sent earlier. If it reports that ranks diverged, the rank raises. If the
old leader has left and any burst needs a leader, rows of all ranks name the new one. All ranks apply header i after
burst i and before header i+1. By then the header has had the time of the burst to arrive.

*Foreseen bursts.* No rank waits for a header that announces the expected burst. All ranks see the same headers in the
same order, so they all expect the same burst next: the one that was announced one period ago. Before there is a period,
they expect the backward if there is only one kind of backward (``Burst.runs_ahead``). A rank that announces any other
burst reads its header first. If the ranks differ, it raises :class:`ProtocolError`. The ranks that run the expected
burst receive the error as they receive any failure::

    rank that announces what is expected           rank that announces something else
    ------------------------------------           ----------------------------------
    header (starts)                                header (awaited)
    the burst                                      ProtocolError: the note says why; sends nothing more
    its next header, or a collective breaks        .
    PeerError                                      .

A foreseen burst takes its facts about other ranks from the header before its own (``Headers.active_for``). A rank that
left between these two headers has not received the messages of the burst, so it is checked before the next header
(``Burst.check_leavers``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import NoReturn

import torch

from join.collectives import Collective, Sum
from join.collectives._torch_private import profiled
from join.errors import ProtocolError, described
from join.failure.guard import Closed, Guard
from join.held import Held
from join.joinable import Burst, Joinable, JoinHook, NothingListed
from join.protocol.messages import Message, Messages

ELSEWHERE, LEADER, ACTIVE, FRESH = range(4)
_FIXED = 4
_REMEMBERED = 128  # bursts
_UNKNOWN = -1  # leader
_NO_BURST = NothingListed(None)  # in place of a joinable that announces only because it is the first


class Header:
    """One summed header.

    Args:
        total: The sum of the numbers of all ranks.
        code: The code that packed them.

    Attributes:
        elsewhere: The number of ranks that were not at a header. If there are any, the other attributes are invalid.
        active: The number of ranks that announced.
        leader_alive: Whether the leader announced.
        fresh: The number of ranks whose data ended after their last header.
        announcements: The number of ranks that announced each burst, by index; without bursts that none announced.
        diverged: Whether active ranks announced different bursts.
        counts: By index of each burst, the number of ranks that announced it, and of those that set each of its flags.
    """

    def __init__(self, total: int, code: HeaderCode) -> None:
        counts = [total >> place & code.largest_count for place in code.places]
        counts[LEADER] &= 1
        self.elsewhere, leaders, self.active, self.fresh = counts[:_FIXED]
        self.leader_alive = leaders > 0
        self.announcements: dict[int, int] = {}
        self.counts: list[Sequence[int]] = []
        for index, (begin, end) in enumerate(pairwise((*code.offsets, len(counts)))):
            if counts[begin]:
                self.announcements[index] = counts[begin]
            self.counts.append(counts[begin:end])
        self.diverged = not {self.active}.issuperset(self.announcements.values())


class HeaderCode:
    """Code that packs headers into whole numbers and unpacks them.

    Args:
        flag_counts: The number of flags of each burst that can be announced.
        world_size: The number of ranks.
    """

    def __init__(self, flag_counts: Sequence[int], world_size: int) -> None:
        *self.offsets, fields = accumulate((1 + flag_count for flag_count in flag_counts), initial=_FIXED)
        count = world_size.bit_length()
        self.largest_count = (1 << count) - 1
        self.places = [0, count, *(count * field + 1 for field in range(1, fields - 1))]
        """The lowest bit of each counter."""
        self.ones = [1 << place for place in self.places]
        """The number to add for each counter in order to add 1 to the counter."""
        self.bits = count * (fields - 1) + 1
        """The size of a header in bits."""
        # Headers repeat from step to step, and unpacking is half of the cost of reading one, so the results are cached.
        self.unpack = cache(partial(Header, code=self))


@dataclass(eq=False)
class Member:
    """A joinable in a block.

    Attributes:
        joinable: The object.
        hook: The hook of the object for this block.
        followers: The members that act after each burst of this one, if it announces. Followers have no followers.
        shadowed: The number of bursts of the joinable that this rank shadowed.
        steps: The number of announcements of this rank.
        burst: The joinable, if it is a ``Burst``; otherwise one that does nothing.
        announced_in: The last header that announced it.
    """

    joinable: Joinable
    hook: JoinHook
    followers: list[Member] = field(default_factory=list["Member"])
    shadowed: int = 0
    steps: int = 0
    burst: Burst = field(init=False)
    announced_in: SentHeader = field(init=False)

    def __post_init__(self) -> None:
        self.burst = self.joinable if isinstance(self.joinable, Burst) else _NO_BURST

    def __str__(self) -> str:
        return self.joinable.join_name


@dataclass(eq=False)
class Scope:
    """Members and settings of one block.

    A ``Burst`` announces. A plain joinable announces too, if no announcing joinable comes before it in the list. Every
    other plain joinable follows the nearest announcing joinable before it: it acts once after each of its bursts.

    Attributes:
        members: All joinables of the block, in the order of the list.
        throw: The ``throw_on_early_termination`` of the block.
        timeout: The seconds that a header may take, or ``None`` for no limit.
        weight: The ``Join.weight`` of a plain block.
        own_attributes: The names of attributes that each rank has for itself.
        held: What the objects held when the block was entered.
        joinables: The joinables of the members.
        announcing: The members that announce; set from ``members``.
    """

    members: Sequence[Member]
    throw: bool
    timeout: float | None
    weight: float | None = None
    own_attributes: Sequence[str] = ()
    held: Held = field(init=False)
    joinables: Sequence[Joinable] = field(init=False)
    announcing: list[Member] = field(default_factory=list[Member], init=False)

    def __post_init__(self) -> None:
        self.joinables = [member.joinable for member in self.members]
        for member in self.members:
            if not member.joinable.communicates:
                continue
            if member.burst is not _NO_BURST or not self.announcing:
                self.announcing.append(member)
            else:
                self.announcing[-1].followers.append(member)


class Roster:
    """Members of the open blocks of a process group. A roster never changes: each opening or closing makes a new one.

    Args:
        scopes: The open blocks, the innermost last.
        world_size: The number of ranks.

    Attributes:
        scopes: The open blocks.
        listed: The joinables of these blocks, including those that do not announce.
        announcing: The members that announce, in the order in which headers count them.
        index: The index of each announcing member, by the ``id`` of its joinable.
        bursts: The bursts of these members, with their index.
        may_be_pending: The bursts that may be announced before they run.
        code: The code of the headers.
        flagged: The bursts that have flags, with their index.
        backwards: The indices of the bursts that run ahead (``Burst.runs_ahead``), the backwards of DDP modules.
        first: The index of the burst that is expected before there is a period: the only announcing member, not
            counting bursts that interject, or the only one of ``backwards``. ``None`` if there is no such burst.
        is_alone: Whether only one member announces, not counting bursts that interject.
        early: The backward that may be announced in the forward, before it runs. ``None`` if there is more than one
            kind of backward, or a ``timeout``, since a header then means that the burst starts now.
        tracks_leader: Whether any burst tracks the leader (``Burst.tracks_leader``).
        throws: Whether all ranks raise as soon as one is out of data; set by the innermost block.
        timeout: The seconds to wait for a rank, or ``None`` for no limit; set by the innermost block.
        awaited: The indices of members whose headers are awaited under ``timeout``: not those whose collectives fail
            by themselves (``Burst.breaks_in_time``).
    """

    def __init__(self, scopes: Sequence[Scope], world_size: int) -> None:
        self.scopes = scopes
        self.listed = [joinable for scope in scopes for joinable in scope.joinables]
        self.announcing = [member for scope in scopes for member in scope.announcing]
        self.index = {id(member.joinable): index for index, member in enumerate(self.announcing)}
        self.bursts = bursts = [(index, member.burst) for index, member in enumerate(self.announcing)]
        self.may_be_pending = [burst for _, burst in bursts if type(burst).fulfil is not Burst.fulfil]
        self.code = HeaderCode([burst.flag_count for _, burst in bursts], world_size)
        self.flagged = [(index, burst) for index, burst in bursts if burst.flag_count]
        self.throws, self.timeout = (scopes[-1].throw, scopes[-1].timeout) if scopes else (False, None)
        self.tracks_leader = any(burst.tracks_leader for _, burst in bursts)
        is_limited = self.timeout is not None
        self.awaited = {index for index, burst in bursts if is_limited and not burst.breaks_in_time}
        regular = [index for index, burst in bursts if not burst.interjects]
        self.backwards = [index for index, burst in bursts if burst.runs_ahead]
        self.is_alone = len(regular) == 1
        self.first = regular[0] if self.is_alone else self.backwards[0] if len(self.backwards) == 1 else None
        is_early = len(self.backwards) == 1 and self.timeout is None
        self.early = self.announcing[self.backwards[0]].burst if is_early else None

    def devices(self) -> list[torch.device]:
        """Return the device on which each listed joinable communicates."""
        return [joinable.join_device for joinable in self.listed]


@dataclass
class Tally:
    """Counts of one rank, since it entered the first of the blocks that are open on a process group.

    Attributes:
        headers: The number of headers that it has sent.
        nbytes: Their size in bytes.
        idle: The seconds that it waited for headers while it was joined.
        loops: The number of loops over ``Join.iterate`` that have begun.
        batches: The number of steps of such loops that it has begun with a batch.
        dummies: The number of such steps on a dummy batch.
    """

    headers: int = 0
    nbytes: int = 0
    idle: float = 0.0
    loops: int = 0
    batches: int = 0
    dummies: int = 0


@dataclass(slots=True)
class SentHeader:
    """A header that this rank has sent, whose sum may not have arrived.

    ``Headers.last`` is the newest one. In a loop over ``Join.iterate`` no header is sent, and a header that is
    computed replaces it. The defaults are the values before the first header.

    Attributes:
        before: The header before this one; ``None`` without one.
        work: The sum over all ranks; ``None`` if all ranks know the header without a sum.
        member: The member whose burst this rank announced in it, if any.
        expected: The index of the member whose burst all ranks expected in it, and did not wait for it; ``None``
            without one, and under ``throw_on_early_termination``.
        header: The summed header, once it is read.
        is_applied: Whether the header is applied, or needs no action.
        leader: The leader as of its burst, once the header is applied or ``Headers.find_leader`` has found it.
    """

    before: Header | None = None
    work: Sum[int] | None = None
    member: Member | None = None
    expected: int | None = None
    header: Header | None = None
    is_applied: bool = True
    leader: int = 0


class Foresight:
    """Prediction of the next burst from the period of the bursts so far; the same on all ranks.

    Args:
        roster: The members that announce.
    """

    def __init__(self, roster: Roster) -> None:
        self.expected = roster.first
        """The index of the member whose burst is expected next, or ``None``."""
        self._roster = roster
        self._past = ""  # a character for each burst
        self._period = 0  # in bursts; 0 if no period is known

    def saw(self, index: int) -> None:
        """Record the member whose burst was announced."""
        if self._roster.announcing[index].burst.interjects:
            return
        self._past = past = (self._past + chr(index))[-_REMEMBERED:]
        if index != self.expected or not self._period:
            self._period = _period_of(past)
        self.expected = ord(past[-self._period]) if self._period else self._roster.first


def _period_of(past: str) -> int:
    """Return the shift after which the end of ``past`` repeats for the most bursts; 0 if its last burst is new."""
    for length in range(len(past) - 1, 0, -1):
        if (begin := past.rfind(past[-length:], 0, -1)) >= 0:
            return len(past) - length - begin
    return 0


class Headers:
    """Headers of one process group. One header at a time is being summed.

    Args:
        collective: The ranks.
        messages: The messages of these ranks, of which headers are some.
        guard: The guard that waits for these ranks.
        roster: The members that announce; :meth:`use` replaces it when blocks open and close.
    """

    def __init__(self, collective: Collective, messages: Messages, guard: Guard, roster: Roster) -> None:
        self.messages = messages
        self.use(roster)
        self.tally = Tally()
        self.leader = 0
        """The lowest rank with data: the lowest active rank, or in a loop the lowest with a batch in the last step."""
        self.last = SentHeader()
        self.before_next: Message | None = None
        """The message that compares what the ranks entered the block with; it is read before the next header."""
        self._guard, self._rank, self._world_size = guard, collective.rank, collective.world_size

    def use(self, roster: Roster) -> None:
        """Replace the roster; called in the same place on all ranks."""
        self.roster, self.foresight = roster, Foresight(roster)

    def make_ready(self) -> None:
        """Check that all ranks entered the block with the same arguments, before anything is sent in it.

        Raises:
            ProtocolError: If the arguments differ. All ranks raise it.
        """
        if self.before_next is not None:
            message, self.before_next = self.before_next, None
            try:
                self.messages.check(message)
            except ProtocolError as error:
                # All ranks raise the error here, before they send anything else. So the group is not lost, as after
                # ``close_and_raise``.
                self._guard.closed = Closed(described(error), is_lost=False)
                raise

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, index: int | None = None, *, active: bool = True, fresh: bool = False) -> Sum[int]:
        """Start the sum of a header.

        Args:
            index: The index of the member whose burst this rank announces, if any.
            active: Whether this rank counts as active.
            fresh: Whether the data of this rank have just ended.

        Returns:
            The sum, which may not be complete yet.
        """
        if self.before_next is not None:
            self.make_ready()
        roster, code = self.roster, self.roster.code
        number = code.ones[FRESH] if fresh else 0
        if active:
            number += code.ones[ACTIVE] + (code.ones[LEADER] if self.leader == self._rank else 0)
        if index is not None:
            number += code.ones[code.offsets[index]]
        for other, burst in roster.flagged:
            for field_index, flag in enumerate(burst.flags(other == index), code.offsets[other] + 1):
                if flag:
                    number += code.ones[field_index]
        member = None if index is None else roster.announcing[index]
        before, expected = self.last.header if self.last.work else None, self.foresight.expected
        if roster.throws:  # each header is awaited
            expected = None
        self.last = SentHeader(before, None, member, expected, is_applied=False, leader=_UNKNOWN)
        if member is not None and index is not None:
            member.announced_in = self.last
            if not roster.is_alone:
                self.foresight.saw(index)
        if self._guard.timeout is not None:
            self._guard.arrive()
        with profiled("header"):
            work = self.last.work = self.messages.line.sum(number, self.messages.bits)
        self.tally.headers += 1
        self.tally.nbytes += work.nbytes
        return work

    def set_announced_by_all(self, index: int) -> None:
        """Set the last header without sending one, for a burst that all ranks are known to run now.

        Args:
            index: The index of the member whose burst it is.
        """
        member, code = self.roster.announcing[index], self.roster.code
        total = code.ones[LEADER] + self._world_size * (code.ones[ACTIVE] + code.ones[code.offsets[index]])
        member.announced_in = self.last = SentHeader(member=member, header=code.unpack(total), leader=self.leader)

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, sent: SentHeader | None = None) -> Header:
        """Wait for a header, by default the last one, and return it, even if ranks diverged in it."""
        sent = sent or self.last
        if sent.header is None:
            assert sent.work is not None
            sent.header = self.roster.code.unpack(self._guard.wait(sent.work, then=sent.work.total))
            if sent.header.elsewhere:
                self.messages.raise_apart()
            if sent.member is None:
                for index in sent.header.announcements:
                    self.roster.announcing[index].announced_in = sent
                    if not self.roster.is_alone:
                        self.foresight.saw(index)
        return sent.header

    def _before_foreseen(self, burst: Burst) -> Header | None:
        """Return the header before the last one, if all ranks expected this burst in the last one, or ``None``.

        No rank that runs a foreseen burst awaits its own header.
        """
        return self.last.before if self.roster.index[id(burst)] == self.last.expected else None

    def active_for(self, burst: Burst) -> int:
        """Return the number of active ranks, as known to all ranks that run the burst of the last header.

        If the burst was foreseen, this is the number of ranks that announced in the header before. Otherwise it is the
        number in the burst's own header, and the call waits for that header.

        Args:
            burst: The burst of the last header.
        """
        return (self._before_foreseen(burst) or self.read()).active

    def leader_for(self, burst: Burst) -> int:
        """Return the leader as of the header that :meth:`active_for` reads for this burst.

        If the burst was foreseen, this is the leader that the ranks know already, since the header before is applied.
        Otherwise it is the leader as of the burst's own header, for which rows may have to be gathered.

        Args:
            burst: The burst of the last header, which tracks the leader.
        """
        return self.leader if self._before_foreseen(burst) else self.find_leader()

    def counts(self, burst: Burst) -> Sequence[int]:
        """Wait for the last header that announced this burst, and return its counts of the burst (``Header.counts``).

        All headers have the counts of all bursts, but only this header is read, not a later one of another burst.
        """
        index = self.roster.index[id(burst)]
        sent = self.roster.announcing[index].announced_in
        return (sent.header or self.read(sent)).counts[index]

    def confirm(self) -> None:
        """Wait for the last header, which announces an unexpected burst, and check that all active ranks announced it.

        Raises:
            ProtocolError: If active ranks announced different bursts.
            EarlyTerminationError: If a rank is exhausted under ``throw_on_early_termination``.
        """
        header = self.read()
        if self.roster.throws and header.active < self._world_size:
            self._guard.raise_early_termination(exhausted=False)
        if header.diverged:
            self.raise_diverged()

    # -- acting on a header -------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Apply the last header, which is not applied yet.

        Raises:
            ProtocolError: If active ranks announced different bursts in the header.
        """
        sent = self.last
        header = sent.header or self.read()
        if header.diverged:
            self.raise_diverged()
        sent.is_applied = True
        if sent.before is not None and sent.before.active > header.active:
            for index in header.announcements:
                if index == sent.expected:
                    self.roster.announcing[index].burst.check_leavers()
        sent.leader = self.leader if header.leader_alive else self.find_leader()

    def find_leader(self) -> int:
        """Return the leader as of the burst of the last header: a new one, if the old one was not among its ranks.

        A new leader is the lowest of the ranks that announced. All ranks call this in the same place, or none does
        before the header is applied.
        """
        sent = self.last
        if sent.leader == _UNKNOWN:
            if self.roster.tracks_leader and not self.read().leader_alive:
                with profiled("find the leader"):
                    own = self._world_size if sent.member is None else self._rank
                    self.leader = min(self.messages.gather_numbers(own))
            sent.leader = self.leader
        return sent.leader

    def raise_diverged(self) -> NoReturn:
        """Raise a :class:`ProtocolError` for the last header, in which active ranks announced different bursts."""
        own, announcing, header = self.last.member, self.roster.announcing, self.read()
        bursts = [f"{count} x {announcing[index].joinable.join_name}" for index, count in header.announcements.items()]
        looping = header.active - sum(header.announcements.values())
        if looping:
            bursts.append(f"{looping} x join.iterate, which needs a block of its own after an uneven plain loop")
        self._guard.post_and_raise(
            ProtocolError(
                f"{header.active} active ranks announced different bursts: {', '.join(bursts)} (rank {self._rank}"
                f" announced {'none' if own is None else own.joinable.join_name}). Call forward, backward and step in"
                " the same order on all ranks. [J088]"
            )
        )
