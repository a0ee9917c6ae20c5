"""Batches without samples: :func:`emptied`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree


def emptied(tree: Any) -> Any:
    """Return ``tree`` with every tensor replaced by one of no rows, which holds no memory of the old one.

    Args:
        tree: nested containers and dataclasses; tensors of shape ``[n, ...]`` become ``[0, ...]`` of the same dtype and
            device, and require grad if they did. Scalars and what is no tensor stay as they are.
    """
    return pytree.tree_map(_empty_leaf, tree)


def _empty_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.dim() == 0:
            return leaf.detach()
        return leaf.detach().new_empty((0, *leaf.shape[1:])).requires_grad_(leaf.requires_grad)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        values = {field.name: emptied(getattr(leaf, field.name)) for field in fields(leaf) if field.init}
        return replace(leaf, **values)
    return leaf
