"""FSDP1, FSDP2, HSDP and tensor parallelism: the module is listed, and each loss goes through ``join.scale``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from typing_extensions import override

from join import Join
from tests.ending import Ending
from tests.engines.table import Cell, cells_of
from tests.engines.training import Engine, Feed, adam, build, check
from tests.harness import Pool
from tests.training import flat_state


class FSDP1(Engine):
    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        super().__init__(rank, cell, seed)
        self.model = FullyShardedDataParallel(build(seed), device_id=torch.device("cpu"), use_orig_params=True)
        self.optimizer = adam(self.model)

    @override
    def train(self, feed: Feed) -> None:
        with Join([self.model, self.optimizer], divide_by_initial_world_size=False) as join:
            for x, y in feed.steps(join):
                with nullcontext() if join.ends_window else self.model.no_sync():
                    join.scale(mse_loss(self.model(x), y)).backward()
                if join.ends_window:
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    @override
    def state(self) -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model):
            return flat_state({name: each.detach().clone() for name, each in self.model.module.named_parameters()})


class FSDP2(Engine):
    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        super().__init__(rank, cell, seed)
        self.model: Any = self.sharded(build(seed))
        self.optimizer = adam(self.model)

    def sharded(self, model: Any) -> Any:
        return shard(model, init_device_mesh("cpu", (3,)))

    @override
    def train(self, feed: Feed) -> None:
        with Join([self.model, self.optimizer], divide_by_initial_world_size=False) as join:
            for x, y in feed.steps(join):
                self.model.set_requires_gradient_sync(join.ends_window)
                join.scale(mse_loss(self.model(x), y)).backward()
                if join.ends_window:
                    self.optimizer.step()
                    self.optimizer.zero_grad()


class HSDP(FSDP2):
    @override
    def sharded(self, model: Any) -> Any:
        return shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


class TensorParallel(FSDP2):
    """Two ranks share a batch and the layers; there are two such pairs."""

    @override
    def owner(self, rank: int) -> int:
        return rank // 2

    @override
    def sharded(self, model: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["data"])


def shard(model: Any, mesh: Any) -> Any:
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS = {
    "FSDP1": FSDP1,
    "FSDP2": FSDP2,
    "HSDP": HSDP,
    "tensor parallelism": TensorParallel,
}


@pytest.mark.parametrize("cell", cells_of(*KINDS), ids=str)
def test_sharded(pool: Pool, ending: Ending, cell: Cell) -> None:
    check(pool, ending, KINDS[cell.engine], cell)
