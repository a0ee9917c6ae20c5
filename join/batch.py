"""Data of one step of a loop, :class:`Step`, and the tensors in a batch: :func:`tensors_in`, :func:`map_tensors`.

Both functions find tensors in lists, tuples, dicts and the other containers that ``torch.utils._pytree`` knows, in
subclasses of these, in mappings of any class and in dataclasses. Other objects stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from enum import Enum, auto
from typing import Any, cast

import torch

from join.collectives._torch_private import pytree


class StepBatch(Enum):
    """Kind of batch that this rank has in a step of a loop over ``Join.iterate``."""

    DATA = auto()
    """A batch of its own. This is the value outside such loops, too."""
    LAST = auto()
    """A batch of its own, perhaps its last one."""
    EMPTY = auto()
    """A dummy without samples."""
    DUMMY = auto()
    """A dummy with samples."""


@dataclasses.dataclass(slots=True)
class Step:
    """Step of a loop over ``Join.iterate``. The defaults are the values outside a loop.

    Attributes:
        number: The number of steps of the loop that this rank has begun.
        batch: The kind of batch that this rank has in this step.
        shadowing: Whether that is a dummy batch, because this rank has no data in this step.
        contributors: The number of ranks that have data in this step. Outside a loop it is 0, and headers count the
            ranks that contribute to a burst.
        first_with_data: The lowest rank that has data in this step.
        weight: The weight of this rank's batch; 0 for a dummy batch.
        total: The sum of the weights of all ranks' batches, over all steps of the accumulation window of this step.
        ends_window: Whether this step is the last one of its accumulation window.
    """

    number: int = 0
    batch: StepBatch = StepBatch.DATA
    shadowing: bool = False
    contributors: int = 0
    first_with_data: int = 0
    weight: float = 1.0
    total: float = 1.0
    ends_window: bool = True


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Return the tensors in a batch, in order."""
    tensors: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        else:
            for _, value in _items(leaf):
                tensors += tensors_in(value)
    return tensors


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """Return a copy of ``batch`` in which ``function(tensor)`` replaces each tensor."""

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        items = [(key, map_tensors(function, value)) for key, value in _items(leaf)]
        return _replaced(leaf, items) if items else leaf

    return pytree.tree_map(map_leaf, batch)


def samples_in(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first tensor that has one; 1 without such a tensor."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0), 1)


def has_empty_tensor(batch: Any) -> bool:
    """Return whether a batch has a tensor of length 0, as an empty dummy batch has."""
    return 0 in map(len, filter(torch.Tensor.dim, tensors_in(batch)))


def _items(leaf: Any) -> list[tuple[Any, Any]]:
    """Return the items, or fields, of a container that pytree takes for a leaf; an empty list for other objects."""
    if isinstance(leaf, (list, tuple)):
        return list(enumerate(cast("Sequence[Any]", leaf)))
    if isinstance(leaf, Mapping):
        return list(cast("Mapping[Any, Any]", leaf).items())
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return [(field.name, getattr(leaf, field.name)) for field in dataclasses.fields(leaf)]
    return []


def _replaced(leaf: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a copy of ``leaf`` with these items."""
    if isinstance(leaf, tuple):
        try:
            return type(cast("tuple[Any, ...]", leaf))([value for _, value in items])
        except TypeError:  # its constructor takes other arguments
            return cast("Any", leaf)
    if isinstance(leaf, Mapping) and not isinstance(leaf, MutableMapping):
        return dict(items)
    changed: Any = copy.copy(cast("Any", leaf))
    has_keys = isinstance(leaf, (list, Mapping))
    for key, value in items:
        if has_keys:
            changed[key] = value
        else:
            object.__setattr__(changed, key, value)  # because a dataclass may be frozen
    return changed
