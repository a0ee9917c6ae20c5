"""Hyperparameters that a rank with data changes, and a rank without data takes over for its shard."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from join import Join
from tests.pool import Pool

STEPS = 3


def train(rank: int, sharded: bool, reloads: bool) -> torch.Tensor:
    """Rank 0 alone has data, and raises the learning rate in its last step, maybe after it has loaded its own state."""
    torch.manual_seed(0)
    net: Any = torch.nn.Linear(4, 4, bias=False)
    if sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Join([net, optimizer], divide_by_initial_world_size=False) if sharded else nullcontext():
        for step in range(0 if rank else STEPS):
            if step == STEPS - 1:
                if reloads:
                    optimizer.load_state_dict(optimizer.state_dict())
                optimizer.param_groups[0]["lr"] = 0.5
            optimizer.zero_grad()
            net(torch.full((2, 4), 1.0 + step)).square().mean().backward()
            optimizer.step()
    return net.weight.full_tensor().detach() if sharded else net.weight.detach()


@pytest.mark.parametrize("reloads", [False, True])
def test_a_learning_rate_that_is_raised(pool: Pool, reloads: bool) -> None:
    (expected,) = pool.run(train, False, reloads, ranks=1)
    for found in pool.run(train, True, reloads, ranks=2):
        torch.testing.assert_close(found, expected)
