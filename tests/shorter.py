"""Shorter time limits for tests of failures: :func:`using`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from join.collectives import timeouts


@contextmanager
def using(**changes: float) -> Iterator[None]:
    """Change time limits of ``join.collectives.timeouts`` in this process, for the duration of a context."""
    before = timeouts._current
    timeouts._current = replace(before, **changes)
    try:
        yield
    finally:
        timeouts._current = before
