"""The mode in which each burst is announced by a header: :class:`Announced`.

Every burst of collectives is announced by one header (``join.protocol.header``), and what was announced is run by
everybody::

    active rank                                    joined rank
    -----------                                    -----------
    announce: apply the previous header            apply the previous header
              header  (starts, not awaited)        header  (awaited)
    the burst, by the user's own code              main_hook of the announced burst
    its followers, by the user's own code          main_hooks of its followers
    ...                                            ... until a header shows that nobody is active
    leave:    the burst that is still pending
              apply the previous header

Applying a header (``join.protocol.headers``) elects a new leader, by one more all-reduce, if the old one has left and
anyone needs a leader. Under ``throw_on_early_termination`` or ``timeout`` each header is awaited before its burst.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from join.collectives import Work
from join.collectives._torch_private import profiled
from join.protocol.header import FRESH, STOPPING
from join.protocol.mode import Mode, Outcome


class Announced(Mode):
    """A rank without data learns from headers what the others run."""

    @override
    def announce(self, index: int, *, confirm: bool) -> Work:
        work, roster = self._headers.send([], index), self._channel.roster
        may_differ = confirm and len(roster.announcing) > 1 and roster.announcing[index] is not roster.ahead
        if roster.awaits_all or may_differ:
            self._headers.confirm()
        return work

    @override
    def elect(self, candidate: bool) -> int:
        vote = torch.tensor([self._rank if candidate else self._world_size])
        with profiled("elect a leader"):
            self._channel.collective.all_reduce(vote, "min").wait()
        return int(vote.item())

    @override
    def drain(self) -> Outcome:
        channel, headers = self._channel, self._headers
        fresh, throws = True, channel.roster.throws
        while True:
            fields = [FRESH] if fresh else []
            header = headers.exchange([*fields, STOPPING] if throws else fields)
            if header.active == 0:
                headers.is_applied = True
                even = header.fresh == self._world_size
                if not even:
                    headers.leader = self.elect(fresh)
                return Outcome(even=even, last=fresh, shadowed=not even)
            if throws:
                self._guard.raise_early_termination(exhausted=True)
            fresh = False
            channel.shadow(header)
            channel.prepare()
