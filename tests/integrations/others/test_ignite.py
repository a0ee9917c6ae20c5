"""Ignite: an Engine runs over join.iterate, in one block for each epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.docs import names
from tests.examples import examples_of
from tests.harness import Pool
from tests.integrations.others.one_process import COUNTS, alone
from tests.integrations.ranks import imported
from tests.training import assert_same, batch, build

pytest.importorskip("ignite", reason="Ignite is not installed: pip install pytorch-ignite")


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
    expected = alone(lambda params: torch.optim.Adam(params, lr=0.01))
    for state in pool.run(train, has_length, ranks=2):
        assert_same(state, expected, 1e-6)


class Names(names.Names):
    @property
    def Engine(self) -> Any:
        return imported("ignite.engine").Engine

    @property
    def step(self) -> Any:
        return lambda engine, batch: self.train_step(*batch)


def test_the_example(pool: Pool) -> None:
    [code] = [each.code for each in examples_of("frameworks/other.md") if "Engine" in each.code]
    names.check(pool, code, Names)
