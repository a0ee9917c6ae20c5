"""Hooks on parameters: the user's own in a block, and the block's own after it; with a compiled module, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.harness import Pool
from tests.training import TOLERANCE, batch, build

COUNTS = (4, 2, 0), (1, 3, 2)


def twice(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


def step_after_the_block(module: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step of the module alone, on the same batch on all ranks."""
    x, y = batch(0, 9, 9)
    optimizer.zero_grad()
    (module(x) - y).square().mean().backward()
    optimizer.step()


def alone() -> list[torch.Tensor]:
    module = build("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for epoch, counts in enumerate(COUNTS):
        for step in range(max(counts)):
            optimizer.zero_grad()
            for x, y in (batch(rank, epoch, step) for rank in range(3) if counts[rank] > step):
                (2 * (module(x) - y).square().mean() / sum(count > step for count in counts)).backward()
            optimizer.step()
        step_after_the_block(module, optimizer)
    return [parameter.detach() for parameter in module.parameters()]


def train(rank: int, iterates: bool, compiled: bool) -> list[torch.Tensor]:
    ddp = DistributedDataParallel(build("mlp"))
    module: Any = torch.compile(ddp, backend="eager") if compiled else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    parameters: list[nn.Parameter] = list(ddp.parameters())
    for epoch, counts in enumerate(COUNTS):
        rows = [batch(rank, epoch, step) for step in range(counts[rank])]
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in join.iterate(rows) if iterates else rows:
                optimizer.zero_grad()
                handles = [parameter.register_hook(twice) for parameter in parameters]
                (module(x) - y).square().mean().backward()
                for handle in handles:
                    handle.remove()
                optimizer.step()
        step_after_the_block(module, optimizer)
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.in_test_all)])
@pytest.mark.parametrize("iterates", [False, True])
def test_as_one_process(pool: Pool, iterates: bool, compiled: bool) -> None:
    for found in pool.run(train, iterates, compiled, ranks=3):
        torch.testing.assert_close(found, alone(), atol=10 * TOLERANCE, rtol=1e-4)
