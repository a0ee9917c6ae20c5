"""An optimizer that shards itself: each rank orthogonalises some of the matrices, and sends them to the others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join
from tests.ending import Ending
from tests.engines.table import Cell, cells_of
from tests.engines.training import Engine, Feed, alone, check
from tests.harness import Pool
from tests.training import FEATURES, TARGETS


def build(seed: int = 0) -> nn.Sequential:
    """Matrices only."""
    torch.manual_seed(seed)
    sizes = FEATURES, 8, 8, 8, TARGETS
    layers = [nn.Linear(wide, narrow, bias=False) for wide, narrow in pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1]).double()


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrix, nearly, by Newton and Schulz; not in bfloat16, which would hide differences."""
    found = matrix / matrix.norm()
    for _ in range(5):
        found = 1.5 * found - 0.5 * found @ found.T @ found
    return found


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; with several ranks, each steps its share and has no state for the others'."""

    def __init__(self, parameters: Any, ranks: int = 1, rank: int = 0) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.9})
        self.ranks, self.rank = ranks, rank

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        for at, parameter in enumerate(group["params"]):
            if at % self.ranks == self.rank:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(orthogonal(momentum), alpha=group["lr"])
            if self.ranks > 1:
                dist.broadcast(parameter, src=at % self.ranks)


class ShardedOptimizer(Engine):
    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        super().__init__(rank, cell, seed)
        self.model = DistributedDataParallel(build(seed))
        self.optimizer = Muon(self.model.parameters(), dist.get_world_size(), rank)

    @override
    def train(self, feed: Feed) -> None:
        how: Any = {"divide_by_initial_world_size": False, "timeout": self.cell.timeout}
        with Join([self.model, self.optimizer], **how) as join:
            for x, y in feed.steps(join):
                self.model.require_backward_grad_sync = join.ends_window
                loss = mse_loss(self.model(x), y)
                (loss if self.cell.is_plain else join.scale(loss)).backward()
                if join.ends_window:
                    self.optimizer.step()
                    self.optimizer.zero_grad()


@pytest.mark.parametrize("cell", cells_of("sharded optimizer"), ids=str)
def test_sharded_optimizer(pool: Pool, ending: Ending, cell: Cell) -> None:
    expected = alone(cell, build(), lambda model: Muon(model.parameters()))
    check(pool, ending, ShardedOptimizer, cell, expected)
