"""A loop over ``Join.iterate`` in a block with ``enable=False``, which no other rank hears of: :class:`LoopAlone`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from join.loop.read_ahead import ReadAhead


class LoopAlone:
    """The batches of a loader, one of which is read ahead, so that the last one is known.

    Args:
        loader: this rank's batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._ahead = ReadAhead(loader)
        self._has_ended = False
        self.is_last_step = False
        """Whether the batch that was handed out last is the last one."""

    @property
    def pending(self) -> list[Any]:
        """The batches that were read ahead and not handed out, in their order."""
        return list(self._ahead.batches)

    @property
    def loader_state(self) -> Any:
        """As of :class:`join.loop.iterate.Iteration`."""
        return self._ahead.loader_state(at_end=self._has_ended)

    def handed_out(self) -> Iterator[Any]:
        """The batches."""
        ahead = self._ahead
        try:
            while ahead.read(2 - len(ahead.batches)) or ahead.batches:
                self.is_last_step = len(ahead.batches) == 1 and ahead.error is None
                yield ahead.take()
            if ahead.error is not None:
                raise ahead.error
            self._has_ended = True
        finally:
            self.is_last_step = False
            ahead.close()
