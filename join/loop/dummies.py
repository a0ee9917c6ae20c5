"""Batches for ranks that have none left: :func:`emptied` and :func:`duplicate`."""

from __future__ import annotations

from typing import Any

import torch

from join.batch import map_tensors
from join.errors import add_note


def emptied(batch: Any) -> Any:
    """Return ``batch`` with no samples in it: every tensor that has dimensions has length 0 along its first one.

    What else is in it stays as it is. No memory of the batch is held.
    """
    # A slice alone would keep the storage, and the graph of what the body has made of the batch.
    return map_tensors(_without_rows, batch)


def _without_rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    return tensor.detach()[:0].clone().requires_grad_(tensor.requires_grad)


def duplicate(batch: Any) -> Any:
    """The batch in new containers, with the same tensors, so that a loop body may change the containers it gets."""
    try:
        return map_tensors(lambda tensor: tensor, batch)
    except Exception:  # of a container that cannot be built anew; then it is that one
        return batch


def hint_at_empty_batch(error: BaseException) -> None:
    """Add to an ``error`` of a loop's body that its batch was an empty one, and the way out."""
    add_note(
        error,
        "This rank had run out of batches and got an empty one. If the loop's body cannot take it, give dummies with"
        " samples: join.iterate(loader, dummy='last')",
    )
