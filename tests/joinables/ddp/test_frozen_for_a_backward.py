"""Parameters that are frozen for some backwards, such as those of adversaries, and when a block is entered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from joinables import LossGate
from tests.ending import Ending
from tests.harness import Pool
from tests.training import FEATURES, TOLERANCE, batch, learn_graph

EPOCHS = ((3, 1), (0, 2))


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)])

    def loss(self, index: int, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            part.requires_grad_(number == index)
        return (1 - 2 * index) * torch.tanh(self.parts[1](torch.tanh(self.parts[0](x)))).mean()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=0.1) for part in self.parts]


def train(rank: int, iterate: bool) -> list[torch.Tensor]:
    module = Adversaries()
    ddp = DistributedDataParallel(LossGate(module), find_unused_parameters=True)
    optimizers = module.optimizers()
    for epoch, counts in enumerate(EPOCHS):
        batches = [batch(rank, epoch, step)[0][: 2 + rank + step] for step in range(counts[rank])]
        with Join([ddp, *optimizers]) as join:
            for x in join.iterate(batches, weigh=len) if iterate else batches:
                if not iterate:
                    join.weight = len(x)
                for index, optimizer in enumerate(optimizers):
                    optimizer.zero_grad()
                    join.scale(ddp(module.loss(index, x))).backward()
                    optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("iterate", [True, False])
def test_as_one_process(pool: Pool, iterate: bool) -> None:
    module = Adversaries()
    optimizers = module.optimizers()
    for epoch, counts in enumerate(EPOCHS):
        for step in range(max(counts)):
            batches = [batch(rank, epoch, step)[0][: 2 + rank + step] for rank in (0, 1) if step < counts[rank]]
            for index, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                module.loss(index, torch.cat(batches)).backward()
                optimizer.step()
    expected = [parameter.detach() for parameter in module.parameters()]
    for found in pool.run(train, iterate, ranks=2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=10 * TOLERANCE)


class Hidden:
    """An output in which no tensor is found."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Halves(nn.Module):
    """Two layers; ``hides`` its loss."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.hides = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1), hides

    def forward(self, x: torch.Tensor) -> Any:
        loss = self.last(torch.tanh(self.first(x))).square().mean()
        return Hidden(loss) if self.hides else loss


def thaw(rank: int, kind: str) -> list[torch.Tensor]:
    module, always = Halves(kind == "hidden"), kind != "find_unused_parameters"
    ddp = DistributedDataParallel(module, **({} if kind == "hidden" else {kind: True}))  # pyright: ignore[reportArgumentType]
    learn_graph(ddp, lambda: ddp(batch(rank, 0, 0)[0]))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.first.requires_grad_(False)
    for counts in EPOCHS:
        with Join([ddp, optimizer], divide_by_initial_world_size=False):
            for step in range(counts[rank]):
                module.first.requires_grad_(always or bool(step % 2))
                optimizer.zero_grad()
                loss: Any = ddp(batch(rank, 0, step)[0])
                (loss.loss if module.hides else loss).backward()
                optimizer.step()
        module.first.requires_grad_(False)
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", ["find_unused_parameters", "static_graph", "hidden"])
def test_frozen_when_a_block_is_entered(pool: Pool, kind: str) -> None:
    module = Halves(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for counts in EPOCHS:
        for step in range(max(counts)):
            module.first.requires_grad_(kind != "find_unused_parameters" or bool(step % 2))
            optimizer.zero_grad()
            losses = [module(batch(rank, 0, step)[0]) for rank in (0, 1) if step < counts[rank]]
            (torch.stack(losses).mean()).backward()
            optimizer.step()
    expected = [parameter.detach() for parameter in module.parameters()]
    for found in pool.run(thaw, kind, ranks=2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=10 * TOLERANCE)


def enters_with_a_frozen_sparse_layer(rank: int, wraps_frozen: bool) -> str:
    layer = nn.Embedding(3, 2, sparse=True)
    model = nn.Sequential(layer, nn.Linear(2, 1)).requires_grad_(True)
    layer.requires_grad_(not wraps_frozen)
    ddp = DistributedDataParallel(model)
    layer.requires_grad_(False)
    try:
        with Join([ddp]):
            pass
    except ValueError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("wraps_frozen", [False, True])
def test_a_sparse_layer_that_is_frozen_when_a_block_is_entered(ending: Ending, wraps_frozen: bool) -> None:
    for text in ending.run(enters_with_a_frozen_sparse_layer, wraps_frozen):
        assert text == "fine" if wraps_frozen else "sparse gradients" in text
