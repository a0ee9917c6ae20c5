"""Who fetches the batches of a trainer's loops: :class:`TrainingFetcher` and :class:`EvaluationFetcher`.

A batch is fetched when the loop's body begins, and not a batch ahead as Lightning's own fetchers do where a loader has
no length: a step of ``Join.iterate`` is then a step of the body. ``done`` is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any

from typing_extensions import Self, override

from join import Join
from joinables.integrations.lightning.blocks import Blocks, Loop
from joinables.integrations.lightning.loaders import Source
from joinables.integrations.lightning.names import DataFetcher, is_sequential, limits


class Fetcher(DataFetcher):
    """Fetches batches in blocks.

    Args:
        blocks: the trainer's.
        make_join: makes the ``Join`` of the next block.
    """

    def __init__(self, blocks: Blocks, make_join: Callable[[], Join]) -> None:
        super().__init__()
        self._blocks, self._make_join = blocks, make_join

    @override
    def reset(self) -> None:
        self.fetched, self.length, self.done = 0, None, False

    @override
    def __next__(self) -> tuple[Any, int, int]:
        self._start_profiler()
        try:
            fetched = self._next()
        except StopIteration:
            self.done = True
            raise
        finally:
            self._stop_profiler()
        self.fetched += 1
        return fetched

    def _next(self) -> tuple[Any, int, int]:
        raise NotImplementedError

    @override
    def teardown(self) -> None:
        self._blocks.close()
        super().teardown()


class TrainingFetcher(Fetcher):
    """Fetches the batches of an epoch; a block that was closed in its middle is followed by another."""

    _loop: Loop | None = None
    _source: Source | None = None

    @override
    def __iter__(self) -> Self:
        self._blocks.end()
        self._source = Source(self.combined_loader)
        self.reset()
        return self

    @override
    def _next(self) -> tuple[Any, int, int]:
        source, blocks = self._source, self._blocks
        if self.done or source is None:
            raise StopIteration
        if self._loop is None or not blocks.is_open(self._loop):
            self._loop = blocks.begin(self._make_join(), source, trains=True)
        try:
            batch = blocks.next(self._loop)
        except StopIteration:
            source.end()
            raise
        if not blocks.step.is_dummy:
            source.used()
        self.done = self._loop.is_last_step
        if self.done:
            source.end()
        return batch, self.fetched, 0

    @override
    def teardown(self) -> None:
        self._source = None
        super().teardown()


class EvaluationFetcher(Fetcher):
    """Fetches the batches of an evaluation: in a block for each loader, if one comes after the other."""

    _fetched: Iterator[tuple[Any, int, int]] = iter(())

    @override
    def __iter__(self) -> Self:
        self._blocks.end()
        self._fetched = self._all()
        self.reset()
        return self

    @override
    def _next(self) -> tuple[Any, int, int]:
        return next(self._fetched)

    def _all(self) -> Generator[tuple[Any, int, int]]:
        combined = self.combined_loader
        if is_sequential(combined):
            loaders = [_limited(*each) for each in zip(combined.flattened, limits(combined), strict=True)]
        else:
            loaders = [_limited((batch for batch, *_ in combined), max(limits(combined), default=0))]
        for number, loader in enumerate(loaders):
            loop = self._blocks.begin(self._make_join(), loader, trains=False)
            for index, batch in enumerate(self._in(loop)):
                self.done = loop.is_last_step and number + 1 == len(loaders)
                yield batch, index, number

    def _in(self, loop: Loop) -> Iterator[Any]:
        while True:
            try:
                yield self._blocks.next(loop)
            except StopIteration:
                return


def _limited(loader: Iterable[Any], limit: float) -> Iterable[Any]:
    return loader if limit == float("inf") else islice(loader, int(limit))
