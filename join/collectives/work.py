"""Operations that were started: :class:`Work`, and :class:`Done` for those that are over at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol


class Work(Protocol):
    """A collective under way; ``torch.distributed.Work`` is one."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Block until done.

        Raises:
            RuntimeError: when ``timeout`` passes first, after which waiting again is allowed.
        """
        ...

    def is_completed(self) -> bool:
        """Whether the operation is done."""
        ...


class Done:
    """The :class:`Work` of a backend that does everything at once."""

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


DONE = Done()
"""An operation that is over; all share it."""
