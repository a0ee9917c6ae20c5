"""The mode in which ranks have declared their numbers of steps: :class:`Declared`, behind ``Join(..., steps=)``.

One all-gather on entering, and no header: each rank knows who is active at each step, so it computes the header that
would have come. A *step* is one burst of every announcing member, in the order of the list::

    active rank, step s                            rank that declared s steps or fewer
    -------------------                            -----------------------------------
    its first burst, by the user's own code        main_hook of the first burst
    its second, ...                                main_hook of the second, ...

A rank that makes another number of steps than it declared raises :class:`ProtocolError` where it finds out: before its
burst, or when it leaves. The others learn of that as of any failure (``join.failure.peers``).
"""

from __future__ import annotations

from bisect import bisect_right

import torch
from typing_extensions import override

from join.collectives import Work
from join.collectives.work import DONE
from join.errors import JoinError, ProtocolError
from join.joinable import Burst
from join.protocol.channel import Channel
from join.protocol.header import Header
from join.protocol.members import Roster
from join.protocol.mode import Mode, Outcome


class Declared(Mode):
    """A rank without data knows beforehand what the others run.

    Args:
        channel: the group's; for one block.
        steps: how many steps this rank will make.
        weighted: whether ``join.weight`` is in use.
    """

    foresees_bursts = True

    def __init__(self, channel: Channel, steps: int, *, weighted: bool) -> None:
        super().__init__(channel)
        self._weighted, self._mine = weighted, steps
        self._steps = self._sorted = [steps]  # by rank, and in their order, once agreed
        self._events = 0  # how many bursts were announced or shadowed so far, without those that interject
        self._step_of_header = 0
        self._covers = False  # whether a burst's announcement covers another, which comes first: it is announced there
        self._cycle: list[int] = []  # the members of which each step runs one burst, in this order

    @override
    def check(self, roster: Roster) -> None:
        if len(roster.scopes) > 1:
            raise JoinError(
                "a block with steps= is open on this group; there can be no other in it; leave steps out, or begin the"
                " other after it [J083]"
            )
        ahead = [member.joinable.join_name for member in roster.announcing if member.burst and member.burst.runs_ahead]
        if len(ahead) > 1:
            raise ValueError(f"steps= cannot tell in which order {' and '.join(ahead)} come; leave it out [J084]")
        self._covers = any(burst.is_covered for _, burst in roster.bursts)
        self._cycle = [
            index
            for index, member in enumerate(roster.announcing)
            if not (member.interjects or (member.burst is not None and member.burst.is_covered))
        ]

    @override
    def agree(self) -> None:
        self._steps = [int(each) for each in self._channel.collective.all_gather(torch.tensor([self._mine]))]
        self._sorted = sorted(self._steps)

    # -- what a header would have said --------------------------------------------------------------------------------

    @override
    def announces_in_forward(self, burst: Burst, *, saves_header: bool, has_buffers: bool) -> bool:
        roster = self._channel.roster
        early = roster.ahead.burst if self._covers and roster.ahead is not None else roster.early
        return early is burst and (saves_header or has_buffers)

    @override
    def someone_may_contribute_unseen(self) -> bool:
        # A rank that has just ended may have accumulated something, which only it knows.
        return self._step_of_header in self._steps

    @override
    def announce(self, index: int, *, confirm: bool) -> Work:
        if not self._channel.roster.announcing[index].interjects:
            self._check_turn(index)
        self._run(index, mine=True)
        return DONE

    def _check_turn(self, index: int) -> None:
        members, (step, place) = self._channel.roster.announcing, divmod(self._events, len(self._cycle))
        if index != self._cycle[place]:
            raise ProtocolError(
                f"rank {self._rank} ran {members[index].joinable.join_name} in step {step + 1} where"
                f" {members[self._cycle[place]].joinable.join_name} was due; with steps=, each step runs every joinable"
                " of the list once, in its order [J085]"
            )
        if self._channel.roster.throws and step >= self._sorted[0]:
            self._guard.raise_early_termination(exhausted=False)
        if step >= self._mine:
            raise ProtocolError(
                f"rank {self._rank} declared steps={self._mine} and began step {step + 1}; declare as many as it makes"
                " [J086]"
            )

    def _run(self, index: int, *, mine: bool) -> Header:
        """Count a burst of member ``index``, on this rank or on others; return what its header would have said."""
        if not self._channel.roster.announcing[index].interjects:
            self._step_of_header = self._events // len(self._cycle)
            self._events += 1
        step = self._step_of_header
        active, leads = self._world_size - bisect_right(self._sorted, step), self._steps[self._headers.leader] > step
        return self._headers.assume(index, active, leader_alive=leads, mine=mine, weighted=self._weighted)

    @override
    def elect(self, candidate: bool) -> int:
        return next(rank for rank, steps in enumerate(self._steps) if steps > self._step_of_header)

    # -- leaving ------------------------------------------------------------------------------------------------------

    @override
    def drain(self) -> Outcome:
        (made, part), longest = divmod(self._events, len(self._cycle)), self._sorted[-1]
        if (made, part) != (self._mine, 0):
            unfinished = f" and {part} of {len(self._cycle)} parts of another" if part else ""
            raise ProtocolError(
                f"rank {self._rank} declared steps={self._mine} and made {made}{unfinished}; declare as many as it"
                " makes [J087]"
            )
        even = self._sorted[0] == longest
        if self._channel.roster.throws and not even:
            self._guard.raise_early_termination(exhausted=True)
        while True:
            if self._channel.holds_followers():
                index = next(index for index, burst in self._channel.roster.bursts if burst.interjects)
            elif self._events < longest * len(self._cycle):
                index = self._cycle[self._events % len(self._cycle)]
            else:
                break
            self._channel.shadow(self._run(index, mine=False))
            self._channel.prepare()
        if not even:
            self._headers.leader = self._steps.index(longest)
        return Outcome(even=even, last=self._mine == longest, shadowed=not even)
