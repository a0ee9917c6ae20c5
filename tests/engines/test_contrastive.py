"""Losses over features that are gathered from all ranks; a dummy has no rows, which ``all_gather`` would wait for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, normalize, pad
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join
from tests.ending import Ending
from tests.engines.table import Cell, cells_of
from tests.engines.training import Batch, Engine, Feed, adam, alone, batch_of, build, check
from tests.harness import Pool


class GatherLayer(torch.autograd.Function):
    """Gathers; each rank gets the gradients of its rows from all ranks."""

    @staticmethod
    @override
    def forward(ctx: Any, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own)
        return tuple(rows)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = torch.stack(gradients)
        dist.all_reduce(total)
        return total[dist.get_rank()]


def rows_of_all(features: torch.Tensor, *, all_gradients: bool) -> tuple[torch.Tensor, float]:
    """The rows of all ranks, and of how many ranks they are: a dummy has none.

    Padding makes them as many on each rank, and is cut off again.
    """
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(features)]))
    padded = pad(features, (0, 0, 0, int(max(counts)) - len(features)))
    if all_gradients:
        rows = list(GatherLayer.apply(padded))
    else:
        rows = [torch.zeros_like(padded) for _ in counts]
        dist.all_gather(rows, padded.detach())
        rows[dist.get_rank()] = padded
    kept = [each[: int(count)] for each, count in zip(rows, counts, strict=True)]
    return torch.cat(kept), sum(len(each) > 0 for each in kept)


def contrast(features: torch.Tensor) -> torch.Tensor:
    """Each row is to be more like itself than like others."""
    features = normalize(features)
    return cross_entropy(features @ features.T, torch.arange(len(features)))


def len_of_batch(data: Batch) -> int:
    return len(data[0])


class Contrastive(Engine):
    """Each rank has a part of the gradient, the sum of which DDP divides by their number: hence the factor."""

    all_gradients = False

    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        super().__init__(rank, cell, seed)
        self.model = DistributedDataParallel(build(seed))
        self.optimizer = adam(self.model)

    @override
    def train(self, feed: Feed) -> None:
        how: Any = {"divide_by_initial_world_size": True, "timeout": self.cell.timeout}
        with Join([self.model, self.optimizer], **how) as join:
            weigh = len_of_batch if self.cell.column == "weights" else None
            for x, _ in feed.steps(join, weigh=weigh):
                with nullcontext() if join.ends_window else self.model.no_sync():
                    rows, ranks = rows_of_all(self.model(x), all_gradients=self.all_gradients)
                    copies = ranks if self.all_gradients else 1
                    join.scale(contrast(rows) * dist.get_world_size() / copies).backward()
                if join.ends_window:
                    self.optimizer.step()
                    self.optimizer.zero_grad()


class ContrastiveOfAll(Contrastive):
    """Each rank with data has the whole gradient, of its copy of the loss."""

    all_gradients = True


def loss_of_all(model: Any, cell: Cell, first: int, window: list[list[int]]) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    for step, owners in enumerate(window, first):
        losses.append(contrast(model(torch.cat([batch_of(cell, owner, step)[0] for owner in owners]))))
    return torch.stack(losses).mean()


KINDS = {"contrastive": Contrastive, "contrastive, all gradients": ContrastiveOfAll}


@pytest.mark.parametrize("cell", cells_of(*KINDS), ids=str)
def test_contrastive(pool: Pool, ending: Ending, cell: Cell) -> None:
    check(pool, ending, KINDS[cell.engine], cell, alone(cell, loss=loss_of_all))
