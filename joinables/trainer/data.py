"""Distribution of batches over ranks: :class:`UnevenDistributedSampler`, :func:`distribute`, and :class:`Plan`.

Samples are distributed in blocks of one batch: the first block to rank 0, the second to rank 1, and so on. So every
sample is seen once, the batches are those of a single process, and predictions can be put back into the order of the
data set. No sample is repeated or dropped to make ranks even: ``Join`` takes care of ranks that have fewer batches.
"""

from __future__ import annotations

import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
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
from joinables.trainer.metrics import MetricStore
from joinables.trainer.module import TrainModule


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


def compare_first(
    collective: Collective, loader: Any, batches: Iterator[tuple[int, Any, bool]]
) -> Iterator[tuple[int, Any, bool]]:
    """Return this rank's batches of a loader, after a comparison of the ranks' first batches; called on all ranks.

    They are not compared if the loader is known to be distributed. Ranks that begin with some of the same samples may
    read the same stream in different orders, which is a warning.

    Raises:
        ValueError: On all ranks, if two ranks begin with the same batch, since they then train on the same samples.
    """
    source: Any = _source_of(loader)
    if collective.world_size == 1 or sampler_of(loader) is not None or (source is not None and _distributes(source)):
        return batches
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


# -- samples in batches ----------------------------------------------------------------------------------------------


def counts_samples(module: TrainModule) -> bool:
    """Return whether a module counts the samples of its batches itself; an attribute ``batch_size`` does not count."""
    return callable(method := type(module).batch_size) and method is not TrainModule.batch_size


class SampleCounter:
    """Counter of the samples in the batches of one epoch or evaluation.

    A sample is an element of the data set, so a ``DataLoader`` knows how many are in a batch. If no tensor of the batch
    has this length, a function of the user may have dropped or joined samples. The rows of the first tensor count then.

    Args:
        module: The module, which may count itself.
        loader: This rank's batches.
    """

    def __init__(self, module: TrainModule, loader: Any) -> None:
        self._module, self._counts = module, counts_samples(module)
        self._full, self._rest = sizes_of(loader) or (None, None)
        self._last = (known_length(loader) or 0) - 1

    def __call__(self, batch: Any, index: int) -> int:
        """Return the number of samples in the batch with this index."""
        kind = type(self._module)
        if self._counts and (own := kind.batch_size(self._module, batch)) is not None:
            return int(own)
        expected = self._rest if index == self._last else self._full
        lengths = [len(tensor) for tensor in tensors_in(batch) if tensor.dim()]
        if expected is not None and (expected in lengths or not lengths):
            return expected
        if not lengths:
            raise TypeError(
                "A batch has no tensor with rows, so the trainer cannot count its samples. Define"
                f" batch_size(self, batch) in {kind.__name__}, which returns the number. [J644]"
            )
        if expected is not None or len(set(lengths)) > 1:
            warnings.warn(
                "The tensors of a batch have different lengths, or another length than the number of its samples in the"
                " data set. The trainer counts the rows of the first tensor as samples, and means are over samples."
                f" Define batch_size(self, batch) in {kind.__name__}, which returns the number of samples.",
                stacklevel=2,
            )
        return lengths[0]


class Position:
    """Position of a rank in an epoch, and the rank's part of a snapshot.

    Args:
        metrics: The store of the epoch's metrics, which stays the same while a validation records into another store.
        epoch: The current epoch, from 0.

    Attributes:
        epoch: The current epoch, from 0.
        batches_trained: The number of the epoch's batches that this rank has trained on; 0 between epochs.
        sampler: The sampler that distributes the training samples, if the trainer made one.
        resume_from: This rank's part of the snapshot that the fit resumes from, until the first batches are read.
    """

    def __init__(self, metrics: MetricStore, epoch: int) -> None:
        self._metrics, self.epoch, self.batches_trained = metrics, epoch, 0
        self.sampler: UnevenDistributedSampler | None = None
        self.resume_from: dict[str, Any] | None = None
        self._random_at_start: dict[str, Any] | None = None
        """The random state before the epoch's first batch was read; ``None`` between epochs."""
        self._random_before_read: dict[str, Any] | None = None
        """The random state before the next batch was read."""
        self._random_to_resume: dict[str, Any] | None = None
        """The random state for a snapshot taken now; ``None`` for the present state.

        It is an older state if a fit that resumes from there repeats some work. This is so after ``redo_from_here``,
        and in a step, since the next batch was read before the step.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a snapshot taken now."""
        return self.resume_from or {
            "batches": self.batches_trained,
            "seed": None if self.sampler is None else self.sampler.seed,
            "start": None if self.sampler is None else self.sampler.start,
            "used": None if self.sampler is None else self.sampler.used(self.batches_trained),
            "metrics": self._metrics.state_dict(),
            "random_at_start": self._random_at_start,
            "random_before_read": self._random_before_read,
            "random": self._random_to_resume or rng.capture(),
        }

    def load_state_dict(self, part: dict[str, Any]) -> None:
        """Have the fit resume from this rank's part of a snapshot."""
        self.resume_from = part
        if part["random_at_start"] is None:  # within an epoch, the generators are restored as batches are read again
            rng.restore(part["random"])

    def begin_epoch(self, epoch: int, loader: Any) -> None:
        """Have ``loader`` yield an epoch, or the remainder of the epoch in which the fit resumes."""
        self.epoch = epoch
        self.redo_from_here()
        set_epoch(loader, epoch)
        if self.sampler is not None and self.resume_from is not None:
            self.sampler.set_epoch(epoch, self.resume_from["start"] or 0)

    def redo_from_here(self) -> None:
        """Have a fit that resumes repeat the work that follows: hooks before an epoch's batches, or a validation.

        Snapshots contain the random state of this moment until batches are read or the epoch ends.
        """
        self._random_to_resume = rng.capture()

    def batches(
        self, loader: Any, voting: Callable[[Iterator[Any]], Iterator[Any]] | None
    ) -> Iterator[tuple[int, Any, bool]]:
        """Yield the batches of an epoch, from the position in which the fit resumes.

        Each batch comes with its index and whether it is the last. The next batch is read before the current one is
        used, since nothing else shows which batch is the last.

        Args:
            loader: This rank's batches.
            voting: If ranks must have the same number of batches and do not know it, a function of the batches. It
                yields them until a rank has no more.
        """
        part, self.resume_from = self.resume_from, None
        resumed = part if part is not None and part["random_at_start"] is not None else None
        self.batches_trained = 0 if resumed is None else resumed["batches"]
        if resumed is not None:
            rng.restore(resumed["random_at_start"])
            self._metrics.clear()
            self._metrics.merge(resumed["metrics"])
        self._random_at_start, self._random_to_resume = rng.capture(), None
        skipped = 0
        if self.sampler is not None:
            self.sampler.skip = skipped = self.batches_trained
        numbered: Iterator[tuple[int, Any]] = enumerate(rng.iterate(loader), skipped)
        for _ in range(self.batches_trained - skipped):
            next(numbered, None)
        if resumed is not None:
            # The next batch was read before the last step drew random numbers.
            rng.restore(resumed["random_before_read"])
        if voting is not None:
            numbered = voting(numbered)
        self._random_before_read = rng.capture()
        following = next(numbered, None)
        if resumed is not None:
            rng.restore(resumed["random"])
        while following is not None:
            index, batch = following
            self._random_to_resume = rng.capture()
            following = next(numbered, None)
            yield index, batch, following is None

    def advance(self) -> None:
        """Count a batch as trained on: a fit that resumes from here starts with the next."""
        self.batches_trained += 1
        self._random_before_read, self._random_to_resume = self._random_to_resume, None

    def end_epoch(self) -> None:
        """Forget the epoch after its validation: a fit that resumes from here starts with the next epoch."""
        self.batches_trained = 0
        self._random_at_start = self._random_before_read = self._random_to_resume = None
        self._metrics.clear()


# -- outputs of a prediction ------------------------------------------------------------------------------------------

_PIECE = 4 * 2**20  # bytes


def gather_on_first(collective: Collective, outputs: list[Any]) -> list[list[Any]]:
    """Return the outputs of each rank on rank 0, and an empty list for each rank on the others.

    The other ranks send pieces of about 4 MiB in turn, and free each piece before the next. So memory holds little
    more than all outputs once. The last outputs are sent first, since freed memory at the end of the heap returns to
    the system. One broadcast of an object for each piece, and an empty one at the end of each rank.
    """
    gathered = [outputs if collective.rank == 0 else []]
    most = max(1, _PIECE // len(pickle.dumps(outputs[-1]))) if outputs else 1
    for source in range(1, collective.world_size):
        gathered.append([])
        is_source = collective.rank == source
        while piece := collective.broadcast_object(
            [outputs.pop() for _ in range(min(most, len(outputs)))] if is_source else None, source
        ):
            gathered[-1] += piece if collective.rank == 0 else ()
        gathered[-1].reverse()
    return gathered
