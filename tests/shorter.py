"""Shorter time limits for tests of failures: :func:`using`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from join.collectives.timeouts import TIMEOUTS


@contextmanager
def using(**changes: float) -> Iterator[None]:
    """Change time limits of ``join.collectives.timeouts`` in this process, for the duration of a context."""
    before = vars(TIMEOUTS).copy()
    vars(TIMEOUTS).update(changes)
    try:
        yield
    finally:
        vars(TIMEOUTS).update(before)
