"""Waiting with a limit: :func:`is_done_within`."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

from join.collectives import Work

_LEAST_SECONDS = 0.01  # backends take 0 for their own time limit


def is_done_within(work: Work, seconds: float) -> bool:
    """Wait for ``work`` for some time at most; whether it is done.

    Raises:
        RuntimeError: if the collective itself fails.
    """
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        with suppress(RuntimeError):  # a timeout; or it has failed, and says so again below
            work.wait(timedelta(seconds=max(left, _LEAST_SECONDS)))
    work.wait()
    return True
