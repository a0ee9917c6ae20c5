"""Mean of a value over the ranks with data, in a step of a loop: :func:`mean_over_ranks`, behind ``Join.mean``.

All ranks, with data or on a dummy batch, do the same::

    all-reduce of [weight * value, ..., weight]; both are 0 on a dummy batch
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from join.arguments import checked_weight
from join.collectives import Collective
from join.collectives._torch_private import pytree


@torch.no_grad()
def mean_over_ranks(collective: Collective, value: Any, weight: Any) -> Any:
    """Return the weighted mean over ranks of a number, of a tensor, or of each value of a dict.

    Tensors on an accelerator are reduced there, and the host does not wait for them.

    Args:
        collective: The ranks.
        value: The value of this rank. If its weight is 0, it is ignored, even if it is NaN.
        weight: The weight of this rank: a number, or a tensor with one element.

    Raises:
        TypeError: If the value or the weight is something else.
        ValueError: If the weight is negative or not finite.
    """
    values, structure = pytree.tree_flatten(value)
    tensors = [each for each in (*values, weight) if isinstance(each, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))
    dtype = torch.float64 if device.type == "cpu" else torch.float32

    def flat(each: Any) -> torch.Tensor:
        if isinstance(each, torch.Tensor):
            return each.to(device, dtype, non_blocking=True).reshape(-1)
        if isinstance(each, Real):
            return torch.full((1,), float(each), dtype=dtype, device=device)  # the host would wait for torch.tensor
        raise TypeError(
            f"join.mean got a value of type {type(each).__name__}. Pass a number, a tensor, or a dict of these. [J680]"
        )

    def restored(each: Any, mean: torch.Tensor) -> Any:
        if isinstance(each, torch.Tensor):
            return mean.reshape(each.shape).to(each.dtype if each.is_floating_point() else dtype)
        return mean.item() if mean.is_cpu else mean[0]

    own = flat(weight if isinstance(weight, torch.Tensor) else checked_weight(weight, "weight"))
    parts = list(map(flat, values))
    total = torch.cat([*(torch.where(own > 0, part * own, 0.0) for part in parts), own])
    collective.finish(collective.all_reduce(total), on_cpu=total.is_cpu)
    means = torch.split(total[:-1] / total[-1], list(map(len, parts)))
    return pytree.tree_unflatten(list(map(restored, values, means)), structure)
