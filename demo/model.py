"""The model: a small convolutional network with BatchNorm, and what everybody does with it alike."""

from __future__ import annotations

import torch
from torch import nn

LEARNING_RATE = 2e-3


def build() -> nn.Module:
    """Build the network, with the same weights on every call.

    The convolutions have no bias: BatchNorm would subtract it again, so its gradient would be pure rounding noise, and
    Adam, which divides a gradient by its own size, would make a random walk of it.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


def flat_parameters(model: nn.Module) -> torch.Tensor:
    """A copy of all parameters, as one vector."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def flat_buffers(model: nn.Module) -> torch.Tensor:
    """A copy of all buffers, as one vector: BatchNorm's running means and variances."""
    return torch.cat([buffer.flatten().float() for buffer in model.buffers()])


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of ``images`` that the model gets right, in evaluation mode."""
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()
