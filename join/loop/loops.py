"""The loops over ``Join.iterate`` in one block: :class:`Loops`."""

from __future__ import annotations

from join.loop.alone import LoopAlone
from join.loop.iterate import Iteration


class Loops:
    """The last loop of a block, and the steps of all."""

    def __init__(self) -> None:
        self.last: Iteration | LoopAlone | None = None
        """The one that began last, if any."""
        self._before = (0, 0)  # the steps of those before it

    def begin(self, loop: Iteration | LoopAlone) -> None:
        """Another loop begins."""
        self._before, self.last = self.steps, loop

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
