"""What a rank has in a step, :class:`Step`, and the tensors in a batch: :func:`tensors_in`, :func:`map_tensors`.

Held are tensors in lists, tuples, dicts and what else ``torch.utils._pytree`` knows, in subclasses of these, in
mappings of any class and in dataclasses. Other objects stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum, auto
from typing import Any, cast

import torch

from join.collectives._torch_private import pytree


class StepBatch(Enum):
    """What this rank has in a step of a loop over ``Join.iterate``."""

    DATA = auto()
    """A batch of its own, or there is no such loop."""
    LAST = auto()
    """A batch of its own, perhaps its last one."""
    EMPTY = auto()
    """A dummy without samples."""
    DUMMY = auto()
    """A dummy with samples."""


@dataclasses.dataclass(slots=True)
class Step:
    """A step of a loop over ``Join.iterate``; as it is here, outside a loop.

    Attributes:
        number: how many steps of the loop this rank has begun.
        batch: what this rank has in this one.
        shadowing: whether that is a dummy.
        contributors: how many ranks have data in it; ``None`` outside a loop, where headers count those that contribute
            to a burst.
        first_with_data: the lowest of them.
        has_data: whether this rank is one of them.
        weight: what this rank's batch weighs; 0 for a dummy.
        total: what the batches of all ranks weigh together, in all steps of the window that this one is in.
        ends_window: whether no other step of that window follows.
    """

    number: int = 0
    batch: StepBatch = StepBatch.DATA
    shadowing: bool = False
    contributors: int | None = None
    first_with_data: int = 0
    has_data: bool = True
    weight: float = 1.0
    total: float = 1.0
    ends_window: bool = True


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors, in order."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        else:
            for _, value in _items(leaf):
                yield from tensors_in(value)


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """The batch, with the results of ``function`` in the place of its tensors; the one given is not changed."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        items = [(key, map_tensors(function, value)) for key, value in _items(leaf)]
        return _replaced(leaf, items) if items else leaf

    return pytree.tree_map(of, batch)


def samples_in(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor that has one; 1 without any."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0), 1)


def has_empty_tensor(batch: Any) -> bool:
    """Whether a batch has a tensor without rows, as an empty dummy does."""
    return any(tensor.dim() and not len(tensor) for tensor in tensors_in(batch))


def _items(leaf: Any) -> list[tuple[Any, Any]]:
    """Keys or names, and values, of a container that pytree takes for a leaf; none for anything else."""
    if isinstance(leaf, (list, tuple)):
        return list(enumerate(cast("Sequence[Any]", leaf)))
    if isinstance(leaf, Mapping):
        return list(cast("Mapping[Any, Any]", leaf).items())
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return [(field.name, getattr(leaf, field.name)) for field in dataclasses.fields(leaf)]
    return []


def _replaced(leaf: Any, items: list[tuple[Any, Any]]) -> Any:
    """A copy with other items."""
    if isinstance(leaf, tuple):
        try:
            return type(cast("tuple[Any, ...]", leaf))([value for _, value in items])
        except TypeError:  # it is made of something else
            return cast("Any", leaf)
    if isinstance(leaf, Mapping) and not isinstance(leaf, MutableMapping):
        return dict(items)
    changed: Any = copy.copy(cast("Any", leaf))
    has_keys = isinstance(leaf, (list, Mapping))
    for key, value in items:
        if has_keys:
            changed[key] = value
        else:
            object.__setattr__(changed, key, value)  # frozen ones too
    return changed
