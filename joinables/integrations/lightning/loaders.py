"""The data of a trainer's loops on this rank: its samplers, its loaders, and the :class:`Fetcher` of their batches.

Torch's ``DistributedSampler`` repeats samples until all ranks have as many. Here that is not needed, and a sample that
counts twice is not what one process would train on: :func:`trim`.

Lightning counts the steps of an epoch by the length of its loader, refuses a loader without batches where others have
some, and keeps the state of loaders of rank 0 in its checkpoints. So each loader is wrapped where the strategy may do
so, and all ranks tell each other how long theirs are, and, for each checkpoint, where in it they are: :class:`Loader`.

A batch is fetched when the loop's body begins, and not a batch ahead as Lightning's own fetchers do where a loader has
no length: a step of ``Join.iterate`` is then a step of the body. ``done`` is the same on all ranks.
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
from join.loop import length_of
from joinables.integrations.lightning.blocks import Blocks
from joinables.integrations.lightning.names import DataFetcher, rank_zero_warn


class InjectedRank(int):
    """The rank of samplers that Lightning injects: a user's own have a plain number."""


def trim(loader: Any) -> None:
    """Keep the sampler of ``loader`` from repeating samples, if Lightning has injected it; else warn if it repeats any.

    Args:
        loader: as Lightning has prepared it.
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
            f"this DistributedSampler repeats {sampler.total_size - samples} of {samples} samples to give all ranks as"
            " many, and they count twice: leave the sampler out, then Trainer(strategy=JoinStrategy()) deals the"
            " samples and repeats none"
        )


class Loader:
    """A loader with the length of the longest of all ranks; without one if some rank's has none.

    Args:
        loader: this rank's.
        length: that of the longest.
    """

    def __init__(self, loader: Any, length: int | None) -> None:
        self.loader, self.length = loader, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"some rank's {type(self.loader).__name__} has no length; give it one on all ranks [J124]")
        return self.length

    def __getattr__(self, name: str) -> Any:  # sampler, dataset, ...
        if name == "loader" or name.startswith("__"):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:  # worker_init_fn, ...
        object.__setattr__(self if name in ("loader", "length", "used") else self.loader, name, value)


class StatefulLoader(Loader):
    """A loader with ``state_dict``: its state is that of all ranks' loaders, as of the batches that were used."""

    used: Any = None
    """The state of this rank's loader after the batch that was used last; ``None`` before it is known."""

    @property
    def state(self) -> Any:
        """A copy of the present state of this rank's loader; ``None`` if it has none."""
        return copy.deepcopy(self.loader.state_dict()) if hasattr(self.loader, "state_dict") else None

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states; all ranks call this."""
        return {"ranks": collective_of(None).all_gather_object(self.state if self.used is None else self.used)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over this rank's state.

        Raises:
            ValueError: if the checkpoint is of another number of ranks, or of a loader that was not wrapped.
        """
        ranks: Sequence[Any] | None = state_dict.get("ranks")
        collective = collective_of(None)
        if ranks is None or len(ranks) != collective.world_size:
            states = "no states of" if ranks is None else f"the states of {len(ranks)} and not of"
            raise ValueError(
                f"the checkpoint has {states} {collective.world_size} ranks' loaders; resume on as many ranks, with"
                " the same strategy, or from the end of an epoch [J125]"
            )
        self.used = ranks[collective.rank]
        if self.used is not None:
            self.loader.load_state_dict(self.used)


def wrapped(loader: Any) -> Loader:
    """Wrap this rank's loader; all ranks do, each its own.

    Args:
        loader: what can be iterated.
    """
    if isinstance(loader, Loader):
        return loader
    has_state = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    ranks = collective_of(None).all_gather_object((length_of(loader), has_state))
    lengths = [length for length, _ in ranks]
    kind = StatefulLoader if any(has_state for _, has_state in ranks) else Loader
    return kind(loader, None if None in lengths else max(lengths))


class Source:
    """This rank's training batches of one epoch, iterated by one block after the other.

    Batches that a block has read and not handed out are read again by the next.

    Args:
        combined_loader: Lightning's, over wrapped loaders.
    """

    def __init__(self, combined_loader: Any) -> None:
        # One generator for all blocks: a combined loader begins anew whenever it is asked for its iterator.
        self._batches: Iterator[Any] = (batch for batch, *_ in combined_loader)
        self._loaders = [part for part in combined_loader.flattened if isinstance(part, StatefulLoader)]
        self._ahead: deque[tuple[Any, list[Any]]] = deque()  # read and not used: batches, and states after them
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
        """Read so many batches at most."""
        self._batches = iter(limited(self._batches, batches))

    def used(self) -> None:
        """Note that the next batch was handed out."""
        _, states = self._ahead.popleft()
        self._use(states)

    def end(self) -> None:
        """Note that all batches of all ranks were handed out: loaders are in the state in which many begin anew."""
        if self._at_end is not None and not self._ahead:
            self._use(self._at_end)

    def _states(self) -> list[Any]:
        return [loader.state for loader in self._loaders]

    def _use(self, states: Iterable[Any]) -> None:
        for loader, state in zip(self._loaders, states, strict=True):
            loader.used = state


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
    def setup(self, combined_loader: Any) -> None:
        super().setup(combined_loader)
        if self._trains and combined_loader._mode == "min_size":  # the longest of the ranks' shortest loaders
            own = min(length_of(part.loader) or 0 for part in combined_loader.flattened)
            longest = max(collective_of(None).all_gather_object(own))
            for part in combined_loader.flattened:
                part.length = part.length and longest  # None where a rank has a stream

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

    # Each of these yields a batch, its number, and that of its loader; ``done`` is set before the last one.

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
        if combined._mode == "sequential":  # one loader's batches after the other's
            loaders = list(map(limited, combined.flattened, limits(combined)))
        else:
            loaders = [limited((batch for batch, *_ in combined), max(limits(combined), default=0))]
        for number, loader in enumerate(loaders):
            self._blocks.begin(self._make_join(), loader, trains=False)
            for index, batch in enumerate(self._blocks):
                self.done = self._blocks.is_last_step and number + 1 == len(loaders)
                yield batch, index, number


def limits(combined_loader: Any) -> Iterable[float]:
    """How many batches of each loader there may be, at most."""
    return combined_loader.limits or [float("inf")] * len(combined_loader.flattened)


def limited(loader: Iterable[Any], limit: float) -> Iterable[Any]:
    """So many batches of a loader at most."""
    return loader if limit == float("inf") else islice(loader, int(limit))
