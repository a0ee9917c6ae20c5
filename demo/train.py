"""What each rank does: train on its own shard inside a ``Join`` block.

The loop is a stock DDP loop. It is the same under this library's ``Join`` and under torch's; only the line that builds
the block differs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from demo.data import BATCHES, STEPS, Digits, shards
from demo.model import LEARNING_RATE, build, flat_parameters
from join import Join, JoinReport

OptimizerName = Literal["Adam", "ZeRO(Adam)"]
JoinName = Literal["joinables", "torch"]


@dataclass(frozen=True)
class Run:
    """What to train, and how."""

    optimizer: OptimizerName
    join: JoinName
    epochs: int
    digits: Digits


@dataclass
class RankResult:
    """What a rank saw, and what it ended with.

    Attributes:
        losses: the local loss by global step, for the steps at which this rank had a batch.
        snapshots: the parameters after each of these steps.
        reports: one a block, that is, one an epoch; none under torch's Join.
        state: the model's state dict after the last block.
    """

    losses: dict[int, float] = field(default_factory=dict)
    snapshots: dict[int, torch.Tensor] = field(default_factory=dict)
    reports: list[JoinReport] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


def train(rank: int, run: Run, advance: Callable[[], None]) -> RankResult:
    """Train on this rank's shards; ``advance`` is called once a global step."""
    model = DistributedDataParallel(build())
    optimizer = _optimizer(run.optimizer, model)
    counts_steps = rank == BATCHES.index(STEPS)
    result = RankResult()
    for epoch in range(run.epochs):
        with _block(run, model, optimizer) as block:
            for step, (images, labels) in enumerate(shards(run.digits, epoch)[rank], start=epoch * STEPS):
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                result.losses[step] = loss.item()
                result.snapshots[step] = flat_parameters(model)
                if counts_steps:
                    advance()
        if isinstance(block, Join):
            result.reports.append(block.report)
    result.state = model.module.state_dict()
    return result


def _block(run: Run, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    if run.join == "joinables":
        return Join([model, optimizer], divide_by_initial_world_size=False)
    joinables: list[Any] = (
        [model] if run.optimizer == "Adam" else [model, optimizer]
    )  # torch's takes no stock optimizer
    return TorchJoin(joinables, divide_by_initial_world_size=False)


def _optimizer(name: OptimizerName, model: DistributedDataParallel) -> torch.optim.Optimizer:
    if name == "Adam":
        return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=LEARNING_RATE)
