"""Hyperparameters that a rank with data changes, and a rank without data takes over for its shard."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.pool import Pool

STEPS = 3


def train(rank: int, sharded: bool) -> torch.Tensor:
    """Rank 0 alone has data, and raises the learning rate in its last step."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    model = DistributedDataParallel(net) if sharded else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer], divide_by_initial_world_size=False) if sharded else nullcontext():
        for step in range(0 if rank else STEPS):
            if step == STEPS - 1:
                optimizer.param_groups[0]["lr"] = 0.5
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
            optimizer.step()
    return net.weight.detach()


def test_a_learning_rate_that_is_raised(pool: Pool) -> None:
    (expected,) = pool.run(train, False, ranks=1)
    for found in pool.run(train, True, ranks=2):
        torch.testing.assert_close(found, expected)
