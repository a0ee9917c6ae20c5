"""A module with static_graph: after a step before the block, the reducer knows how often each gradient arrives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from join import Join, JoinError
from tests.ending import Ending
from tests.harness import Pool
from tests.training import TOLERANCE, batch, build, learn_graph
from tests.ways import Model

COUNTS = 3, 1, 0


class Twice(nn.Module):
    """A layer whose gradient arrives twice in a backward, and one whose gradient never arrives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.never = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.twice(x)), x, use_reentrant=True)  # pyright: ignore
        return x.square().mean()


def inputs(rank: int, step: int) -> torch.Tensor:
    return batch(rank, 0, step)[0].requires_grad_()


def train(rank: int) -> list[torch.Tensor]:
    model: Any = DistributedDataParallel(Twice(), static_graph=True, bucket_cap_mb=1e-5)
    learn_graph(model, lambda: model(inputs(rank, 9)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for step in range(COUNTS[rank]):
            optimizer.zero_grad()
            model(inputs(rank, step)).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_gradients_that_arrive_several_times_or_never(pool: Pool) -> None:
    alone = Twice()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        losses = [alone(inputs(rank, step)) for rank, count in enumerate(COUNTS) if step < count]
        torch.stack(losses).mean().backward()
        optimizer.step()
    for found in pool.run(train):
        torch.testing.assert_close(found, [each.detach() for each in alone.parameters()], atol=TOLERANCE, rtol=0)


def without_a_step_before(rank: int) -> str:
    model = DistributedDataParallel(build("mlp"), static_graph=True)
    try:
        with Join([model]):
            for step in range(COUNTS[rank]):
                model(batch(rank, 0, step)[0]).sum().backward()
    except JoinError as error:
        return str(error)
    return "fine"


def test_a_rank_without_data_in_the_first_backward(ending: Ending) -> None:
    for text in ending.run(without_a_step_before):
        assert "Rank 2 has no data in the backward of DistributedDataParallel(MLP), the first one" in text
        assert "Run one step on each rank before the block" in text


def with_data_everywhere(rank: int) -> float:
    model = DistributedDataParallel(build("mlp"), static_graph=True)
    with Join([model]):
        for step in range(1 + rank):
            model.zero_grad()
            model(batch(rank, 0, step)[0]).sum().backward()
    return float(next(model.parameters()).grad.sum())  # pyright: ignore[reportOptionalMemberAccess]


def test_with_data_in_the_first_backward_no_step_is_needed(pool: Pool) -> None:
    first, *others = pool.run(with_data_everywhere)
    assert others == pytest.approx([first] * 2)


def hidden(rank: int, counts: tuple[int, ...], in_loop: bool) -> str:
    module = Model("attribute")
    model = DistributedDataParallel(module, static_graph=True)
    try:
        with Join([model]) as join:
            rows = [batch(rank, 0, step) for step in range(counts[rank])]
            for x, y in join.iterate(rows) if in_loop else rows:
                model(x)
                module.loss(y).backward()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(("counts", "in_loop"), [((2, 2, 2), False), ((2, 1, 0), False), ((2, 2, 2), True)])
def test_a_loss_that_does_not_come_from_the_outputs(ending: Ending, counts: tuple[int, ...], in_loop: bool) -> None:
    """DDP itself reduces nothing then, and says nothing: each rank would train on its own."""
    *active, last = ending.run(hidden, counts, in_loop)
    assert "[J803]" in last if counts[-1] else "[J802]" in last or "[J803]" in last  # which of the ranks is the first
    for text in active:
        assert "No gradient has reached the output of the forward" in text or "[J802]" in last


class Beside(nn.Module):
    """A learned weight of the loss, which the forward does not use, so that its gradient comes ahead of the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weight = nn.Linear(4, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        return (output * torch.exp(-self.weight) + self.weight).sum()


def train_beside(rank: int, in_loop: bool) -> list[torch.Tensor]:
    module = Beside()
    model = DistributedDataParallel(module, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        rows = [inputs(rank, step) for step in range(2)]
        for x in join.iterate(rows) if in_loop else rows:
            optimizer.zero_grad()
            module.loss(model(x)).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_parameter_whose_gradient_comes_ahead_of_the_output(pool: Pool, in_loop: bool) -> None:
    alone = Beside()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        torch.stack([alone.loss(alone(inputs(rank, step))) for rank in range(3)]).mean().backward()
        optimizer.step()
    for found in pool.run(train_beside, in_loop):
        torch.testing.assert_close(found, [each.detach() for each in alone.parameters()], atol=TOLERANCE, rtol=0)
