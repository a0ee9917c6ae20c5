"""Two epochs on two ranks, and the same batches in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import mse_loss

from tests.training import batch, build

COUNTS = ((3, 1), (0, 2))  # by epoch and rank


def alone(make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return what an optimizer, made for the parameters, ends with, if a step is the mean over the ranks with data."""
    net = build("mlp")
    optimizer = make(net.parameters())
    for epoch, counts in enumerate(COUNTS):
        for step in range(max(counts)):
            window = [batch(rank, epoch, step) for rank in range(2) if step < counts[rank]]
            optimizer.zero_grad()
            for x, y in window:
                (mse_loss(net(x), y) / len(window)).backward()
            optimizer.step()
    return net.state_dict()
