"""Waiting with a limit, and finding out who is missing: :class:`Patience`, behind ``Join(..., timeout=)``."""

from __future__ import annotations

import time
from datetime import timedelta

from join.collectives import Collective, Work
from join.errors import JoinError, JoinTimeoutError

_SLICE_SECONDS = 0.5  # how often a rank that waits looks whether another has given up
_GRACE_SECONDS = 2.0  # how long a rank that gives up waits for the others' accounts


def is_done_within(work: Work, seconds: float) -> bool:
    """Wait for ``work`` for some time at most; whether it is done.

    Raises:
        RuntimeError: if the collective itself fails.
        JoinError: what a look at the others raises (``Line.watch``).
    """
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        try:
            # Not 0 ms, which backends take for their own timeout; and not for long: gloo's waiting is not interrupted.
            work.wait(timedelta(seconds=min(max(left, 0.01), _SLICE_SECONDS)))
        except JoinError:  # of one who looked what others do
            raise
        except RuntimeError:  # a timeout; or it has failed, and says so again below
            pass
    work.wait()
    return True


class Patience:
    """Waits for headers. The store is not touched before a wait has lasted half a second.

    A rank that gives up publishes what it is doing, and so does every rank that waits at that moment; whoever has not
    published is missing.

    Args:
        collective: the group.
        key: prefix of the block's keys in the store.
        timeout: seconds to wait.
    """

    def __init__(self, collective: Collective, key: str, timeout: float) -> None:
        self._collective, self._key, self._timeout = collective, key, timeout

    def wait(self, work: Work, doing: str, *, away: float) -> None:
        """Wait for ``work``.

        Args:
            work: the header's sum.
            doing: what this rank has announced, for the others to read.
            away: seconds since this rank's previous header; one that was away for long may have been given up.

        Raises:
            JoinTimeoutError: if a rank does not come, or if the others have given up on this one.
        """
        started = time.monotonic()
        gave_up = f"{self._key}/gave-up"
        while not is_done_within(work, min(_SLICE_SECONDS, self._timeout)):
            if time.monotonic() - started >= self._timeout or self._collective.check(gave_up):
                self._collective.set(gave_up, str(self._collective.rank))
                raise JoinTimeoutError(self._account(doing))
        if away >= self._timeout / 2 and self._collective.check(gave_up):
            by = self._collective.get(gave_up)
            raise JoinTimeoutError(f"rank {by} gave up waiting for this rank {self._collective.rank}")

    def _account(self, doing: str) -> str:
        collective = self._collective
        collective.set(f"{self._key}/account/{collective.rank}", f"rank {collective.rank} {doing}")
        keys = [f"{self._key}/account/{rank}" for rank in range(collective.world_size)]
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and not all(map(collective.check, keys)):
            time.sleep(0.02)
        published = [collective.check(key) for key in keys]
        here = [collective.get(key) for key, there in zip(keys, published, strict=True) if there]
        missing = [rank for rank, there in enumerate(published) if not there]
        pending = "The process group has a collective pending and cannot be used any more"
        if not missing:
            return (
                f"waited {self._timeout:g} s, and all ranks wait, for different things: {'; '.join(here)}. All must run"
                f" the same. {pending}"
            )
        return (
            f"waited {self._timeout:g} s for ranks {missing}, which announced nothing. {'; '.join(here)}."
            " They are late, or in a collective that this rank does not come to: in join.iterate, run the whole body on"
            " all ranks; else list what it belongs to (a sharded optimizer), wrap it (joinables.SharedCall), or loop"
            f" over join.iterate. {pending}"
        )
