"""The mode of a loop over ``Join.iterate``: :class:`Lockstep`.

All ranks run the same loop body as often, with or without data, so every rank issues its collectives itself: no burst
is announced and none is shadowed. Which ranks have data in a step is known from the loop's own roll calls
(``join.lockstep.rounds``), so whatever a burst asks a header for is computed::

    rank with data                                 rank without data
    --------------                                 -----------------
    begin:  header (nothing is announced)          the same
    step:   the body, by the user's own code       the body, on a dummy batch
    ...                                            ...

With a ``timeout``, all ranks meet before each step, and again before each burst. What becomes of ranks that do not run
the same is told in ``join.lockstep.progress``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import override

from join.collectives import Work
from join.collectives._torch_private import profiled
from join.collectives.base import BARRIERS, DONE, ROLL_CALLS
from join.collectives.board import Progress
from join.collectives.timeouts import timeouts
from join.errors import JoinError, JoinTimeoutError, PeerError, ProtocolError
from join.lockstep.progress import LoopProgress
from join.protocol.channel import Channel, Mode, Outcome

ONE_AT_A_TIME = (
    "one loop over join.iterate in another, on the same process group, is not possible. Run the inner one before or"
    " after the outer one, or without join.iterate: an evaluation with DDP communicates nothing [J090]"
)


def begin_loop(channel: Channel) -> Lockstep:
    """All ranks begin a loop: one header, awaited. From here on its mode is the channel's, until it has ended.

    Raises:
        JoinError: in the middle of another loop.
        ProtocolError: on all ranks, if some do something else.
        PeerError: if a rank has failed.
    """
    if channel.guard.closed:
        channel.guard.raise_closed()
    channel.end_broken_loop()
    if isinstance(channel.mode, Lockstep):
        raise JoinError(ONE_AT_A_TIME)
    channel.prepare()
    headers, world_size = channel.headers, channel.collective.world_size
    header = headers.exchange([], active=True)
    if header.announcements:
        headers.confirm()
    if header.active < world_size:
        channel.guard.raise_alone(
            ProtocolError(
                f"{header.active} ranks began a loop over join.iterate, and {world_size - header.active} had left the"
                " block. Also a rank without batches loops over join.iterate [J091]"
            )
        )
    channel.prepare()
    mode = Lockstep(channel)
    channel.enter_loop(mode)
    return mode


class Lockstep(Mode):
    """A rank without data runs what the others run itself, on dummies. Made when a loop begins; dropped when it ends.

    Args:
        channel: the group's.
    """

    all_ranks_run_bursts = True

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._around = channel.mode  # of the block
        self.progress = LoopProgress(channel.collective, channel.loop + 1)
        """How far this rank is in the loop."""
        self._last_burst: tuple[int, bool] | None = None  # lowest rank with data in it; whether this one had
        self.is_uneven = False
        """Whether some rank had no data in the last step in which others had."""
        collective, timeout = channel.collective, self._guard.timeout
        self._meetings = collective.line(BARRIERS)
        self.barrier = None if timeout is None else self._meetings
        """The line on which all ranks wait for each other, with a ``timeout``."""
        self.roll_calls = collective.line(ROLL_CALLS)
        """The line on which the loop's roll calls are held."""
        for line in (self.roll_calls, self._meetings):  # and all ranks meet once more before they use them
            line.restart()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def wait_for_all(self, doing: str) -> None:
        """With a ``timeout``, wait for all ranks: roll calls are a step late, and a rank that sleeps is to be found."""
        assert self.barrier is not None
        self._guard.arrive()
        self._guard.wait(self.barrier.sum(0, 1), doing)

    def end_step(self) -> None:
        """End a step: first run a backward that this rank has skipped, since the others wait in it."""
        self._channel.prepare()
        progress = self.progress
        progress.ended, progress.begun_by_then = progress.steps, progress.begun

    def meet(self) -> None:
        """End the step with all ranks: what communicates next does not know of the loop, or who left something out.

        Raises:
            ProtocolError: on this rank, if it left something out of the step; on the others, PeerError.
        """
        self.end_step()
        self._guard.wait(self._meetings.sum(0, 1), f"ended step {self.progress.steps} of join.iterate")

    def end(self) -> None:
        """All ranks leave the loop together."""
        self.end_step()
        step = self._channel.step
        source, had_data = self._last_burst or (step.first_with_data, step.has_data)
        self._channel.leave_loop(self._around, source=source, had_data=had_data, uneven=self.is_uneven)

    def mark_broken(self, leave: Callable[[], None]) -> None:
        """Note that this rank left the body by ``break``; ``leave`` is called before anything else is announced."""
        self.leave_broken_loop = leave
        self._channel.is_in_loop_body = self._channel.step.shadowing = False

    def return_to_body(self) -> None:
        """Take the loop up again in the step in which it was broken, to leave it with the others or to fail there."""
        self.leave_broken_loop = None
        self._channel.is_in_loop_body, self._channel.step.shadowing = True, not self._channel.step.has_data

    def agree_to_leave(self) -> None:
        """Wait until all ranks have left the loop, before its end, at the same place.

        Raises:
            ProtocolError: if this rank has left alone.
            PeerError: if another one has, or has failed, or is gone.
            JoinTimeoutError: if another one does not come within ``timeout``.
        """
        try:
            with profiled("wait"):
                self._wait_until_all_have_left()
        except (PeerError, JoinTimeoutError) as error:
            self._guard.raise_on_all(error)  # the others know of it, or this rank has told them

    def _wait_until_all_have_left(self) -> None:
        peers, timeout = self._guard.peers, self._guard.timeout
        pause, started = 1e-3, time.monotonic()
        while True:
            others = peers.ask()
            self.progress.look_for_left_out(others)
            if self.progress.all_have_left_here(others):
                return
            peers.look()
            self.look()
            peers.look_for_silent(others)
            if timeout is not None and time.monotonic() - started > timeout:
                raise self._guard.timeout_error()
            time.sleep(pause)
            pause = min(2 * pause, timeouts().look)

    @override
    def look(self) -> None:
        self.progress.look_for_left_out(self._guard.peers.ask())

    @override
    def place(self) -> Progress:
        return self.progress.place()

    # -- bursts -------------------------------------------------------------------------------------------------------

    @override
    def announce(self, index: int) -> Work:
        # Nothing is sent: all ranks know what headers would tell.
        member, step = self._channel.roster.announcing[index], self._channel.step
        if not member.interjects:
            self.progress.begun, self.progress.last = self.progress.begun + 1, member
        if self.barrier is not None:
            self.wait_for_all(f"announced {member.joinable.join_name} in step {step.number} of join.iterate")
        self._last_burst = step.first_with_data, step.has_data
        # Not always: lower ranks come back in a second loop.
        leader_alive = self._headers.leader == step.first_with_data
        self._headers.set_announced_by_all(index, leader_alive=leader_alive)
        return DONE

    @override
    def elect(self, candidate: bool) -> int:
        return self._channel.step.first_with_data

    @override
    def drain(self) -> Outcome:
        return self._around.drain()  # of a block inside the loop
