"""Composer: a Trainer runs over join.iterate, in one block for each epoch, and does not read the loader between them.

Composer 0.32 requires a torch older than this library's. So this runs only where Composer was installed without that
requirement. It has passed there.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from join import Join
from tests.ending import Ending
from tests.integrations.others.one_process import COUNTS, alone
from tests.integrations.ranks import imported
from tests.training import assert_same, batch, build

pytest.importorskip("composer", reason="Composer is not installed, which no release for this library's torch allows")


def train(rank: int) -> dict[str, torch.Tensor]:
    class Model(imported("composer").ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = build("mlp")

        def forward(self, pair: Any) -> torch.Tensor:
            return self.net(pair[0])

        def loss(self, outputs: torch.Tensor, pair: Any) -> torch.Tensor:
            return current.scale(mse_loss(outputs, pair[1]))

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    made = Model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    options = {"device": "cpu", "spin_dataloaders": False, "progress_bar": False, "device_train_microbatch_size": 99}
    trainer = imported("composer").Trainer(model=made, optimizers=optimizer, **options)
    for epoch, counts in enumerate(COUNTS):
        own = [batch(rank, epoch, step) for step in range(counts[rank])]
        with Join([trainer.state.model, optimizer], divide_by_initial_world_size=False) as current:
            trainer.fit(train_dataloader=current.iterate(own, dummy="last"), duration="1ep")
    return made.net.state_dict()


def test_it_trains_exactly(ending: Ending) -> None:
    expected = alone(lambda params: torch.optim.SGD(params, lr=0.1))
    for state in ending.run(train, ranks=2):
        assert_same(state, expected, 1e-6)
