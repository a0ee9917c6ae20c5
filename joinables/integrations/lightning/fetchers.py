"""Who fetches the batches of a trainer's loops: :class:`Fetcher`.

A batch is fetched when the loop's body begins, and not a batch ahead as Lightning's own fetchers do where a loader has
no length: a step of ``Join.iterate`` is then a step of the body. ``done`` is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from typing_extensions import Self, override

from join import Join
from joinables.integrations.lightning.blocks import Blocks
from joinables.integrations.lightning.loaders import Source
from joinables.integrations.lightning.names import DataFetcher, is_sequential, limits


class Fetcher(DataFetcher):
    """Fetches the batches of a loop in blocks.

    Args:
        blocks: the trainer's.
        make_join: makes the ``Join`` of the next block.
        trainer: the Lightning trainer.
        trains: whether the loop trains, and does not evaluate.
    """

    def __init__(self, blocks: Blocks, make_join: Callable[[], Join], trainer: Any, *, trains: bool) -> None:
        super().__init__()
        self._blocks, self._make_join, self._trainer, self._trains = blocks, make_join, trainer, trains

    @override
    def reset(self) -> None:
        self.fetched, self.length, self.done = 0, None, False

    @override
    def __iter__(self) -> Self:
        self._blocks.end()
        # The source is made at once, since the loader has a length after that.
        self.iterator = self._training(Source(self.combined_loader)) if self._trains else self._evaluation()
        self.reset()
        return self

    @override
    def teardown(self) -> None:
        self._blocks.close()
        super().teardown()

    # Each of these gives a batch, its number, and that of its loader; ``done`` is set before the last one.

    def _training(self, source: Source) -> Iterator[tuple[Any, int, int]]:
        """An epoch, in which a block that was closed in its middle is followed by another.

        One that begins inside a window of accumulation, as a resumed run may, has only the rest of it.
        """
        blocks, window = self._blocks, self._trainer.accumulate_grad_batches
        source.limit(max(limits(self.combined_loader)) - self.fetched)
        whole = True  # whether the windows of the block are
        while not self.done:
            before = self.fetched % window
            if not (blocks.trains and (whole or before)):
                blocks.begin(self._make_join(), source, trains=True, window=window - before)
                whole = not before
            try:
                batch = next(blocks)
            except StopIteration:  # no rank has any
                source.end()
                return
            if not blocks.is_dummy:
                source.used()
            self.done = blocks.is_last_step
            if self.done:
                source.end()
            yield batch, self.fetched, 0

    def _evaluation(self) -> Iterator[tuple[Any, int, int]]:
        """An evaluation, in a block for each loader, if one comes after the other."""
        combined = self.combined_loader
        if is_sequential(combined):
            loaders = [_limited(*each) for each in zip(combined.flattened, limits(combined), strict=True)]
        else:
            loaders = [_limited((batch for batch, *_ in combined), max(limits(combined), default=0))]
        for number, loader in enumerate(loaders):
            self._blocks.begin(self._make_join(), loader, trains=False)
            for index, batch in enumerate(self._blocks):
                self.done = self._blocks.is_last_step and number + 1 == len(loaders)
                yield batch, index, number


def _limited(loader: Iterable[Any], limit: float) -> Iterable[Any]:
    return loader if limit == float("inf") else islice(loader, int(limit))
