"""Gathering the rows of all ranks in a step of ``Join.iterate``, but not those of dummies: :func:`gather_rows`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from join import Join
from join.collectives._torch_private import pytree
from join.transfer import gather_trees
from joinables.modules import replaced


def gather_rows(join: Join, data: Any, *, none: bool | None = None) -> Any:
    """The rows of ``data`` of all ranks with data in this step, in rank order; ranks may have different numbers.

    All ranks call it in the same step. Without it, what a dummy gives would count as a sample.

    Args:
        join: the block whose loop over ``iterate`` is under way.
        data: tensors in lists, tuples and dicts, ``[rows, ...]`` each, all but the rows alike on all ranks; a tensor
            without dimensions is a row.
        none: whether this rank has no rows; by default, whether it has a dummy in this step.

    Returns:
        The same, with the rows of all ranks.
    """
    has_none = join.shadowing if none is None else none

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor if tensor.dim() else tensor[None]
        return found[:0] if has_none else found

    mine: Any = pytree.tree_map_only(torch.Tensor, rows, data)
    ranks = [pytree.tree_leaves(each) for each in gather_trees(join.collective, mine)]
    leaves, spec = pytree.tree_flatten(data)
    found = [torch.cat(parts).to(leaf.device) for leaf, *parts in zip(leaves, *ranks, strict=True)]
    return pytree.tree_unflatten(found, spec)


def gather_objects(join: Join, data: list[Any], *, none: bool | None = None) -> list[Any]:
    """Gather a list of any objects that can be pickled: those of all ranks with data."""
    none = join.shadowing if none is None else none
    ranks: list[list[Any]] = join.collective.all_gather_object([] if none else list(data))
    return [each for rank in ranks for each in rank]


def gathering_rows(accelerator: Any, join: Join, has_none: Callable[[], bool]) -> AbstractContextManager[None]:
    """A context in which ``accelerator.gather_for_metrics`` is :func:`gather_rows`.

    Args:
        accelerator: what is asked to gather.
        join: the block whose loop over ``iterate`` is under way.
        has_none: whether this rank has no rows.
    """

    def gather(input_data: Any, use_gather_object: bool = False) -> Any:
        return (gather_objects if use_gather_object else gather_rows)(join, input_data, none=has_none())

    return replaced(accelerator, "gather_for_metrics", gather)
