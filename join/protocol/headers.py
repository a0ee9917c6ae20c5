"""The headers of a group, one after the other: sending, reading, applying: :class:`Headers`.

To *apply* a header is to act on one that was sent earlier: it raises what the header reports (a failed peer, ranks that
diverged), and finds a new leader if the old one has left and anyone needs a leader. All ranks apply header i after
burst i and before header i+1, so what they raise they raise at the same place.

*Running ahead.* A backward pass cannot stop to read its header. As long as only one burst of the group is of that kind
(``Burst.runs_ahead``), it need not: whoever announced something else reads its header before its burst, finds the
difference, and shadows the burst that ran ahead before it raises :class:`ProtocolError`. With several of them, each
reads its header first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from join.collectives import Collective, Sum
from join.errors import ProtocolError
from join.failure.guard import Guard
from join.joinable import Burst
from join.protocol.header import ACTIVE, LEADER, Header
from join.protocol.members import Member, Roster


@dataclass
class Tally:
    """What a rank has sent and how long it has waited while joined."""

    headers: int = 0
    nbytes: int = 0
    idle: float = 0.0

    def since(self, earlier: Tally) -> Tally:
        """The difference to an earlier tally."""
        return Tally(self.headers - earlier.headers, self.nbytes - earlier.nbytes, self.idle - earlier.idle)


class Headers:
    """The headers of one group, of which one at a time is under way.

    Args:
        collective: the ranks.
        guard: waits for them.
        roster: who announces; another one takes its place as blocks open and close.
        shadow: runs a member's burst with nothing to say.
    """

    def __init__(self, collective: Collective, guard: Guard, roster: Roster, shadow: Callable[[Member], None]) -> None:
        self.roster = roster
        self.tally = Tally()
        self.leader = 0
        """The rank that speaks for all where one must: the lowest active one; after a block, the last joiner."""
        self.announced_by_me: Member | None = None
        """Whose burst this rank announced in the last header, if any."""
        self.is_applied = True
        """Whether the last header was acted on, or there is nothing to do."""
        self._collective, self._guard, self._shadow = collective, guard, shadow
        self._rank = collective.rank
        self._work: Sum | None = None
        self._last: Header | None = None  # the last header, once it was read
        self._leads = True  # whether the leader of the last header is known
        self._wait_for_leader: list[Callable[[int], None]] = []

    def agree(self) -> None:
        """Find out what carries headers; called when all ranks have entered a block."""
        self._line = self._collective.line()

    # -- sending ------------------------------------------------------------------------------------------------------

    def exchange(self, fields: list[int], *, active: bool = False) -> Header:
        """Send a header in which this rank announces no burst, and wait for it.

        Args:
            fields: what this rank sets to 1 in it.
            active: whether it announces that it is active.
        """
        started = time.monotonic()
        self.send(fields, active=active)
        try:
            return self.read()
        finally:
            if not active:
                self.tally.idle += time.monotonic() - started

    def send(self, fields: list[int], index: int | None = None, *, active: bool = True) -> Sum:
        """Start a header, in which this rank announces member ``index``, if any."""
        roster, fields = self.roster, list(fields)
        if active:
            fields += [ACTIVE, LEADER] if self.leader == self._rank else [ACTIVE]
        if index is not None:
            fields.append(roster.code.offsets[index])
        for each, burst in roster.bursts:
            if burst.flag_count:
                for place, flag in enumerate(burst.flags(each == index), roster.code.offsets[each] + 1):
                    if flag:
                        fields.append(place)
        self.announced_by_me = None if index is None else roster.announcing[index]
        self._last, self.is_applied, self._leads = None, False, False
        if self._guard.timeout is not None:
            self._guard.come()
        work = self._work = self._line.sum(roster.code.pack(fields), roster.code.bits)
        self.tally.headers += 1
        self.tally.nbytes += work.nbytes
        return work

    def assume(
        self, index: int, active: int, *, leader_alive: bool, mine: bool = True, weighted: bool = False
    ) -> Header:
        """Set the last header without sending one: as if ``active`` ranks had announced member ``index``.

        Args:
            index: the member.
            active: how many ranks announce it.
            leader_alive: whether the leader is among them.
            mine: whether this rank is.
            weighted: as of :meth:`Burst.declared_flags`.
        """
        member = self.roster.announcing[index]
        self.announced_by_me = member if mine else None
        flags = () if member.burst is None else member.burst.declared_flags(weighted)
        header = self.roster.code.assumed(index, active, tuple(flags), leader_alive)
        self._last = member.header = header
        self._leads = self.is_applied = leader_alive  # nothing to apply but a leader that is gone
        return header

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self) -> Header:
        """Wait for the last header, without passing judgement on it."""
        if self._last is None:
            assert self._work is not None
            self._guard.wait(self._work)
            self._last = self.roster.code.unpack(self._work.total())
            for index in self._last.announcements:
                self.roster.announcing[index].header = self._last
        return self._last

    def all_announced(self) -> bool:
        """Whether all ranks announced a burst in the last header, so that none has joined; waits for it."""
        return self.read().active == self._collective.world_size

    def announced(self, burst: Burst) -> int:
        """How many ranks announced ``burst`` in the last header; waits for it."""
        return self.read().announcements.get(self.roster.index[id(burst)], 0)

    def flags(self, burst: Burst) -> Sequence[int]:
        """How many ranks set each flag of ``burst`` in the last header that announced it; waits for that header."""
        self.read()
        index = self.roster.index[id(burst)]
        return self.roster.announcing[index].header.flags(index)

    def confirm(self) -> Header:
        """Wait for the last header and make sure that all active ranks announced the same.

        Raises:
            ProtocolError: if they did not.
            EarlyTerminationError: if a rank is exhausted under ``throw_on_early_termination``.
        """
        header = self.read()
        if header.stopping:
            self.raise_stopping(header, exhausted=False)
        if header.diverged:
            self.raise_diverged(header)
        return header

    # -- acting on a header -------------------------------------------------------------------------------------------

    def apply(self, elect: Callable[[bool], int]) -> None:
        """Act on the last header, which was not acted on before; ``elect`` finds a new leader among active ranks."""
        header = self.read()
        if header.diverged:
            self.raise_diverged(header)
        self.is_applied = True
        if header.failed:
            self.raise_failed(header)
        if not (self._leads or header.leader_alive):
            self.lead(elect)
        waiting, self._wait_for_leader = self._wait_for_leader, []
        for use in waiting:
            use(self.leader)

    def lead(self, elect: Callable[[bool], int]) -> int:
        """The rank that leads from the last header's burst on: a new one, if the old one was not among its ranks.

        Called at the same place on all ranks, if at all before the header is applied.
        """
        if not self._leads:
            self._leads = True
            if self.roster.tracks_leader and not self.read().leader_alive:
                self.leader = elect(self.announced_by_me is not None)
        return self.leader

    def when_led(self, use: Callable[[int], None]) -> None:
        """Call ``use`` with the leader of the last header's burst, once that is known without waiting for it."""
        if self.is_applied:
            use(self.leader)
        else:
            self._wait_for_leader.append(use)

    def raise_failed(self, header: Header) -> NoReturn:
        """Ranks have said in ``header`` that they fail: raise the :class:`PeerError` that says why."""
        self._guard.close_and_raise(self._guard.peers.peer_error(header.failed))

    def raise_stopping(self, header: Header, *, exhausted: bool) -> NoReturn:
        """Raise what ``throw_on_early_termination`` asks for where a rank is exhausted, or what a rank fails with."""
        if header.failed:
            self.raise_failed(header)
        self._guard.raise_early_termination(exhausted=exhausted)

    def raise_diverged(self, header: Header) -> NoReturn:
        """Active ranks announced different bursts: raise, after helping the one that could not wait."""
        roster, mine = self.roster, self.announced_by_me
        ahead = roster.ahead if len(roster.announcing) > 1 else roster.announcing[0]
        others_ran_ahead = ahead is not None and ahead is not mine and not roster.awaits_all
        if ahead is not None and others_ran_ahead and roster.announcing.index(ahead) in header.announcements:
            self._shadow(ahead)
        names = [f"{n} x {roster.announcing[index].joinable.join_name}" for index, n in header.announcements.items()]
        looping = header.active - sum(header.announcements.values())
        names += [f"{looping} x join.iterate"] if looping else []
        self._guard.close_and_raise(
            ProtocolError(
                f"{header.active} active ranks announced different bursts: {', '.join(names)}; rank"
                f" {self._rank} announced {'none' if mine is None else mine.joinable.join_name}. All ranks"
                " must call forward, backward and step in the same order [J088]"
            )
        )
