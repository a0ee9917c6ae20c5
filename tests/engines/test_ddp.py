"""DDP modules are listed: as they are, with SyncBatchNorm, and over layers that are spread over other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join
from tests.ending import Ending
from tests.engines.table import Cell, cells_of
from tests.engines.training import Engine, Feed, adam, alone, batch_of, build, check
from tests.harness import Pool
from tests.sync_norm import CPUSyncBatchNorm, sync_batch_norm_on_cpu
from tests.training import FEATURES, TARGETS, flat_state, whole


class DDP(Engine):
    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        super().__init__(rank, cell, seed)
        self.model = DistributedDataParallel(build(seed))
        self.optimizer = adam(self.model)

    @override
    def train(self, feed: Feed) -> None:
        with Join([self.model, self.optimizer], divide_by_initial_world_size=False) as join:
            for x, y in feed.steps(join):
                with nullcontext() if join.ends_window else self.model.no_sync():
                    loss = mse_loss(self.model(x), y)
                    (loss if self.cell.is_plain else join.scale(loss)).backward()
                if join.ends_window:
                    self.optimizer.step()
                    self.optimizer.zero_grad()


class TensorParallelInDDP(DDP):
    """Two ranks share a batch and the layers; there are two such pairs."""

    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        Engine.__init__(self, rank, cell, seed)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        self.net: Any = build(seed)
        parallelize_module(self.net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.model = DistributedDataParallel(self.net, device_mesh=mesh["data"])
        self.parameters = list(self.model.parameters())  # before the first forward puts DTensors in their places
        self.optimizer = torch.optim.Adam(self.parameters, lr=0.01)

    @override
    def owner(self, rank: int) -> int:
        return rank // 2

    @override
    def save(self) -> Any:
        return [each.detach().clone() for each in self.parameters], self.optimizer.state_dict()

    @override
    def load(self, checkpoint: Any) -> None:
        for parameter, value in zip(self.parameters, checkpoint[0], strict=True):
            parameter.detach().copy_(value)
        self.optimizer.load_state_dict(checkpoint[1])

    @override
    def state(self) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            self.model(torch.ones(1, FEATURES).double())  # makes DTensors of them, on ranks that never had data, too
            layers: Iterator[tuple[int, str]] = ((at, name) for at in (0, 2, 4) for name in ("weight", "bias"))
            return flat_state({f"{at}.{name}": whole(getattr(self.net[at], name).detach()) for at, name in layers})


class Norm(nn.Sequential):
    # No bias before BatchNorm: its gradient is zero but for rounding, which Adam would blow up to full steps.
    def __init__(self, norm: type[nn.Module], seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(FEATURES, 8, bias=False), norm(8), nn.Tanh(), nn.Linear(8, TARGETS))
        self.double()


class SyncBatchNorm(DDP):
    """With torch's own layer but for its kernels, which torch has for GPUs only."""

    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        Engine.__init__(self, rank, cell, seed)
        with sync_batch_norm_on_cpu():
            self.model = DistributedDataParallel(Norm(CPUSyncBatchNorm, seed))
        self.optimizer = adam(self.model)

    @override
    def train(self, feed: Feed) -> None:
        with sync_batch_norm_on_cpu():
            super().train(feed)


def loss_over_all_ranks(model: Any, cell: Cell, first: int, window: list[list[int]]) -> torch.Tensor:
    """The statistics of a micro-batch are those of all ranks."""
    losses: list[torch.Tensor] = []
    weights: list[int] = []
    for step, owners in enumerate(window, first):
        batches = [batch_of(cell, owner, step) for owner in owners]
        outputs = model(torch.cat([x for x, _ in batches])).split([len(x) for x, _ in batches])
        for output, (x, y) in zip(outputs, batches, strict=True):
            weights.append(len(x) if cell.weighs else 1)
            losses.append(mse_loss(output, y) * weights[-1])
    return torch.stack(losses).sum() / sum(weights)


@pytest.mark.parametrize("cell", cells_of("DDP", "tensor parallelism in DDP"), ids=str)
def test_ddp(pool: Pool, ending: Ending, cell: Cell) -> None:
    check(pool, ending, DDP if cell.engine == "DDP" else TensorParallelInDDP, cell)


@pytest.mark.parametrize("cell", cells_of("SyncBatchNorm"), ids=str)
def test_synchronised_norms(pool: Pool, ending: Ending, cell: Cell) -> None:
    expected = alone(cell, Norm(nn.BatchNorm1d, 0), loss=loss_over_all_ranks)
    check(pool, ending, SyncBatchNorm, cell, expected)
