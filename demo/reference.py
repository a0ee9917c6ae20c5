"""What should come out: one process that trains on the same global batches, with plain autograd and plain Adam."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from demo.data import Digits, shards
from demo.model import LEARNING_RATE, build, flat_parameters


@dataclass
class Reference:
    """The run of one process.

    Attributes:
        losses: the mean loss of each global batch.
        snapshots: the parameters after each step.
        model: the trained network.
    """

    losses: list[float]
    snapshots: list[torch.Tensor]
    model: nn.Module


def train_alone(digits: Digits, epochs: int) -> Reference:
    """Train in this process.

    A step averages over the ranks that still have a batch. BatchNorm normalises each rank's batch by itself, as it does
    in DDP. Its running statistics are not averaged there, but broadcast from one rank before every forward: all ranks
    start from the statistics of the leader, the lowest rank that had a batch in the step before.
    """
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    reference = Reference([], [], model)
    for epoch in range(epochs):
        for per_rank in zip_longest(*shards(digits, epoch)):
            batches = [batch for batch in per_rank if batch is not None]
            before = [buffer.clone() for buffer in model.buffers()]
            leaders: list[torch.Tensor] = []
            optimizer.zero_grad()
            total = 0.0
            for images, labels in batches:
                _copy(before, model)
                loss = cross_entropy(model(images), labels) / len(batches)
                loss.backward()
                total += loss.item()
                leaders = leaders or [buffer.clone() for buffer in model.buffers()]
            _copy(leaders, model)
            optimizer.step()
            reference.losses.append(total)
            reference.snapshots.append(flat_parameters(model))
    return reference


def _copy(buffers: list[torch.Tensor], model: nn.Module) -> None:
    for target, buffer in zip(model.buffers(), buffers, strict=True):
        target.copy_(buffer)
