"""Networks that are trained by each rank for itself, or in one process for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.training import batch

Nets = dict[str, Any]
Data = list[tuple[torch.Tensor, torch.Tensor]]
Scale = Callable[[torch.Tensor], torch.Tensor]
Compute = Callable[[Nets, Data, int, int, Scale], None]
RANKS = 3


def streams(rank: int, step: int) -> Data:
    """What a rank has for one step: as many batches as any loop takes."""
    return [batch(rank, 0, step, stream) for stream in range(4)]


def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((output - y) ** 2).mean()


def plain(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    x, y = data[0]
    scale(loss(nets["a"](x), y)).backward()


def compute_all(nets: Nets, compute: Compute, scales: dict[int, float], step: int) -> None:
    """The gradients of all these ranks, added up; each starts from the same buffers, and the lowest rank's are kept."""
    buffers = [buffer for net in nets.values() for buffer in net.buffers()]
    shared = [buffer.clone() for buffer in buffers]
    kept: list[torch.Tensor] = []
    for rank, scale in scales.items():
        for buffer, value in zip(buffers, shared, strict=True):
            buffer.copy_(value)
        compute(nets, streams(rank, step), rank, step, lambda value, by=scale: by * value)
        kept = kept or [buffer.clone() for buffer in buffers]
    for buffer, value in zip(buffers, kept, strict=True):
        buffer.copy_(value)
