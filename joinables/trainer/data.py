"""Which rank gets which batch: :class:`UnevenDistributedSampler`, :func:`distribute`, and :class:`Plan`.

Samples are dealt out in blocks of one batch: the first to rank 0, the second to rank 1, and so on. So every sample is
seen once, the batches are those that one process would make, and predictions can be put back into the order of the data
set. Nothing is repeated or dropped to make ranks even: ``Join`` takes care of ranks that have fewer batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from typing_extensions import override

from join.collectives import Collective
from join.loop import length_of
from joinables._torch.objects import with_parts


class UnevenDistributedSampler(Sampler[int]):
    """Deals out a data set to the ranks, every sample once, without padding and without dropping.

    Also what is left of an epoch: ``used`` says how many samples all ranks have used together, for a checkpoint, and
    ``set_epoch(epoch, start)`` deals out the others, to as many ranks as there are then.

    Args:
        dataset: the data set; only its length is used.
        num_replicas: the number of ranks; by default, that of the default process group.
        rank: this rank; by default, that in the default process group.
        shuffle: whether the order changes with the epoch.
        seed: of the order, together with the epoch; the same on all ranks.
        block_size: how many samples in a row go to one rank; with the batch size, batches are as in one process.

    Raises:
        ValueError: if ``rank`` is none of the ranks, or ``block_size`` is not positive.
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
            raise ValueError(f"{self.rank=} must be below {self.num_replicas=}, {block_size=} at least 1 [J233]")
        self.total = len(dataset)
        self.shuffle, self.seed, self.block_size = shuffle, seed, block_size
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the order of another epoch.

        Args:
            epoch: its number.
            start: how many samples of it all ranks have used before, which are the first ones in that order.

        Raises:
            ValueError: if there are not as many.
        """
        if not 0 <= start <= self.total:
            raise ValueError(f"start={start} must be from 0 to the {self.total} samples of the data set [J235]")
        self.epoch, self.start = epoch, start

    def used(self, steps: int) -> int:
        """How many samples of the epoch all ranks have used together, each of them for ``steps`` batches if it has any.

        Args:
            steps: of the rank with most batches since ``start``: rank 0.
        """
        return min(self.start + steps * self.num_replicas * self.block_size, self.total)

    @override
    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] = range(self.total)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = cast("list[int]", torch.randperm(self.total, generator=generator, device="cpu").tolist())
        block = self.block_size
        for first in range(self.start + self.rank * block, self.total, self.num_replicas * block):
            yield from order[first : first + block]

    def __len__(self) -> int:
        rounds, rest = divmod(self.total - self.start, self.num_replicas * self.block_size)
        return rounds * self.block_size + min(max(rest - self.rank * self.block_size, 0), self.block_size)


def distribute(loader: Any, rank: int, world_size: int, seed: int, *, shuffle: bool | None = None) -> Any:
    """Return the loader of one rank: over its part of the data set, if it is a ``DataLoader`` without a sampler.

    A loader with a sampler of its own, one over an ``IterableDataset``, and what is no ``DataLoader`` are returned as
    they are: they deal out their data themselves, or every rank sees all of it. A loader of a subclass is copied with
    all its attributes; the loader given is not changed. The order changes with the epoch where ``shuffle`` says so, or,
    by default, the loader.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return cast("Any", loader)
    given = cast("Any", loader)
    batches, order = given.batch_sampler, getattr(given.batch_sampler, "sampler", given.sampler)
    is_torch_s = type(order) is SequentialSampler or (
        type(order) is RandomSampler and not order.replacement and order.num_samples == len(given.dataset)
    )
    if type(batches) not in (BatchSampler, type(None)) or not is_torch_s:  # not those that DataLoader itself makes
        return given
    block_size = 1 if batches is None else batches.batch_size
    shuffles = type(order) is RandomSampler if shuffle is None else shuffle
    sampler = UnevenDistributedSampler(given.dataset, world_size, rank, shuffles, seed, block_size)
    parts: dict[str, Any] = {"sampler": sampler}
    if batches is not None:
        parts["batch_sampler"] = BatchSampler(sampler, block_size, batches.drop_last)
    return with_parts(given, **parts)


def sampler_of(loader: Any) -> UnevenDistributedSampler | None:
    """The sampler that :func:`distribute` has given a loader; ``None`` if it has given it none."""
    sampler = getattr(loader, "sampler", None)
    return sampler if type(sampler) is UnevenDistributedSampler else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to a loader's sampler, if that has ``set_epoch``."""
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(method := getattr(sampler, "set_epoch", None)):
            method(epoch)


@dataclass(frozen=True)
class Plan:
    """What the ranks know of each other's data before an epoch.

    Attributes:
        lengths: the number of batches by rank; ``None`` where it is unknown.
        equal_batches: whether it is known that at each step all ranks' batches have the same size.
        batch_size: the largest size of a batch that is known. Where batches are weighed, one of this size weighs 1, so
            that gradients have the usual size, and half precision can hold them.
    """

    lengths: tuple[int | None, ...]
    equal_batches: bool
    batch_size: int = 1

    @staticmethod
    def agree(collective: Collective, loader: Any) -> Plan:
        """Compare the loaders of all ranks: one object all-gather, none where there is one rank."""
        everyone: list[Any] = collective.all_gather_object((known_length(loader), _sizes(loader)))
        lengths, sizes = zip(*everyone, strict=True)
        equal = None not in sizes and len(set(sizes)) == 1
        if equal and len(set(lengths)) > 1:
            full, last = sizes[0]
            equal = full == last  # else one rank has its smaller last batch when another has a full one
        return Plan(lengths, equal or len(lengths) == 1, max((full for full, _ in filter(None, sizes)), default=1))

    @property
    def shortest(self) -> int | None:
        """The smallest number of batches; ``None`` if it is unknown."""
        return None if None in self.lengths else min(cast("tuple[int, ...]", self.lengths))

    @property
    def even(self) -> bool:
        """Whether it is known that all ranks have the same number of batches."""
        return len(self.lengths) == 1 or (None not in self.lengths and len(set(self.lengths)) == 1)


def known_length(loader: Any) -> int | None:
    """The number of batches; ``None`` if it is unknown.

    The length of an ``IterableDataset`` is not believed. Nor is that of a subclass of ``DataLoader`` that iterates or
    counts in its own way: it may count batches of other ranks.
    """
    if isinstance(loader, DataLoader):
        kind = cast("Any", loader).__class__
        plain = kind.__iter__ is DataLoader.__iter__ and kind.__len__ is DataLoader.__len__
        if not plain or isinstance(loader.dataset, IterableDataset):
            return None
    return length_of(cast("Any", loader))


def _sizes(loader: Any) -> tuple[int, int] | None:
    """The number of samples in a full and in the last batch, of a loader whose batches have one size; else ``None``."""
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or not isinstance(loader, DataLoader) or known_length(loader) is None:
        return None
    rest = len(cast("Sized", batches.sampler)) % batches.batch_size
    return batches.batch_size, batches.batch_size if batches.drop_last or rest == 0 else rest
