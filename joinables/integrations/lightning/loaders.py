"""Data of a trainer's loops on this rank: its samplers, its loaders, and the :class:`Fetcher` of their batches.

Torch's ``DistributedSampler`` repeats samples until all ranks have the same number. Uneven ranks do not need that, and
a single process would not train on a sample twice: see :func:`trim`.

Lightning counts the steps of an epoch by the length of its loader. It refuses a loader without batches if other ranks
have some, and keeps only rank 0's loader states in its checkpoints. So each loader is wrapped at the point where the
strategy may do so (:class:`Loader`), and all ranks exchange the lengths of their loaders, and, for each checkpoint,
their states.

A batch is fetched when the loop body begins, not one batch ahead as Lightning's own fetchers do for a loader without a
length. So a step of ``Join.iterate`` is a step of the loop body. ``done`` is the same on all ranks.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import DistributedSampler
from typing_extensions import Self, override

from join import Join
from join.collectives import collective_of
from join.read_ahead import length_of
from joinables.integrations import Loader
from joinables.integrations.lightning.blocks import Blocks
from joinables.integrations.lightning.names import DataFetcher, rank_zero_warn


class InjectedRank(int):
    """Rank in a sampler that Lightning injects; a user's own samplers have a plain number."""


def trim(loader: Any) -> None:
    """Keep a sampler that Lightning has injected from repeating samples, or warn if a user's sampler repeats any.

    Args:
        loader: The loader, as Lightning has prepared it.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    samples = len(sampler.dataset)  # pyright: ignore[reportArgumentType, reportUnknownMemberType]
    if isinstance(sampler.rank, InjectedRank):
        sampler.total_size = samples
        sampler.num_samples = len(range(sampler.rank, samples, sampler.num_replicas))
    elif sampler.total_size > samples:
        rank_zero_warn(
            f"This DistributedSampler repeats {sampler.total_size - samples} of {samples} samples to give all ranks the"
            " same number, and they count twice. Remove the sampler from the loader, so that"
            " Trainer(strategy=JoinStrategy()) distributes the samples and repeats none."
        )


class StatefulLoader(Loader):
    """Loader with ``state_dict``: the states of all ranks' loaders, after the batches that were used."""

    used: Any = None
    """The state of this rank's loader after the last batch that was used; ``None`` before it is known."""

    @property
    def state(self) -> Any:
        """Copy of the present state of this rank's loader; ``None`` if it has none."""
        return copy.deepcopy(self.loader.state_dict()) if hasattr(self.loader, "state_dict") else None

    def state_dict(self) -> dict[str, Any]:
        """Return all ranks' states; all ranks call this."""
        return {"ranks": collective_of(None).all_gather_object(self.state if self.used is None else self.used)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's state.

        Raises:
            ValueError: If a different number of ranks wrote the checkpoint, or if its loader was not wrapped.
        """
        ranks: Sequence[Any] | None = state_dict.get("ranks")
        collective = collective_of(None)
        if ranks is None or len(ranks) != collective.world_size:
            count = "no" if ranks is None else len(ranks)
            raise ValueError(
                f"The checkpoint has the loader states of {count} ranks, but the trainer has {collective.world_size}."
                " Resume with the number of ranks and the strategy that wrote it, or from the end of an epoch. [J125]"
            )
        self.used = ranks[collective.rank]
        if self.used is not None:
            self.loader.load_state_dict(self.used)


def share_length(loader: Any) -> Loader:
    """Wrap this rank's loader; all ranks call this together, each with its own loader.

    Args:
        loader: Any iterable.
    """
    if isinstance(loader, Loader):
        return loader
    has_state = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    ranks = collective_of(None).all_gather_object((length_of(loader), has_state), plain=True)
    lengths = [length for length, _ in ranks]
    kind = StatefulLoader if any(has_state for _, has_state in ranks) else Loader
    return kind(loader, None if None in lengths else max(lengths))


class Source:
    """This rank's training batches of one epoch; one block after the other iterates over them.

    Batches that a block has read and not yielded are yielded again in the next block.

    Args:
        combined_loader: Lightning's combined loader, over wrapped loaders.
    """

    def __init__(self, combined_loader: Any) -> None:
        # All blocks share one generator, since a combined loader starts again whenever it is iterated over.
        self._batches: Iterator[Any] = (batch for batch, *_ in combined_loader)
        self._loaders = [part for part in combined_loader.flattened if isinstance(part, StatefulLoader)]
        self._ahead: deque[tuple[Any, list[Any]]] = deque()  # batches that were read and not used, with later states
        self._at_end: list[Any] | None = None
        self._use(self._states())

    def __iter__(self) -> Iterator[Any]:
        yield from [batch for batch, _ in self._ahead]
        for batch in self._batches:
            self._ahead.append((batch, self._states()))
            yield batch
        if self._at_end is None:
            self._at_end = self._states()

    def limit(self, batches: float) -> None:
        """Limit the number of batches that are still read."""
        self._batches = iter(limited(self._batches, batches))

    def used(self) -> None:
        """Record that the next batch was yielded."""
        _, states = self._ahead.popleft()
        self._use(states)

    def end(self) -> None:
        """Record that all ranks' batches were yielded: many loaders start again from the state they have then."""
        if self._at_end is not None and not self._ahead:
            self._use(self._at_end)

    def _states(self) -> list[Any]:
        return [loader.state for loader in self._loaders]

    def _use(self, states: Iterable[Any]) -> None:
        for loader, state in zip(self._loaders, states, strict=True):
            loader.used = state


class Fetcher(DataFetcher):
    """Fetcher of the batches of a loop, in blocks.

    Args:
        blocks: The trainer's blocks.
        make_join: A function that makes the ``Join`` of the next block.
        trainer: The Lightning trainer.
        trains: Whether the loop trains rather than evaluates.
    """

    def __init__(self, blocks: Blocks, make_join: Callable[[], Join], trainer: Any, *, trains: bool) -> None:
        super().__init__()
        self._blocks, self._make_join, self._trainer, self._trains = blocks, make_join, trainer, trains

    @override
    def setup(self, combined_loader: Any) -> None:
        super().setup(combined_loader)
        if self._trains and combined_loader._mode == "min_size":
            # Its length is the longest of the ranks' shortest loaders.
            own = min(length_of(part.loader) or 0 for part in combined_loader.flattened)
            longest = max(collective_of(None).all_gather_object(own, plain=True))
            for part in combined_loader.flattened:
                part.length = part.length and longest  # None if a rank has a stream

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

    # Each of these yields a batch, its number, and its loader's number. They set done before they yield the last one.

    def _training(self, source: Source) -> Iterator[tuple[Any, int, int]]:
        """Yield an epoch; if a block is closed in the middle of it, another block follows.

        A block that begins inside an accumulation window, as a resumed run's may, has only the rest of the window.
        """
        blocks, window = self._blocks, self._trainer.accumulate_grad_batches
        parts = zip(self.combined_loader.flattened, limits(self.combined_loader), strict=True)
        if any(not isinstance(part, StatefulLoader) or limit < (part.length or limit + 1) for part, limit in parts):
            # Otherwise the loaders end by themselves, so that their states say so.
            source.limit(max(limits(self.combined_loader)) - self.fetched)
        whole = True  # whether the windows of the current block are whole
        while not self.done:
            before = self.fetched % window
            if not (blocks.trains and (whole or before)):
                blocks.begin(self._make_join(), source, trains=True, window=window - before)
                whole = not before
            try:
                batch = next(blocks)
            except StopIteration:  # all ranks are out of data
                source.end()
                return
            if not blocks.is_dummy:
                source.used()
            self.done = blocks.is_last_step
            if self.done:
                source.end()
            yield batch, self.fetched, 0

    def _evaluation(self) -> Iterator[tuple[Any, int, int]]:
        """Yield an evaluation, in a block for each loader if the loaders follow each other."""
        combined = self.combined_loader
        if combined._mode == "sequential":  # the loaders' batches follow each other
            loaders = list(map(limited, combined.flattened, limits(combined)))
        else:
            loaders = [limited((batch for batch, *_ in combined), max(limits(combined), default=0))]
        for number, loader in enumerate(loaders):
            self._blocks.begin(self._make_join(), loader, trains=False)
            for index, batch in enumerate(self._blocks):
                self.done = self._blocks.is_last_step and number + 1 == len(loaders)
                yield batch, index, number
            self._trainer._results.agree()


def limits(combined_loader: Any) -> Iterable[float]:
    """Return the largest number of batches for each loader."""
    return combined_loader.limits or [float("inf")] * len(combined_loader.flattened)


def limited(loader: Iterable[Any], limit: float) -> Iterable[Any]:
    """Return at most ``limit`` batches of a loader."""
    return loader if limit == float("inf") else islice(loader, int(limit))
