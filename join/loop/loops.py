"""The loops over ``Join.iterate`` in one block: :class:`Loops`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from join.loop.alone import LoopAlone
from join.loop.iterate import Dummy, Iteration, Until
from join.protocol.channel import Channel


class Loops:
    """The last loop of a block, and the steps of all."""

    def __init__(self) -> None:
        self.last: Iteration | LoopAlone | None = None
        """The one that began last, if any."""
        self._before = (0, 0)  # the steps of those before it

    def begin(
        self, channel: Channel, loader: Iterable[Any], until: Until, dummy: Dummy, lookahead: int, **told: bool
    ) -> Iterator[Any]:
        """Another loop begins; its batches. The arguments are those of :class:`Iteration`.

        Raises:
            ValueError, TypeError, JoinError: as ``Join.iterate``.
        """
        mixed = [burst.mixes_ranks for _, burst in channel.roster.bursts if burst.mixes_ranks]
        if dummy == "last" and mixed:
            raise ValueError(
                f"dummy='last' would count in {mixed[0]}; give dummy='empty', or a function that makes one [J074]"
            )
        if self.running is not None:
            self.running.give_way()
        return self._begin(Iteration(channel, loader, until, dummy, lookahead, **told))

    def begin_alone(self, loader: Iterable[Any]) -> Iterator[Any]:
        """A loop begins of which no other rank hears; its batches."""
        return self._begin(LoopAlone(loader))

    def _begin(self, loop: Iteration | LoopAlone) -> Iterator[Any]:
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
