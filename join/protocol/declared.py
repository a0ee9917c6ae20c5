"""The protocol where ranks declared their numbers of steps: :class:`DeclaredChannel`, behind ``Join(..., steps=)``.

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

from collections.abc import Sequence
from typing import NoReturn

import torch
from typing_extensions import override

from join.collectives import Collective, Work
from join.collectives.work import DONE
from join.errors import JoinError, ProtocolError
from join.joinable import Burst
from join.protocol.announced import Channel, Outcome
from join.protocol.header import Header
from join.protocol.members import Member, Scope


class DeclaredChannel(Channel):
    """The protocol on one group, for one block.

    Args:
        collective: the group.
        steps: how many steps this rank will make.
        weighted: whether ``join.weight`` is in use.
    """

    declared = True

    def __init__(self, collective: Collective, steps: int, *, weighted: bool) -> None:
        super().__init__(collective)
        self.weighted = weighted
        self._mine = steps
        self._steps = [steps]  # by rank, once agreed
        self._longest = steps
        self._step_of_header = 0
        self._events = 0  # bursts run so far, by this rank and then by others, but for those that interject

    @override
    def open(self, scope: Scope) -> None:
        if self.scopes:
            raise JoinError("a block with steps= is open on this group; there can be no other in it")
        super().open(scope)
        ahead = [member.joinable.join_name for member in self._members if member.burst and member.burst.runs_ahead]
        if len(ahead) > 1:
            raise ValueError(f"steps= cannot tell in which order {' and '.join(ahead)} come; leave it out")

    @override
    def agree(self) -> None:
        super().agree()
        self._steps = [int(each) for each in self.collective.all_gather(torch.tensor([self._mine]))]
        self._longest = max(self._steps)

    @override
    def _arrange(self) -> None:
        super()._arrange()
        self._headers: dict[tuple[int, int, tuple[bool, ...], bool], Header] = {}  # they repeat
        self._cycle = [
            index
            for index, member in enumerate(self._members)
            if not (member.interjects or (member.burst is not None and member.burst.is_covered))
        ]

    @property
    def _step(self) -> int:
        return self._events // max(len(self._cycle), 1)

    # -- what a header would have said --------------------------------------------------------------------------------

    @override
    def _can_be_early(self) -> bool:
        # What covers another burst is announced where that one comes.
        return super()._can_be_early() or any(each.is_covered for _, each in self._bursts)

    @override
    def announces_in_forward(self, burst: Burst, *, saves_header: bool, has_buffers: bool) -> bool:
        return self.early is burst and (saves_header or has_buffers)

    @override
    def someone_may_contribute_unseen(self) -> bool:
        # A rank that has just ended may have accumulated something, which only it knows.
        return self._step_of_header in self._steps

    @override
    def _send(self, fields: Sequence[int], announcing: int | None) -> Work:
        assert announcing is not None
        member = self._members[announcing]
        self._was_active = True
        if not member.interjects:
            self._check_turn(member, announcing)
        self._compute(announcing)
        return DONE

    def _check_turn(self, member: Member, announcing: int) -> None:
        place = self._events % len(self._cycle)
        expected = self._members[self._cycle[place]]
        if announcing != self._cycle[place]:
            self._mistake(
                f"ran {member.joinable.join_name} in step {self._step + 1} where {expected.joinable.join_name} was due;"
                " with steps=, each step runs every joinable of the list once, in its order"
            )
        if self.throws and self._step >= min(self._steps):
            self.terminate_early(exhausted=False)
        if self._step >= self._mine:
            self._mistake(f"declared steps={self._mine} and began step {self._step + 1}")

    def _mistake(self, what: str) -> NoReturn:
        raise ProtocolError(f"rank {self._rank} {what}")

    def _compute(self, announcing: int) -> None:
        member = self._members[announcing]
        if member.interjects:
            step = self._step_of_header
        else:
            step = self._step_of_header = self._step
            self._events += 1
        active = sum(steps > step for steps in self._steps)
        flags = () if member.burst is None else tuple(member.burst.declared_flags(self.weighted))
        key = announcing, active, flags, self._steps[self.leader] > step
        header = self._headers.get(key)
        if header is None:
            header = self._headers[key] = self._assumed(announcing, active, flags, leader_alive=key[-1])
        self._assume(member, header)

    @override
    def elect(self, candidate: bool) -> int:
        return next(rank for rank, steps in enumerate(self._steps) if steps > self._step_of_header)

    # -- leaving ------------------------------------------------------------------------------------------------------

    @override
    def drain(self) -> Outcome:
        if self.closed:
            self._refuse()
        self.fulfil()
        self.settle()
        made, part = divmod(self._events, len(self._cycle))
        if (made, part) != (self._mine, 0):
            unfinished = f" and {part} of {len(self._cycle)} parts of another" if part else ""
            self._mistake(f"declared steps={self._mine} and made {made}{unfinished}")
        even = min(self._steps) == self._longest
        if self.throws and not even:
            self.terminate_early(exhausted=True)
        self._shadow_rest()
        if not even:
            self.leader = self._steps.index(self._longest)
        return Outcome(even=even, last=self._mine == self._longest)

    def _shadow_rest(self) -> None:
        while True:
            if any(burst.holds_followers for _, burst in self._bursts):
                index = next(index for index, burst in self._bursts if burst.interjects)
            elif self._events < self._longest * len(self._cycle):
                index = self._cycle[self._events % len(self._cycle)]
            else:
                return
            self._sent_by, self._was_active = None, False
            self._compute(index)
            assert self._header is not None
            self._shadow(self._header)
            self.settle()

    @override
    def _can_part(self) -> bool:
        return False
