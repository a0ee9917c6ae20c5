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

import logging
from collections.abc import Callable

import torch
from typing_extensions import override

from join.collectives import Work
from join.errors import JoinError
from join.joinable import BurstState
from join.protocol.header import FAILED, FRESH, STOPPING
from join.protocol.mode import Mode, Outcome

logger = logging.getLogger("join")


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
                if header.failed:
                    headers.raise_failed(header)
                even = header.fresh == self._world_size
                if not even:
                    headers.leader = self.elect(fresh)
                return Outcome(even=even, last=fresh, shadowed=not even)
            if throws:
                headers.raise_stopping(header, exhausted=True)
            fresh = False
            channel.shadow(header)
            channel.prepare()

    @override
    def final_header(self) -> Callable[[], bool] | None:
        return self._send_final_header if self._is_between_bursts() else None

    def _is_between_bursts(self) -> bool:
        return not any(burst.state is BurstState.RUNNING for _, burst in self._channel.roster.bursts)

    def _send_final_header(self) -> bool:
        channel, headers, has_told = self._channel, self._headers, False
        try:
            if any(burst.state is BurstState.PENDING for burst in channel.roster.may_be_pending):
                headers.read()  # the others have come to it, too, or are given up
            channel.flush()
            channel.complete_followers()
            if not headers.is_applied:
                headers.apply(self.elect)
            header = headers.exchange([FAILED])
            has_told = True
            if header.active and not header.stopping:
                channel.shadow(header)
        except JoinError as told:  # the block is over for everybody: nobody listens
            return told.group_is_usable
        except Exception as secondary:
            # The user's exception is under way and must not be replaced by ours.
            logger.info("could not tell the peers about the exception: %s", secondary)
            return has_told and self._is_between_bursts()  # it may have come after the collectives
        return True
