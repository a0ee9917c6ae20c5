"""Leaving a loop in lockstep before its end, by ``break`` or an exception: :class:`EarlyExit`.

The others miss this rank in the rest of its step at the earliest. It answers the next roll call that it has not
answered yet, and waits for the others there::

    rank that leaves                                    rank that goes on
    ----------------                                    -----------------
    if nobody comes: bursts that it has left out        the steps that these are of
    roll call under way is read                         was read, or will be, when its window begins
    the next one is answered: "left", or "failed"       is answered when that window begins
    if nobody comes: bursts of the rest of the window   the rest of the window
    the next window's bursts                            the next window
                                                        the answer is read
    all come to the same burst (join.farewell)          the same
                                                        PeerError or ProtocolError

If all ranks have left at the same step, that was an orderly end, and nothing is shadowed; unless one that was early
lost patience, for which the others then make up. Ranks may leave at different steps of a window; each shadows what is
left of it for the others. The bursts that a rank shadows are those it sees the others begin, where ranks keep notes, or
those it knows of the body, from the steps before. The body's own collectives it cannot shadow; there the others are
free only once this process ends, which it can: the roll call is given up after a while.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

import torch.distributed as dist

from join.collectives import Work
from join.errors import JoinError, PeerError, ProtocolError
from join.farewell import LIMIT_SECONDS
from join.lockstep import LockstepChannel
from join.patience import is_done_within
from join.windows import Windows

_GRACE_SECONDS = 2.0
"""How long a rank that leaves waits for the others before it takes them to be waiting for it, at least."""
_SEEN_GRACE_SECONDS = 10.0
"""The same where it sees what they do, and takes part in that: then it may wait longer."""
_END_SECONDS = 1.0
"""How long a process may take to end, after its connections are closed."""


class EarlyExit:
    """One rank leaves the loop.

    Args:
        channel: the block's.
        windows: the loop's.
        longest: how long its longest step took, in seconds.
    """

    def __init__(self, channel: LockstepChannel, windows: Windows, longest: float) -> None:
        self._channel, self._windows = channel, windows
        self._patience = max(_GRACE_SECONDS, 3 * longest)

    def leave(self, error: BaseException | None, text: str) -> None:
        """Bring the others to where they can be told, and tell them.

        Args:
            error: what this rank raised, if it did.
            text: what to tell the others of it, if not that.

        Raises:
            ProtocolError: without an ``error``, if not all ranks have left at this step.
            PeerError: if another rank has failed, and this one not, or with a ``RuntimeError`` that may come of it.
        """
        # What a collective raises when a peer is gone is explained by what that one told; anything else is the user's.
        self._may_come_of_peers = isinstance(error, RuntimeError) and not isinstance(error, JoinError) and not text
        try:
            with self._explained():
                self._leave(error, text)
        except (PeerError, ProtocolError) as told:
            if error is None or self._may_come_of_peers:
                raise told from error
        except Exception:
            if error is None:
                raise
            # The user's exception is under way and must not be replaced by ours.
        finally:
            with contextlib.suppress(Exception):  # of a store that is gone
                self._windows.farewell.tell("left")  # also where this rank has given up
            if error is not None and self._channel.in_lockstep:
                self._channel.closed = self._channel.closed or f"this rank raised {type(error).__name__}"

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """A collective that fails because a peer's process is gone says what that peer has raised, if it has."""
        try:
            yield
        except JoinError:
            raise
        except Exception:
            self._windows.check_peers()
            raise

    def _leave(self, error: BaseException | None, text: str) -> None:
        windows, self._channel.leaving = self._windows, True
        if error is not None and self._may_come_of_peers and self._has_lost_peers():
            windows.check_peers()
            windows.failed(error)
            return None  # there is nobody to come to
        self._channel.fulfil()
        self._channel.complete_followers()
        answer = windows.answers.left(windows.at)
        if error is not None:
            answer = windows.failed(JoinError(text) if text else error)
        sees_them = self._channel.keeps_notes
        if not sees_them:
            windows.farewell.make_up()
        if error is None:
            limit = min(LIMIT_SECONDS, self._channel.timeout or LIMIT_SECONDS)
        else:
            limit = max(self._patience, _SEEN_GRACE_SECONDS) if sees_them else self._patience
        self._next = [0] * self._channel.collective.world_size  # where lengths are declared, there is no other window
        if windows.under_way is not None:
            # They may be in what this rank has left out, or it knows that they are.
            if sees_them and not self._come_within(0.0 if self._channel.knows_alone else self._patience):
                windows.farewell.follow(windows.under_way.is_completed, self._come_back, limit)
            if not self._come_within(self._patience + limit):
                return self._give_up(error)
            some_end = windows.answers.some_end(windows.replies)
            if windows.ends_well and not some_end:  # the loop is over for the others; the block tells them
                return self._end()
            if some_end:
                self._shadow_rest(limit)  # the others read it when this window is over
                windows.farewell.part("left", limit)
                if error is None or (self._may_come_of_peers and _is_of_collective(error)):
                    windows.check(windows.replies)
                return None
            self._next = windows.read("left the loop over join.iterate")
        windows.call(answer, self._patience + limit + _GRACE_SECONDS)
        if not self._come_within(0.0 if sees_them else self._patience):
            self._shadow_rest(limit, windows.under_way)
            if not self._come_within(0.0 if sees_them else limit):
                return self._give_up(error)
        replies = windows.replies
        if not windows.answers.all_end(replies):
            if not sees_them:
                windows.begin(self._next)
            self._shadow_steps(lambda: False, limit)
        windows.farewell.part("left", limit)
        if error is None:
            if any(reply != answer for reply in replies):
                windows.check(replies)
            self._end()
        return None

    def _has_lost_peers(self) -> bool:
        """Whether processes of others are gone: none ends before this rank has told how far it is, but by itself."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            if self._windows.has_lost_peers:
                return True
            time.sleep(_END_SECONDS / 20)
        return False

    def _end(self) -> None:
        self._channel.end()
        self._channel.leaving = False

    def _come_within(self, seconds: float) -> bool:
        """Whether all ranks answer the roll call under way in time."""
        assert self._windows.under_way is not None
        return is_done_within(self._windows.under_way, seconds)

    def _shadow_rest(self, limit: float, roll_call: Work | None = None) -> None:
        """Shadow what the others still make of this window, from where this rank left.

        Args:
            limit: how many seconds to wait for those who go on, where what they do can be seen.
            roll_call: the one that they answer when it is over, if they have not answered it.
        """

        def is_over() -> bool:
            return roll_call is not None and roll_call.is_completed()

        if self._channel.keeps_notes or self._windows.farewell.shadow(is_over):
            self._shadow_steps(is_over, limit)

    def _shadow_steps(self, is_over: Callable[[], bool], limit: float) -> None:
        """Shadow the steps of this window that were not begun."""
        windows = self._windows
        if self._channel.keeps_notes:
            windows.farewell.follow(is_over, self._come_to, limit)
            return
        steps = min(windows.counts) if self._channel.throws else windows.steps
        while windows.at < steps:
            windows.farewell.meet()
            self._begin_step()
            if not windows.farewell.shadow(is_over):
                return

    def _come_to(self, step: int) -> bool:
        """The others are in this step."""
        while self._channel.steps < step:
            self._begin_step()
        self._channel.be_in(step, self._windows.active_before(self._channel.steps - step))
        return True

    def _come_back(self, step: int) -> bool:
        """The others are in this step, which this rank has ended without what they run; not if it is one to come."""
        return step <= self._channel.steps and self._come_to(step)

    def _begin_step(self) -> None:
        windows = self._windows
        if windows.at == windows.steps:  # the others have begun the next window
            windows.begin(self._next)
        self._channel.shadow_step(windows.begin_step())

    def _give_up(self, error: BaseException | None) -> None:
        """The others are held up by collectives of the body; they will be free, and read this, when this process ends.

        Raises:
            ProtocolError: without an ``error``.
        """
        if error is None:
            told = ProtocolError(
                f"rank {self._channel.collective.rank} left the loop over join.iterate early, and not all others did:"
                " they wait for it in collectives that no joinable stands for. The process group cannot be used any"
                " more"
            )
            self._windows.failed(told)
            self._channel.close_with(told)


def _is_of_collective(error: BaseException) -> bool:
    """Whether a process group raised it; gloo's errors are told by the file that they name."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
