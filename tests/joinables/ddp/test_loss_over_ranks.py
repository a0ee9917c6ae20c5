"""Losses that contain collectives with gradients, in a loop that does not scale them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.ending import Ending
from tests.harness import Pool
from tests.training import batch, build

Loss = Callable[[torch.Tensor, Any], torch.Tensor]


def gathered(output: torch.Tensor, group: Any) -> torch.Tensor:
    return torch.cat(nn.all_gather(output.mean().reshape(1), group)).square().sum()


def reduced(output: torch.Tensor, group: Any) -> torch.Tensor:
    return nn.all_reduce(output.mean().reshape(1), group=group).square().sum()


def gathered_functionally(output: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_gather_tensor_autograd(output.mean().reshape(1), 0, group).square().sum()


def detached(output: torch.Tensor, group: Any) -> torch.Tensor:
    values = [torch.zeros(1) for _ in range(group.size())]
    dist.all_gather(values, output.detach().mean().reshape(1))
    return output.square().mean() + sum(values)


def train(rank: int, loss_of: Loss, *, scaled: bool = False, alone: bool = False) -> str:
    group = dist.group.WORLD
    if alone:
        group = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp]) as join, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # some of these collectives are deprecated
            for x, _ in join.iterate([batch(rank, 0, step) for step in range(2)], dummy="last"):
                loss = loss_of(ddp(x), group)
                (join.scale(loss) if scaled else loss).backward()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("loss_of", [gathered, reduced, gathered_functionally])
def test_it_is_refused(ending: Ending, loss_of: Loss) -> None:
    for text in ending.run(train, loss_of):
        assert "passes gradients to other ranks" in text


def right(rank: int) -> list[str]:
    return [train(rank, reduced, scaled=True), train(rank, reduced, alone=True), train(rank, detached)]


def test_it_is_scaled_or_passes_no_gradients(pool: Pool) -> None:
    assert pool.run(right) == [["fine"] * 3] * 3
