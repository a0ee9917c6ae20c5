"""Data of one step of a loop, :class:`Step`, and the tensors in a batch: :func:`tensors_in`, :func:`map_tensors`.

:func:`emptied` makes an empty dummy batch of a batch.

Both functions find tensors in lists, tuples, dicts and the other containers that ``torch.utils._pytree`` knows, in
subclasses of these, in mappings and mutable sequences of any class and in dataclasses. Other objects stay as they are.
A container is never changed: :func:`map_tensors` builds another one, or raises an error.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from typing import Any, cast

import torch

from join.collectives._torch_private import pytree
from join.errors import described


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """Step of a loop over ``Join.iterate``. The defaults are the values outside a loop.

    Attributes:
        in_loop: Whether this rank is in the body of a loop, whose bursts all ranks run themselves.
        number: The number of the step, counted from 1; 0 while the loop begins.
        is_dummy: Whether this rank has a dummy batch, because it has no data in this step.
        is_empty: Whether this dummy batch has no samples.
        may_be_last: Whether this rank has data, and perhaps its last batch.
        contributors: The number of ranks that have data in this step. Outside a loop it is 0, and headers count the
            ranks that contribute to a burst.
        first_with_data: The lowest rank that has data in this step; if no rank has, in the last step with data.
        weight: The weight of this rank's batch; 0 for a dummy batch.
        of_all: The sum of the weights of all ranks' batches in this step.
        total: The sum of the weights of all ranks' batches, over all steps of the accumulation window of this step.
        window: The number of this accumulation window, which no other window of this process has.
        ends_window: Whether this step is the last one of its accumulation window.
        losses: The number of losses that were scaled in this step.
        usual: The largest number of losses that were scaled in an earlier step.
        skipped: The number of earlier steps of its accumulation window in which no loss was scaled.
    """

    in_loop: bool = False
    number: int = 0
    is_dummy: bool = False
    is_empty: bool = False
    may_be_last: bool = False
    contributors: int = 0
    first_with_data: int = 0
    weight: float = 1.0
    of_all: float = 0
    total: float = 1.0
    window: int = 0
    ends_window: bool = True
    losses: int = 0
    usual: int = 1
    skipped: int = 0


PLAIN = Step()
"""Step outside the bodies of loops."""


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
    """Return a copy of ``batch`` in which ``function(tensor)`` replaces each tensor.

    Raises:
        TypeError: If a container cannot be built with new tensors.
    """

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        items = _items(leaf)
        mapped = {id(value): map_tensors(function, value) for _, value in items}
        return _rebuilt(leaf, items, mapped) if items else leaf

    return pytree.tree_map(map_leaf, batch)


def samples_in(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first tensor that has one; 1 without such a tensor."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim() > 0), 1)


def has_empty_tensor(batch: Any) -> bool:
    """Return whether a batch has a tensor of length 0, as an empty dummy batch has."""
    return 0 in map(len, filter(torch.Tensor.dim, tensors_in(batch)))


def emptied(batch: Any) -> Any:
    """Return a copy of ``batch`` without samples: tensors with dimensions have length 0 along the first one.

    Other objects in the batch stay as they are. The copy holds no memory of the tensors.
    """
    return map_tensors(without_rows, batch)


def without_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty copy of a batch's tensor."""
    rows = tensor[:0] if tensor.dim() else tensor  # a mere slice would keep the storage of the tensor
    return rows.detach().clone().requires_grad_(tensor.requires_grad)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a batch's tensor, because a loop body may change it; without its autograd graph and storage."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _items(leaf: Any) -> list[tuple[Any, Any]]:
    """Return the items, or fields, of a container that pytree takes for a leaf; an empty list for other objects."""
    if isinstance(leaf, (tuple, MutableSequence)) and not isinstance(leaf, bytearray):
        return list(enumerate(cast("Iterable[Any]", leaf)))
    if isinstance(leaf, Mapping):
        return list(cast("Mapping[Any, Any]", leaf).items())
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        # A field with init=False may have no value.
        return [(each.name, getattr(leaf, each.name)) for each in dataclasses.fields(leaf) if hasattr(leaf, each.name)]
    return []


def _rebuilt(container: Any, items: list[tuple[Any, Any]], mapped: dict[int, Any]) -> Any:
    """Return a new container of the same class, with a new value for each of the items, by the ``id`` of the old one.

    A copy shares the attributes of the container, and one of these may hold the items, so an assignment to an item of
    the copy could write into the container. A deep copy replaces the values wherever they are.
    """
    attributes: dict[str, Any] = getattr(container, "__dict__", {})
    changed = [(key, mapped[id(value)]) for key, value in items]
    # The deep copy shares other objects in attributes, such as a data set.
    shared = {id(part): part for part in attributes.values() if not isinstance(part, (list, tuple, set, Mapping))}
    problem = "its attributes do not hold its items"
    try:
        try:
            built = copy.deepcopy(container, shared | mapped)
        except (KeyError, TypeError):  # of a mapping that looks for __deepcopy__ among its items, or has none
            built = container.__class__(dict(changed))
        if attributes is container:  # a dict whose items are its attributes, too
            built.__dict__ = built
        if all(now is wanted for (_, now), (_, wanted) in zip(_items(built), changed, strict=True)):
            return built
    except Exception as error:
        problem = described(error)
    raise TypeError(
        f"An object of type {type(container).__name__} in a batch cannot be built again with new tensors ({problem})."
        " Put tensors into lists, tuples, dicts or dataclasses, or pass join.iterate(..., dummy=function) with a"
        " function that makes a dummy batch. [J555]"
    )
