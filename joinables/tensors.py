"""Finding tensors in nested containers, and copying gradients from one rank to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

import torch

from join.batch import tensors_in
from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.transfer import broadcast_tree


def tensors_with_grad(tree: Any) -> list[torch.Tensor]:
    """All tensors that require grad in nested containers, mappings and dataclasses."""
    if isinstance(tree, torch.Tensor):  # by far the most often; flattening costs ten times as much
        return [tree] if tree.requires_grad else []
    return [tensor for tensor in tensors_in(tree) if tensor.requires_grad]


def hides_tensors(tree: Any) -> bool:
    """Whether the containers hold an object of unknown class, which may hold tensors."""
    plain = (torch.Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    leaves = pytree.tree_leaves(tree)
    return any(not (leaf is None or isinstance(leaf, plain) or is_dataclass(leaf)) for leaf in leaves)


def adopt_gradients(
    collective: Collective,
    parameters: Sequence[torch.nn.Parameter],
    source: int,
    *,
    accumulated: bool,
    also: Any,
) -> Any:
    """Copy the gradients of rank ``source`` to the other ranks: one broadcast.

    Args:
        collective: the group.
        parameters: the same on all ranks.
        source: a last joiner.
        accumulated: whether this rank's gradients are its own, still to be reduced; then they are left alone. As
            ``source``, it only tells which parameters have one.
        also: what else there is to tell of the gradients.

    Returns:
        ``source``'s ``also``.
    """
    gradients = [parameter.grad for parameter in parameters]
    mine = [gradient is not None for gradient in gradients], [] if accumulated else gradients, also
    present, values, also = broadcast_tree(collective, mine, source)
    if collective.rank == source or accumulated:
        return also
    for index, parameter in enumerate(parameters):
        if not present[index]:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if values:
            parameter.grad.copy_(values[index])  # in place: it may be a view of a bucket
        else:
            parameter.grad.zero_()
    return also
