"""Under ``torch.set_default_device`` the tensors that ranks exchange stay where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.harness import Pool
from tests.training import batch, build

COUNTS = 0, 2, 4


def train(rank: int, way: str, device: str) -> list[torch.Tensor]:
    """What a rank trains on the CPU, while tensors that name no device go to another one, without memory."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(build("norm"))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if way == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    loader = [batch(rank, 0, step) for step in range(COUNTS[rank])]
    torch.set_default_device(device)
    try:
        with Join([model, optimizer], divide_by_initial_world_size=False) as block:
            for x, y in block.iterate(loader, weigh=lambda data: len(data[0])) if way == "loop" else loader:
                optimizer.zero_grad()
                block.scale((model(x) - y).square().mean()).backward()
                optimizer.step()
    finally:
        torch.set_default_device(None)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("way", ["block", "zero", "loop"])
def test_training(pool: Pool, way: str, over_group: bool) -> None:
    first, *others = pool.run(train, way, "meta", over_group=over_group)
    expected, *_ = pool.run(train, way, "cpu", over_group=over_group)
    for parameters in (*others, expected):
        assert all(torch.equal(one, other) for one, other in zip(first, parameters, strict=True))
