"""Distribution of batches over ranks: :class:`UnevenDistributedSampler`, :func:`distribute`, and :class:`Plan`.

Samples are distributed in blocks of one batch: the first block to rank 0, the second to rank 1, and so on. So every
sample is seen once, the batches are those of a single process, and predictions can be put back into the order of the
data set. No sample is repeated or dropped to make ranks even: ``Join`` takes care of ranks that have fewer batches.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from typing_extensions import override

from join.batch import tensors_in
from join.collectives import Collective
from join.read_ahead import length_of
from joinables._torch.objects import with_parts
from joinables.trainer import rng


class UnevenDistributedSampler(Sampler[int]):
    """Sampler that distributes a data set over the ranks, every sample once, without padding and without dropping.

    It can also distribute the remainder of an epoch: ``used`` returns the number of samples that all ranks have used
    together, for a checkpoint. ``set_epoch(epoch, start)`` distributes the other samples, over the present ranks.

    Args:
        dataset: The data set; only its length is used, which may change between epochs.
        num_replicas: The number of ranks; by default the size of the default process group.
        rank: The number of this rank; by default its rank in the default process group.
        shuffle: Whether the order changes with the epoch.
        seed: The seed of the order, together with the epoch; the same on all ranks.
        block_size: The number of consecutive samples that go to one rank. Pass the batch size to get the batches of a
            single process.

    Raises:
        ValueError: If ``rank`` is negative or not below ``num_replicas``, or if ``block_size`` is not positive.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        block_size: int = 1,
    ) -> None:
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas or block_size < 1:
            raise ValueError(
                f"rank={self.rank} is not a rank below num_replicas={self.num_replicas}, or {block_size=} is not"
                " positive. Pass a rank from 0 to num_replicas - 1, and a block_size of at least 1. [J233]"
            )
        self.dataset = dataset
        self.shuffle, self.seed, self.block_size = shuffle, seed, block_size
        self.epoch = self.start = 0
        self.skip = 0
        """The number of blocks of this rank that the next iteration leaves out, since they were used before."""

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the order of an epoch.

        Args:
            epoch: The number of the epoch.
            start: The number of its samples that all ranks have used before: the first ones in that order.

        Raises:
            ValueError: If ``start`` is negative, or larger than the data set.
        """
        if start and not 0 <= start <= self.total():
            raise ValueError(
                f"{start=} is not a number of samples of this data set. Pass a number from 0 to {self.total()}. [J235]"
            )
        self.epoch, self.start = epoch, start

    def used(self, steps: int) -> int:
        """Return the number of the epoch's samples that all ranks together have used after ``steps`` batches each.

        Args:
            steps: The number of batches since ``start`` on rank 0, which has most. Other ranks may have had fewer.
        """
        return min(self.start + steps * self.num_replicas * self.block_size, self.total())

    def total(self) -> int:
        """Return the number of the epoch's samples."""
        return len(self.dataset)

    @override
    def __iter__(self) -> Iterator[int]:
        order, block, skipped = self.order(), self.block_size, self.skip
        self.skip = 0
        first_block = self.start + (skipped * self.num_replicas + self.rank) * block
        for first in range(first_block, len(order), self.num_replicas * block):
            yield from order[first : first + block]

    def order(self) -> Sequence[Any]:
        """Return the indices of the epoch in the order of a single process."""
        if not self.shuffle:
            return range(len(self.dataset))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return cast("list[int]", torch.randperm(len(self.dataset), generator=generator, device="cpu").tolist())

    def __len__(self) -> int:
        rounds, rest = divmod(self.total() - self.start, self.num_replicas * self.block_size)
        return rounds * self.block_size + min(max(rest - self.rank * self.block_size, 0), self.block_size)


class Shared(UnevenDistributedSampler):
    """Sampler that distributes the elements of another sampler over the ranks: indices, or batches of indices.

    All ranks draw the same elements, since their generators start from the same seed in each epoch.

    Args:
        sampler: The other sampler.
        ranks: The number of ranks.
        rank: The number of this rank.
        seed: The seed, together with the epoch.
        block_size: The number of consecutive elements that go to one rank.
    """

    def __init__(self, sampler: Any, ranks: int, rank: int, seed: int, block_size: int = 1) -> None:
        super().__init__(sampler, ranks, rank, seed=seed, block_size=block_size)
        self.set_epoch(0)

    @override
    def set_epoch(self, epoch: int, start: int = 0) -> None:
        for sampler in _nested(self.dataset):
            if callable(method := getattr(sampler, "set_epoch", None)):
                method(epoch)
        super().set_epoch(epoch, start)
        with rng.seeded(seed := self.seed + epoch):
            if (generator := _generator_of(self.dataset)) is not None:
                generator.manual_seed(seed)
            self._drawn = list(cast("Any", self.dataset))

    @override
    def total(self) -> int:
        return len(self._drawn)  # a sampler may yield more or fewer elements than its length says

    @override
    def order(self) -> list[Any]:
        return self._drawn


def distribute(loader: Any, rank: int, world_size: int, seed: int, *, shuffle: bool | None = None) -> Any:
    """Return the loader of one rank.

    A ``DataLoader`` becomes a loader of the rank's part of the data set, or of the rank's part of the indices or
    batches that its own sampler yields. Other loaders are returned as they are: a loader whose sampler has
    ``num_replicas`` or no length, a loader over an ``IterableDataset``, and an object that is not a ``DataLoader``.
    They distribute their data themselves, or every rank sees all of it. A loader of a subclass is copied with all its
    attributes; the passed loader does not change.

    Args:
        loader: The loader of the whole data set.
        rank: The rank.
        world_size: The number of ranks.
        seed: The seed of the order.
        shuffle: Whether the order changes with the epoch; by default as the loader does.
    """
    source: Any = _source_of(loader)
    if length_of(source) is None or _distributes(source):
        return loader
    batches = loader.batch_sampler
    if source is batches:
        return with_parts(loader, batch_sampler=Shared(source, world_size, rank, seed))
    block_size = 1 if batches is None else batches.batch_size
    if _is_default(source, loader):
        shuffles = type(source) is RandomSampler if shuffle is None else shuffle
        sampler = UnevenDistributedSampler(loader.dataset, world_size, rank, shuffles, seed, block_size)
    else:
        sampler = Shared(source, world_size, rank, seed, block_size)
    parts: dict[str, Any] = {"sampler": sampler}
    if batches is not None:
        parts["batch_sampler"] = BatchSampler(sampler, block_size, batches.drop_last)
    return with_parts(loader, **parts)


def share(loader: Any, collective: Collective, seed: int, *, shuffle: bool | None = None) -> Any:
    """Return the loader of this rank, as :func:`distribute` does; called on all ranks.

    A sampler of the user that yields different elements on each rank distributes them itself, so its loader stays as it
    is. One object all-gather if the user's sampler is distributed over several ranks.
    """
    part, problem = distribute(loader, collective.rank, collective.world_size, seed, shuffle=shuffle), ""
    if collective.world_size > 1 and isinstance(sampler := sampler_of(part), Shared):
        seen = zlib.crc32(repr(sampler.order()[:1000]).encode())
        if len(set(collective.all_gather_object(seen, plain=True))) > 1:
            part, problem = loader, "yields different indices on each rank. If it should yield the same, seed it alike"
    elif collective.world_size > 1 and part is loader and not _distributes(source := _source_of(loader)):
        problem = "" if source is None else "has no length. If the trainer should distribute its samples, add __len__"
    if problem and collective.rank == 0:
        warnings.warn(
            f"Every rank reads all samples that the {type(_source_of(loader)).__name__} of a loader yields there, since"
            f" it {problem}. If it distributes samples itself, write in its __init__:"
            " self.num_replicas = torch.distributed.get_world_size()",
            stacklevel=2,
        )
    return part


def is_read_by_all(loader: Any) -> bool:
    """Return whether every rank reads all samples of a loader, as far as is known here."""
    source: Any = _source_of(loader)
    return sampler_of(loader) is None and (source is None or not _distributes(source))


def compare_first(collective: Collective, batches: Iterator[tuple[int, Any, bool]]) -> Iterator[tuple[int, Any, bool]]:
    """Return the batches of this rank, after a comparison of the ranks' first batches; called on all ranks.

    Ranks that begin with some of the same samples may read the same stream in different orders, which is a warning.

    Raises:
        ValueError: On all ranks, if two ranks begin with the same batch, since they then train on the same samples.
    """
    first = list(islice(batches, 1))
    tensors = [each.reshape(len(each) if each.dim() else 1, -1) for _, batch, _ in first for each in tensors_in(batch)]
    norms = [cast("list[float]", each.double().square().sum(1).tolist()) for each in tensors if each.numel()]
    rows = ["/".join(map(repr, row)) for row in zip(*norms, strict=False)]  # a text for each sample
    firsts: list[list[str]] = collective.all_gather_object(rows, plain=True)
    if ranks := [rank for rank, own in enumerate(firsts) if own and firsts.count(own) > 1]:
        raise ValueError(
            f"The train_loader of ranks {ranks} begins with the same batch, so they train on the same samples. Have"
            " each rank read a part of its own, such as datasets.distributed.split_dataset_by_node(stream, rank,"
            " world_size), or pass a DataLoader over a map-style data set, which the trainer distributes. [J882]"
        )
    if collective.rank == 0 and len({*chain(*firsts)}) < sum(len({*own}) for own in firsts):
        warnings.warn(
            "The train_loaders of several ranks begin with some of the same samples. Have each rank read a part of its"
            " own, such as datasets.distributed.split_dataset_by_node(stream, rank, world_size).",
            stacklevel=2,
        )
    return chain(first, batches)


def sampler_of(loader: Any) -> UnevenDistributedSampler | None:
    """Return the sampler that :func:`distribute` made for a loader; ``None`` if it made none."""
    source: Any = _source_of(loader)
    return source if type(source) in (UnevenDistributedSampler, Shared) else None


def order_seed(loader: Any, seed: int | None) -> int:
    """Return the seed of the order in which a fit goes through ``loader``.

    It is drawn from the loader's ``generator``, if it has one. Otherwise it is ``seed``, or drawn from torch's
    generator. Nothing is drawn if the loader does not shuffle.
    """
    source: Any = _source_of(loader)
    generator = None if source is None else _generator_of(source) or loader.generator
    if generator is None and (seed is not None or source is None or type(source) is SequentialSampler):
        return seed or 0
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


def _source_of(loader: Any) -> Any:
    """Return the sampler whose elements are distributed: a batch sampler of the user, or the sampler of the indices.

    It is ``None`` for an ``IterableDataset``, and for an object that is not a ``DataLoader``.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    whole = cast("Any", loader)
    batches = whole.batch_sampler
    if batches is None:
        return whole.sampler
    return batches.sampler if type(batches) is BatchSampler else batches  # DataLoader itself makes no others


def _nested(sampler: Any) -> tuple[Any, Any]:
    """Return a sampler, and the sampler that it takes its indices from."""
    return sampler, getattr(sampler, "sampler", None)


def _distributes(sampler: Any) -> bool:
    """Return whether a sampler distributes its elements itself, as a ``DistributedSampler`` does."""
    return any(hasattr(each, "num_replicas") for each in _nested(sampler))


def _generator_of(sampler: Any) -> torch.Generator | None:
    generators = (getattr(each, "generator", None) for each in _nested(sampler))
    return next((generator for generator in generators if isinstance(generator, torch.Generator)), None)


def _is_default(sampler: Any, loader: Any) -> bool:
    """Return whether a sampler yields each index of the loader's data set once, in order or shuffled."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)
    return type(sampler) is SequentialSampler


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch on a loader's samplers that have ``set_epoch``."""
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(method := getattr(sampler, "set_epoch", None)):
            method(epoch)


@dataclass(frozen=True)
class Plan:
    """Summary of all ranks' data before an epoch.

    Attributes:
        lengths: The number of batches by rank; ``None`` for a rank whose number is unknown.
        equal_batches: Whether the batches of all ranks are known to have the same size at each step.
        batch_size: The largest known size of a batch. If batches are weighted, a batch of this size weighs 1, which
            keeps gradients at their usual size, and half precision can hold them.
    """

    lengths: tuple[int | None, ...]
    equal_batches: bool
    batch_size: int = 1

    @staticmethod
    def agree(collective: Collective, loader: Any) -> Plan:
        """Return the plan that all ranks agree on. One object all-gather; none with a single rank."""
        everyone: list[Any] = collective.all_gather_object((known_length(loader), sizes_of(loader)), plain=True)
        lengths, sizes = zip(*everyone, strict=True)
        equal = None not in sizes and all(size == sizes[0] for size in sizes)
        if equal and len(set(lengths)) > 1:
            full, last = sizes[0]
            equal = full == last  # otherwise one rank has its smaller last batch when another has a full one
        return Plan(lengths, equal or len(lengths) == 1, max((full for full, _ in filter(None, sizes)), default=1))

    @property
    def even(self) -> bool:
        """Whether all ranks are known to have the same number of batches."""
        return len(self.lengths) == 1 or (None not in self.lengths and len(set(self.lengths)) == 1)


def known_length(loader: Any) -> int | None:
    """Return the number of batches; ``None`` if it is unknown.

    The length of an ``IterableDataset`` is not used, since it may be wrong. Nor is the length of a subclass of
    ``DataLoader`` that overrides ``__iter__`` or ``__len__``, since it may count batches of other ranks.
    """
    if isinstance(loader, DataLoader):
        kind = cast("Any", loader).__class__
        plain = kind.__iter__ is DataLoader.__iter__ and kind.__len__ is DataLoader.__len__
        if not plain or isinstance(loader.dataset, IterableDataset):
            return None
    return length_of(cast("Any", loader))


def sizes_of(loader: Any) -> tuple[int, int] | None:
    """Return the sizes of a full and of the last batch; ``None`` if the loader's batches have no common size."""
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or not isinstance(loader, DataLoader) or known_length(loader) is None:
        return None
    rest = len(cast("Sized", batches.sampler)) % batches.batch_size
    return batches.batch_size, batches.batch_size if batches.drop_last or rest == 0 else rest


# -- outputs of a prediction ------------------------------------------------------------------------------------------

_PIECE = 32  # outputs


def gather_on_first(collective: Collective, outputs: list[Any]) -> list[list[Any]]:
    """Return the outputs of each rank on rank 0, and an empty list for each rank on the others.

    The other ranks send a few outputs at a time in turn, and free them. So memory holds little more than all outputs
    once. The last outputs are sent first, since freed memory at the end of the heap returns to the system. One
    broadcast of an object for each piece, and an empty one at the end of each rank.
    """
    gathered = [outputs if collective.rank == 0 else []]
    for source in range(1, collective.world_size):
        gathered.append([])
        is_source = collective.rank == source
        while piece := collective.broadcast_object(
            [outputs.pop() for _ in range(min(_PIECE, len(outputs)))] if is_source else None, source
        ):
            gathered[-1] += piece if collective.rank == 0 else ()
        gathered[-1].reverse()
    return gathered
