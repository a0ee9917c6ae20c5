"""Buffers that are registered between two blocks."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.models import batch, build
from tests.pool import Pool

COUNTS = (0, 2, 1), (2, 1, 0)


def train(rank: int) -> dict[str, torch.Tensor]:
    module = build("norm")
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, counts in enumerate(COUNTS):
        with Join([model, optimizer], divide_by_initial_world_size=False):
            for step in range(counts[rank]):
                x, y = batch(rank, epoch, step)
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
        module.register_buffer("calibration", torch.full((2,), float(rank)))
    return module.state_dict()


def test_a_buffer_that_is_new_in_the_second_block(pool: Pool) -> None:
    first, *others = pool.run(train)
    for state in others:
        del state["calibration"]  # registered anew on each rank at the end
        assert all(torch.equal(first[name], value) for name, value in state.items())
