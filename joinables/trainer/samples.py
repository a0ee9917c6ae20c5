"""Numbers of samples in batches: :class:`SampleCounter`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

from join.batch import samples_in, tensors_in
from join.collectives._torch_private import pytree
from join.read_ahead import length_of
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
        if self._counts and (own := type(self._module).batch_size(self._module, batch)) is not None:
            return int(own)
        samples, expected = samples_in(batch), self._rest if index == self._last else self._full
        if samples == expected:
            return samples
        lengths = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
        if not lengths:
            return self._ask(batch) if expected is None else expected
        if expected in lengths:
            return expected or 0
        if expected is not None or len(lengths) > 1:
            warnings.warn(
                "The tensors of a batch have different lengths, or another length than the number of its samples in the"
                " data set. The trainer counts the rows of the first tensor as samples, and means are over samples."
                f" Define batch_size(self, batch) in {type(self._module).__name__}, which returns the number of"
                " samples.",
                stacklevel=2,
            )
        return samples

    def _ask(self, batch: Any) -> int:
        """Return the number of samples that an object without tensors says it has; 1 for numbers and texts."""
        leaves, plain = pytree.tree_leaves(batch, is_leaf=is_movable), (torch.Tensor, Number, str, bytes, type(None))
        objects = [leaf for leaf in leaves if not isinstance(leaf, plain)]
        counts = (getattr(each, "num_graphs", None) or length_of(each) for each in objects)
        if (count := next((count for count in counts if count is not None), None)) is None and objects:
            raise TypeError(
                f"A batch has an object of type {type(objects[0]).__name__}, which has no length, so the trainer cannot"
                f" count its samples. Define batch_size(self, batch) in {type(self._module).__name__}, which returns"
                " the number. [J644]"
            )
        return 1 if count is None else count


def is_movable(part: Any) -> bool:
    """Return whether a part of a batch is an object that ``to(device)`` moves, and not a tensor or a mapping."""
    return callable(getattr(part, "to", None)) and not isinstance(part, (torch.Tensor, Mapping))
