"""Finding the tensors in what a module returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_with_grad(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors that require grad in nested containers and dataclasses."""
    if isinstance(tree, torch.Tensor):  # by far the most often; flattening costs ten times as much
        if tree.requires_grad:
            yield tree
        return
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from tensors_with_grad(getattr(leaf, field.name))
