"""Finding and exchanging tensors in what a module takes and returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_with_grad(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors that require grad in nested containers and dataclasses."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from tensors_with_grad(getattr(leaf, field.name))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Copy ``tree`` with every tensor that requires grad replaced by ``change`` of it."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf) if leaf.requires_grad else leaf
        if is_dataclass(leaf) and not isinstance(leaf, type) and any(True for _ in tensors_with_grad(leaf)):
            changed = copy.copy(leaf)
            for field in fields(leaf):
                object.__setattr__(changed, field.name, map_tensors(change, getattr(leaf, field.name)))
            return changed
        return leaf

    return pytree.tree_map(visit, tree)
