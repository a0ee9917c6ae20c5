"""The headers of a group, one after the other: sending, reading, applying: :class:`Headers`.

To *apply* a header is to act on one that was sent earlier: it raises what the header reports (ranks that diverged), and
finds a new leader if the old one has left and anyone needs a leader. All ranks apply header i after burst i and before
header i+1.

*Running ahead.* A backward pass cannot stop to read its header. As long as only one burst of the group is of that kind
(``Burst.runs_ahead``), it need not: whoever announced something else reads its header before its burst, finds the
difference, and raises :class:`ProtocolError`, of which the rank that ran ahead learns as of any failure. With several
of them, each reads its header first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from join.collectives import Collective, Sum
from join.collectives._torch_private import profiled
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
    """

    def __init__(self, collective: Collective, guard: Guard, roster: Roster) -> None:
        self.roster = roster
        self.tally = Tally()
        self.leader = 0
        """The rank that speaks for all where one must: the lowest active one; after a block, the last joiner."""
        self.announced_by_me: Member | None = None
        """Whose burst this rank announced in the last header, if any."""
        self.is_applied = True
        """Whether the last header was acted on, or there is nothing to do."""
        self._collective, self._guard = collective, guard
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
        with profiled("header"):
            work = self._work = self._line.sum(roster.code.pack(fields), roster.code.bits)
        self.tally.headers += 1
        self.tally.nbytes += work.nbytes
        return work

    def assume(self, index: int, *, leader_alive: bool) -> None:
        """Set the last header without sending one: as if all ranks had announced member ``index``.

        Args:
            index: the member.
            leader_alive: whether the leader has data.
        """
        member, code = self.roster.announcing[index], self.roster.code
        total = self._collective.world_size * code.pack([ACTIVE, code.offsets[index]])
        if leader_alive:
            total |= code.pack([LEADER])
        self.announced_by_me = member
        self._last = member.header = code.unpack(total)
        self._leads = self.is_applied = leader_alive  # nothing to apply but a leader that is gone

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self) -> Header:
        """Wait for the last header, without passing judgement on it."""
        if self._last is None:
            assert self._work is not None
            with profiled("header"):
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
            self._guard.raise_early_termination(exhausted=False)
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

    def raise_diverged(self, header: Header) -> NoReturn:
        """Active ranks announced different bursts: raise, and tell those that could not wait for their header."""
        mine, announcing = self.announced_by_me, self.roster.announcing
        names = [f"{n} x {announcing[index].joinable.join_name}" for index, n in header.announcements.items()]
        looping = header.active - sum(header.announcements.values())
        names += [f"{looping} x join.iterate"] if looping else []
        self._guard.break_off(
            ProtocolError(
                f"{header.active} active ranks announced different bursts: {', '.join(names)}; rank"
                f" {self._rank} announced {'none' if mine is None else mine.joinable.join_name}. All ranks"
                " must call forward, backward and step in the same order [J088]"
            )
        )
