"""The loops over ``Join.iterate`` in one block: :class:`Loops`; and one that no other rank hears of."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from join.batch import Step
from join.loop.iterate import Iteration, Options, check_loader
from join.loop.read_ahead import ReadAhead

T = TypeVar("T")


class LoopAlone:
    """A loop in a block with ``enable=False``; a window is read ahead, and one batch, so that the last one is known.

    Args:
        loader: this rank's batches.
        options: how to go over them; ``until``, ``dummy`` and ``lookahead`` have no meaning here.
        world_size: the number of ranks, which are taken to have the same.
    """

    def __init__(self, loader: Iterable[Any], options: Options, world_size: int) -> None:
        check_loader(loader)
        self._loader, self._window, self._world_size = loader, options.window, world_size
        self.ahead = ReadAhead(loader, options.weigh)
        self.step: Step | None = None
        """The step under way, if the loop is."""
        self.is_last_step = False
        """Whether the batch that was handed out last is the last one."""

    def handed_out(self) -> Generator[Any]:
        """The batches."""
        ahead, number, window = self.ahead, 0, self._window
        size = window if isinstance(window, int) else max(ahead.read(sys.maxsize), 1)
        try:
            while True:
                ahead.read(size + 1 - len(ahead.batches))
                weights = list(ahead.weights)[:size]
                total = sum(weights) * self._world_size
                for place, weight in enumerate(weights, 1):
                    number += 1
                    self.step = Step(number, weight=weight, total=total, ends_window=place == len(weights))
                    self.is_last_step = len(ahead.batches) == 1 and ahead.error is None
                    yield ahead.take()
                if not ahead.batches:
                    break
            if ahead.error is not None:
                raise ahead.error
            ahead.is_used_up = True
        finally:
            self.step, self.is_last_step = None, False
            ahead.close()

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]


class Batches(Iterable[T], Generic[T]):
    """What ``Join.iterate`` returns: the batches of one loop, once; ``len`` is that of the rank with most of them."""

    def __init__(self, loop: Iteration | LoopAlone) -> None:
        self._loop: Iteration | LoopAlone = loop
        self._batches: Iterator[T] | None = loop.handed_out()

    def __iter__(self) -> Iterator[T]:
        # Nothing else may hold the generator: it is told of a ``break`` when it is dropped.
        batches, self._batches = self._batches, None
        return iter(()) if batches is None else batches

    def __len__(self) -> int:
        return len(self._loop)


class Loops:
    """The last loop of a block, and the steps of all."""

    def __init__(self) -> None:
        self.last: Iteration | LoopAlone | None = None
        """The one that began last, if any."""
        self._before = (0, 0)  # the steps of those before it

    def begin(self, loop: Iteration | LoopAlone) -> Batches[Any]:
        """Begin another loop, and return its batches."""
        self._before, self.last = self.steps, loop
        return Batches(loop)

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
