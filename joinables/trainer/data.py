"""Distribution of batches over ranks: :class:`UnevenDistributedSampler`, :func:`distribute`, and :class:`Plan`.

Samples are distributed in blocks of one batch: the first block to rank 0, the second to rank 1, and so on. So every
sample is seen once, the batches are those of a single process, and predictions can be put back into the order of the
data set. No sample is repeated or dropped to make ranks even: ``Join`` takes care of ranks that have fewer batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from typing_extensions import override

from join.collectives import Collective
from join.read_ahead import length_of
from joinables._torch.objects import with_parts


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

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the order of an epoch.

        Args:
            epoch: The number of the epoch.
            start: The number of its samples that all ranks have used before: the first ones in that order.

        Raises:
            ValueError: If ``start`` is negative, or larger than the data set.
        """
        if not 0 <= start <= (total := len(self.dataset)):
            raise ValueError(
                f"{start=} is not a number of samples of this data set. Pass a number from 0 to {total}. [J235]"
            )
        self.epoch, self.start = epoch, start

    def used(self, steps: int) -> int:
        """Return the number of the epoch's samples that all ranks together have used after ``steps`` batches each.

        Args:
            steps: The number of batches since ``start`` on rank 0, which has most. Other ranks may have had fewer.
        """
        return min(self.start + steps * self.num_replicas * self.block_size, len(self.dataset))

    @override
    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] = range(len(self.dataset))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = cast("list[int]", torch.randperm(len(self.dataset), generator=generator, device="cpu").tolist())
        block = self.block_size
        for first in range(self.start + self.rank * block, len(self.dataset), self.num_replicas * block):
            yield from order[first : first + block]

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.dataset) - self.start, self.num_replicas * self.block_size)
        return rounds * self.block_size + min(max(rest - self.rank * self.block_size, 0), self.block_size)


def distribute(loader: Any, rank: int, world_size: int, seed: int, *, shuffle: bool | None = None) -> Any:
    """Return the loader of one rank.

    A ``DataLoader`` without a sampler becomes a loader of the rank's part of the data set. Other loaders are returned
    as they are: a loader with a sampler of its own, a loader over an ``IterableDataset``, and an object that is not a
    ``DataLoader``. They distribute their data themselves, or every rank sees all of it. A loader of a subclass is
    copied with all its attributes; the passed loader does not change.

    Args:
        loader: The loader of the whole data set.
        rank: The rank.
        world_size: The number of ranks.
        seed: The seed of the order.
        shuffle: Whether the order changes with the epoch; by default as the loader does.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return cast("Any", loader)
    whole = cast("Any", loader)
    batches, order = whole.batch_sampler, getattr(whole.batch_sampler, "sampler", whole.sampler)
    is_default_order = type(order) is SequentialSampler or (
        type(order) is RandomSampler and not order.replacement and order.num_samples == len(whole.dataset)
    )
    if type(batches) not in (BatchSampler, type(None)) or not is_default_order:  # DataLoader itself makes no others
        return whole
    block_size = 1 if batches is None else batches.batch_size
    shuffles = type(order) is RandomSampler if shuffle is None else shuffle
    sampler = UnevenDistributedSampler(whole.dataset, world_size, rank, shuffles, seed, block_size)
    parts: dict[str, Any] = {"sampler": sampler}
    if batches is not None:
        parts["batch_sampler"] = BatchSampler(sampler, block_size, batches.drop_last)
    return with_parts(whole, **parts)


def sampler_of(loader: Any) -> UnevenDistributedSampler | None:
    """Return the sampler that :func:`distribute` made for a loader; ``None`` if it made none."""
    sampler = getattr(loader, "sampler", None)
    return sampler if type(sampler) is UnevenDistributedSampler else None


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
    def shortest(self) -> int | None:
        """Smallest number of batches; ``None`` if it is unknown."""
        return None if None in self.lengths else min(cast("tuple[int, ...]", self.lengths))

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
