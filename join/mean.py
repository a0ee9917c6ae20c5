"""Mean of a value over the ranks with data, in a step of a loop: :func:`mean_over_ranks`, behind ``Join.mean``.

All ranks, with data or on a dummy batch, do the same::

    all-reduce of 16 numbers: the form, weight, weight * value, ...    weight and values are 0 on a dummy batch
    if there are more values: all-reduce of the others

The form is a digest of keys and shapes. Its mean and the mean of its square show whether it is the same on all ranks.
"""

from __future__ import annotations

from numbers import Real
from typing import Any
from zlib import crc32

import torch

from join.arguments import checked_number
from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.errors import ProtocolError, wrong_kind

_HEAD, _FIRST = 16, 4  # numbers of the first all-reduce, and these before the first value


@torch.no_grad()
def mean_over_ranks(collective: Collective, value: Any, weight: Any) -> Any:
    """Return the weighted mean over ranks of a number, of a tensor, or of each value of a dict.

    Tensors on an accelerator are reduced there, and the host does not wait for them.

    Args:
        collective: The ranks.
        value: The value of this rank. If its weight is 0, it is ignored, even if it is NaN.
        weight: The weight of this rank: a number, or a tensor with one element.

    Raises:
        ProtocolError: On every rank, if keys or shapes differ. On an accelerator, the means are NaN instead.
        TypeError: If the value or the weight is something else.
        ValueError: If the weight is negative or not finite, unless it is on an accelerator.
    """
    leaves, structure = pytree.tree_flatten_with_path(value)
    keys, values = [pytree.keystr(path) for path, _ in leaves], [each for _, each in leaves]
    tensors = [each for each in (*values, weight) if isinstance(each, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))
    dtype = torch.float64 if device.type == "cpu" else torch.float32

    def flat(each: Any) -> torch.Tensor:
        if isinstance(each, torch.Tensor):
            return each.to(device, dtype, non_blocking=True).reshape(-1)
        if isinstance(each, Real):
            return torch.full((1,), float(each), dtype=dtype, device=device)  # the host would wait for torch.tensor
        raise wrong_kind("value", each, "a number or a tensor", "a number, a tensor, or a dict of these")

    def restored(each: Any, mean: torch.Tensor) -> Any:
        if isinstance(each, torch.Tensor):
            return mean.reshape(each.shape).to(each.dtype if each.is_floating_point() else dtype)
        return mean.item() if mean.is_cpu else mean[0]

    is_on_device = isinstance(weight, torch.Tensor) and weight.numel() == 1 and not weight.is_cpu
    own = flat(weight if is_on_device else checked_number("weight", weight))
    order = sorted(range(len(keys)), key=keys.__getitem__)  # a dict has its own order on each rank
    parts = [flat(values[at]) for at in order]
    shapes = ", ".join(f"{keys[at]} {list(getattr(values[at], 'shape', ()))}".strip() for at in order)
    form = 1 + crc32(shapes.encode()) % 2**16
    products = [torch.where(own > 0, part * own, 0.0) for part in parts]
    total = torch.cat([*map(flat, (1, form, form**2)), own, *products])
    total = torch.nn.functional.pad(total, (0, max(0, _HEAD - len(total))))
    collective.finish(collective.all_reduce(total[:_HEAD]), on_cpu=total.is_cpu)
    ranks, forms, squares, weights = total[:_FIRST]
    differ = ranks * squares - forms**2 > 64 * torch.finfo(dtype).eps * forms**2
    if total.is_cpu and differ:  # the host does not wait for a device
        _raise_different(collective, shapes)
    if len(total) > _HEAD:
        collective.finish(collective.all_reduce(total[_HEAD:]), on_cpu=total.is_cpu)
    sums = total[_FIRST : _FIRST + sum(map(len, parts))]
    in_order = torch.split(torch.where(differ, torch.nan, sums / weights), list(map(len, parts)))
    means = dict(zip(order, in_order, strict=True))
    return pytree.tree_unflatten([restored(each, means[at]) for at, each in enumerate(values)], structure)


def _raise_different(collective: Collective, shapes: str) -> None:
    """Raise an error on every rank that names the keys and shapes of each rank."""
    by_rank: list[str] = collective.all_gather_object(shapes, plain=True)
    texts = "; ".join(f"rank {rank}: {found or 'nothing'}" for rank, found in enumerate(by_rank))
    raise ProtocolError(
        f"join.mean got different keys or shapes on the ranks ({texts}). Pass the same keys and shapes on all ranks, on"
        " dummy batches, too, such as the mean of a batch instead of a value for each sample. [J740]"
    )
