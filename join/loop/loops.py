"""The loops over ``Join.iterate`` in one block: :class:`Loops`; and one that no other rank hears of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from join.loop.iterate import Iteration
from join.loop.read_ahead import ReadAhead


class LoopAlone:
    """A loop in a block with ``enable=False``; one batch is read ahead, so that the last one is known.

    Args:
        loader: this rank's batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.ahead = ReadAhead(loader)
        self.is_last_step = False
        """Whether the batch that was handed out last is the last one."""

    def handed_out(self) -> Iterator[Any]:
        """The batches."""
        ahead = self.ahead
        try:
            while ahead.read(2 - len(ahead.batches)) or ahead.batches:
                self.is_last_step = len(ahead.batches) == 1 and ahead.error is None
                yield ahead.take()
            if ahead.error is not None:
                raise ahead.error
            ahead.is_used_up = True
        finally:
            self.is_last_step = False
            ahead.close()


class Loops:
    """The last loop of a block, and the steps of all."""

    def __init__(self) -> None:
        self.last: Iteration | LoopAlone | None = None
        """The one that began last, if any."""
        self._before = (0, 0)  # the steps of those before it

    def begin(self, loop: Iteration | LoopAlone) -> Iterator[Any]:
        """Begin another loop, and return its batches."""
        self._before, self.last = self.steps, loop
        return loop.handed_out()

    @property
    def running(self) -> Iteration | None:
        """The loop that has begun on all ranks, and has not come to its end."""
        last = self.last
        return last if isinstance(last, Iteration) and last.running else None

    @property
    def joined_at(self) -> float | None:
        """When this rank ran out of batches in the last loop, on the monotonic clock."""
        return self.last.joined_at if isinstance(self.last, Iteration) else None

    @property
    def steps(self) -> tuple[int, int]:
        """How many steps this rank has begun with a batch, and with a dummy."""
        (batches, dummies), last = self._before, self.last
        return (batches + last.steps[0], dummies + last.steps[1]) if isinstance(last, Iteration) else self._before
