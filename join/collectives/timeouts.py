"""Every time that decides something when ranks of a block fail: :class:`Timeouts`.

No time decides anything while all goes well. ``Join(..., timeout=)``, what a user gives the ranks, is not among these.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Timeouts:
    """Times in seconds.

    Attributes:
        look: how often a rank that waits looks at what the others have left for it to find, and how often each rank
            looks whether it is asked how far it is.
        note: how long a rank that fails takes at most to post a note that says why.
        cause: how long a rank whose collective has broken looks at most for the rank that is to blame.
        still: how long the others must not have moved, before a rank takes it that they wait for it in a collective of
            the loop's body.
        end: how long a rank of the launcher that is done waits for the others before it takes its group down.
        first: how long the launcher waits, after a first failure, for the one that has caused it.
        term: how long a worker of the launcher may take over SIGTERM.
        silent: how long a rank may not answer, while nothing has broken, before it is taken to be gone.
        beat: how often a rank says in the store that its process lives, where no memory is shared that tells.
        abort: how long after a rank has failed the others have to find that out by themselves, before what they have
            under way on their accelerators is aborted.
    """

    look: float = 0.25
    note: float = 2.0
    cause: float = 3.0
    still: float = 5.0
    silent: float = 30.0
    beat: float = 5.0
    abort: float = 1.0
    end: float = 5.0
    first: float = 2.0
    term: float = 5.0


_current = Timeouts()


def timeouts() -> Timeouts:
    """The times that hold in this process."""
    return _current


@contextmanager
def using(**changes: float) -> Generator[None]:
    """Within the context, other times hold in this process; for tests."""
    global _current
    kept, _current = _current, replace(_current, **changes)
    try:
        yield
    finally:
        _current = kept
