"""Reading a loader some batches ahead of their use: :class:`ReadAhead`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any


class ReadAhead:
    """The batches of one rank that were read and are not yet used.

    Args:
        loader: what can be iterated.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._source: Iterator[Any] = iter(loader)
        self.ended = False
        """Whether the loader has no more, beyond those."""
        self.batches: deque[Any] = deque()
        """In their order."""
        self.error: BaseException | None = None
        """What the loader raised, or interrupted it; it is not asked again."""

    def close(self) -> None:
        """Let go of the loader, whose workers can end; what was read stays."""
        self.ended, self._source = True, iter(())

    def read(self, wanted: int) -> int:
        """Read up to ``wanted`` more batches; how many there were."""
        for count in range(wanted):
            if self.ended:
                return count
            try:
                self.batches.append(next(self._source))
            except StopIteration:
                self.ended = True
                return count
            except BaseException as error:  # also Ctrl-C: here most of it comes, and the others have to be told
                self.ended, self.error = True, error
                return count
        return wanted
