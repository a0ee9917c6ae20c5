"""The mode of a loop over ``Join.iterate``: :class:`Lockstep`.

All ranks run the same loop body as often, with or without data, so every rank issues its collectives itself: no burst
is announced and none is shadowed. Who has data in a step is known from the loop's own roll calls, which
``join.loop.iterate`` tells of, so whatever a burst asks a header for is computed::

    rank with data                                 rank without data
    --------------                                 -----------------
    begin:  header (nothing is announced)          the same
    step:   the body, by the user's own code       the body, on a dummy batch
    ...                                            ...

With a ``timeout``, all ranks meet before each step, and again before each burst. What becomes of ranks that do not run
the same is told in ``join.protocol.loop_progress``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import override

from join.collectives import Line, Work
from join.collectives._torch_private import profiled
from join.collectives.base import BARRIERS, DONE, ROLL_CALLS
from join.collectives.board import Progress
from join.collectives.timeouts import timeouts
from join.errors import JoinError, JoinTimeoutError, PeerError, ProtocolError
from join.joinable import Burst
from join.protocol.channel import Channel
from join.protocol.loop_progress import LoopProgress
from join.protocol.mode import Mode, Outcome

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
    if channel.closed:
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
        channel.guard.break_off(
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
        self.step.contributors = self._world_size
        self._last_burst: tuple[int, bool] | None = None  # lowest rank with data in it; whether this one had
        self.is_in_loop_body = True
        collective, timeout = channel.collective, self._guard.timeout
        self._barrier = None if timeout is None else collective.line(BARRIERS)
        self.roll_calls = collective.line(ROLL_CALLS)
        """The line on which the loop's roll calls are held."""
        for line in (self.roll_calls, self._barrier):  # and all ranks meet once more before they use them
            if line is not None:
                line.restart()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _wait_for_all(self, barrier: Line, doing: str) -> None:
        """Wait for all ranks: roll calls come a step late, but one that sleeps is to be missed."""
        self._guard.come()
        self._guard.wait(barrier.sum(0, 1), doing)

    def begin_step(self, contributors: int, first_with_data: int, *, has_data: bool) -> None:
        """Begin a step in which so many ranks have data, and whether this one does."""
        self.progress.steps += 1
        if self._barrier is not None:
            self._wait_for_all(self._barrier, f"came to step {self.progress.steps} of join.iterate")
        if self._guard.closed:
            self._guard.raise_closed()
        step = self.step
        if step.ends_window:
            self._channel.scaling.window += 1
        step.contributors, step.first_with_data = contributors, first_with_data
        step.has_data, step.shadowing = has_data, not has_data
        step.number = self.progress.steps

    def end_step(self) -> None:
        """End a step: first run a backward that this rank has skipped, since the others wait in it."""
        self._channel.prepare()
        self.progress.end_step()

    def end(self) -> None:
        """All ranks leave the loop together."""
        self.end_step()
        step = self.step
        source, had_data = self._last_burst or (step.first_with_data, step.has_data)
        uneven = step.contributors != self._world_size
        self._channel.leave_loop(self._around, source=source, had_data=had_data, uneven=uneven)

    def break_out(self, leave: Callable[[], None] | None) -> None:
        """Note that this rank left the loop by ``break``; ``leave`` agrees on that before anything is announced.

        ``None`` where that begins, or there is nothing left.
        """
        self.leave_broken_loop, self.is_in_loop_body = leave, leave is None
        self.step.shadowing = self.is_in_loop_body and not self.step.has_data

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
            self._guard.close_and_raise(error)  # the others know of it, or this rank has told them

    def _wait_until_all_have_left(self) -> None:
        peers, timeout = self._guard.peers, self._guard.timeout
        pause, started = 1e-3, time.monotonic()
        while True:
            told = peers.ask()
            self.progress.look_for_left_out(told)
            if self.progress.all_have_left_here(told):
                return
            peers.look()
            self.look()
            peers.look_for_silent(told)
            if timeout is not None and time.monotonic() - started > timeout:
                raise self._guard.timeout_error()
            time.sleep(pause)
            pause = min(2 * pause, timeouts().look)

    @override
    def look(self) -> None:
        self.progress.look_for_left_out(self._guard.peers.ask())

    @override
    def place(self) -> Progress:
        return self.progress.told()

    # -- bursts -------------------------------------------------------------------------------------------------------

    @override
    def announces_in_forward(self, burst: Burst, *, saves_header: bool) -> bool:
        # Nothing is sent, and a backward that this rank skips is pending since its forward.
        return self._channel.roster.early is burst

    @override
    def announce(self, index: int, *, confirm: bool) -> Work:
        member = self._channel.roster.announcing[index]
        if not member.interjects:
            self.progress.begun, self.progress.last = self.progress.begun + 1, member
        if self._barrier is not None:
            self._wait_for_all(
                self._barrier, f"announced {member.joinable.join_name} in step {self.step.number} of join.iterate"
            )
        self._last_burst = self.step.first_with_data, self.step.has_data
        leads = self._headers.leader == self.step.first_with_data  # lower ranks come back in a second loop
        self._headers.assume(index, leader_alive=leads)
        return DONE

    @override
    def elect(self, candidate: bool) -> int:
        return self.step.first_with_data

    @override
    def drain(self) -> Outcome:
        return self._around.drain()  # of a block inside the loop
