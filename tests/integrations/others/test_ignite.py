"""Ignite: an Engine runs over join.iterate, in one block for each epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.integrations.ranks import imported
from tests.models import assert_same, batch, build
from tests.pool import Pool

pytest.importorskip("ignite", reason="Ignite is not installed: pip install pytorch-ignite")

COUNTS = ((3, 1), (0, 2))  # by epoch and rank


def train(rank: int, has_length: bool) -> dict[str, torch.Tensor]:
    net = build("mlp")
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch, counts in enumerate(COUNTS):
        with Join([model, optimizer], divide_by_initial_world_size=False) as join:

            def step(_: Any, pair: Any, join: Join = join) -> None:
                optimizer.zero_grad()
                join.scale((model(pair[0]) - pair[1]).square().mean()).backward()
                optimizer.step()

            own = [batch(rank, epoch, step) for step in range(counts[rank])]
            imported("ignite.engine").Engine(step).run(join.iterate(own if has_length else iter(own)), max_epochs=1)
    return net.state_dict()


@pytest.mark.parametrize("has_length", [True, False])
def test_it_trains_exactly(pool: Pool, has_length: bool) -> None:
    net = build("mlp")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch, counts in enumerate(COUNTS):
        for step in range(max(counts)):
            window = [batch(rank, epoch, step) for rank in range(2) if step < counts[rank]]
            optimizer.zero_grad()
            for x, y in window:
                ((net(x) - y).square().mean() / len(window)).backward()
            optimizer.step()
    for state in pool.run(train, has_length, ranks=2):
        assert_same(state, net.state_dict(), 1e-6)
