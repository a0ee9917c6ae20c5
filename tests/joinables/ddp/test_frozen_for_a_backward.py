"""Adversaries: parameters that are frozen for one backward of a step and train in the next."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from joinables import LossGate
from tests.models import FEATURES, TOLERANCE, batch
from tests.pool import Pool

COUNTS = (3, 1)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)])

    def loss(self, index: int, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            part.requires_grad_(number == index)
        return (1 - 2 * index) * torch.tanh(self.parts[1](torch.tanh(self.parts[0](x)))).mean()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=0.1) for part in self.parts]


def train(rank: int, iterate: bool) -> list[torch.Tensor]:
    module = Adversaries()
    ddp = DistributedDataParallel(LossGate(module), find_unused_parameters=True)
    optimizers = module.optimizers()
    batches = [batch(rank, 0, step)[0][: 2 + rank + step] for step in range(COUNTS[rank])]
    with Join([ddp, *optimizers]) as join:
        for x in join.iterate(batches, weigh=len) if iterate else batches:
            if not iterate:
                join.weight = len(x)
            for index, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                join.scale(ddp(module.loss(index, x))).backward()
                optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("iterate", [True, False])
def test_as_one_process(pool: Pool, iterate: bool) -> None:
    module = Adversaries()
    optimizers = module.optimizers()
    for step in range(max(COUNTS)):
        batches = [batch(rank, 0, step)[0][: 2 + rank + step] for rank in (0, 1) if step < COUNTS[rank]]
        for index, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            module.loss(index, torch.cat(batches)).backward()
            optimizer.step()
    expected = [parameter.detach() for parameter in module.parameters()]
    for found in pool.run(train, iterate, ranks=2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=10 * TOLERANCE)
