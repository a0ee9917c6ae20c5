"""``torch.distributed.pipelining``: two stages, each on two ranks, which are replicas.

Both ranks of a replica loop over the same batches. A schedule cuts a batch into micro-batches, of which the replicas
have different numbers, and the loss is computed where the last stage is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss
from typing_extensions import override

from join import Join
from tests.ending import Ending
from tests.engines.table import Cell, cells_of
from tests.engines.training import Batch, Engine, Feed, adam, alone, build, check, mean_loss
from tests.harness import Pool
from tests.training import batch, flat_state

MICRO_BATCHES = 4, 2
"""Of one batch, in each replica."""


def batch_of(cell: Cell, owner: int, step: int) -> Batch:
    """Pipelines take batches of one size."""
    x, y = batch(owner, 0, step)
    return x[:4].double(), y[:4].double()


class Pipeline(Engine):
    batch_of = staticmethod(batch_of)

    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        super().__init__(rank, cell, seed)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
        self.replicas, self.stage = mesh.get_group("replica"), rank % 2
        self.model = build(seed)[:2] if self.stage == 0 else build(seed)[2:]
        self.optimizer = adam(self.model)
        stage = PipelineStage(self.model, self.stage, 2, torch.device("cpu"), group=mesh.get_group("stage"))
        self.join: Any = None
        self.micro_batches = MICRO_BATCHES[self.owner(rank)]
        # With scale_grads=True, a step divides what the steps before it in the window have accumulated, once more.
        self.schedule = ScheduleGPipe(stage, self.micro_batches, loss_fn=self.loss, scale_grads=False)
        self.listed = [self.model, self.optimizer] if cell.is_plain else []
        self.options: Any = {} if self.listed else {"process_group": None}

    @override
    def owner(self, rank: int) -> int:
        return rank // 2

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.join.scale(mse_loss(output, target)) / self.micro_batches

    @override
    def train(self, feed: Feed) -> None:
        with Join(self.listed, divide_by_initial_world_size=False, **self.options) as self.join:
            for x, y in feed.steps(self.join, dummy="last"):
                self.schedule.step(x) if self.stage == 0 else self.schedule.step(target=y)
                if self.join.ends_window:
                    for parameter in self.model.parameters():
                        dist.all_reduce(parameter.grad, group=self.replicas)
                        parameter.grad /= 2
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    @override
    def state(self) -> dict[str, torch.Tensor]:
        return flat_state(self.model.state_dict())


@pytest.mark.parametrize("cell", cells_of("pipelining"), ids=str)
def test_pipelining(pool: Pool, ending: Ending, cell: Cell) -> None:
    expected = alone(cell, loss=lambda *of: mean_loss(*of, make=batch_of))
    check(pool, ending, Pipeline, cell, expected)
