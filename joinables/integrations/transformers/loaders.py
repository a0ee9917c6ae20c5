"""Loaders of ranks that read streams of their own: :func:`own_streams`, and how long an epoch is then.

Transformers has Accelerate prepare its loaders, which spreads one stream over all ranks. Here each rank has its own,
and its loader is prepared as that of one process is: batches go to the device, and that is all.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import IterableDataset

from join.collectives import collective_of
from join.lockstep.read_ahead import length_of
from joinables.modules import replaced


def is_stream(loader: Any) -> bool:
    """Whether a loader, or what it is made of, is of an ``IterableDataset``."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def own_streams(accelerator: Any) -> AbstractContextManager[None]:
    """A context in which ``accelerator`` prepares loaders of streams without spreading them over the ranks."""
    module: Any = importlib.import_module("accelerate.data_loader")
    spread = accelerator.prepare_data_loader

    def prepare(loader: Any, **placement: Any) -> Any:
        if accelerator.num_processes == 1 or not is_stream(loader):
            return spread(loader, **placement)
        loader = module.prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=accelerator.device_placement,
            dispatch_batches=False,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(loader)
        return loader

    return replaced(accelerator, "prepare_data_loader", prepare)


def repeat_nothing(loader: Any) -> None:
    """Let the ranks' shares of a map-style data set be uneven, instead of repeating samples until they are even."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    if hasattr(sampler, "even_batches"):
        sampler.even_batches = False


def length_on_all_ranks(loader: Any) -> int | None:
    """The number of batches of the rank with most; ``None`` if loaders have no length. All ranks ask.

    Raises:
        ValueError: on all ranks, if some loaders have a length and others do not.
    """
    lengths: list[int | None] = collective_of(None).all_gather_object(length_of(loader))
    known = [length for length in lengths if length is not None]
    if known and len(known) < len(lengths):
        without = [rank for rank, length in enumerate(lengths) if length is None]
        raise ValueError(
            f"the train_dataset of ranks {without} has no length, and that of others has; give all of them a __len__,"
            " or none [J132]"
        )
    return max(known) if known else None


class LoaderOfLength:
    """A loader as long as the longest one of all ranks, from which a Trainer computes how long an epoch is.

    Args:
        loader: this rank's.
        length: how many batches that one has.
    """

    def __init__(self, loader: Any, length: int) -> None:
        self.dataset, self._length = loader.dataset, length

    def __len__(self) -> int:
        return self._length
