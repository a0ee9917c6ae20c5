"""Numbers of samples in batches: :class:`SampleCounter`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from join.batch import tensors_in
from joinables.trainer.data import known_length, sizes_of
from joinables.trainer.module import TrainModule


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


def is_movable(part: Any) -> bool:
    """Return whether a part of a batch is an object that ``to(device)`` moves, and not a tensor or a mapping."""
    return callable(getattr(part, "to", None)) and not isinstance(part, (torch.Tensor, Mapping))
