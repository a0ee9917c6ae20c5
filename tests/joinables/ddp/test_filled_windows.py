"""Steps that only fill a window: all ranks run them on dummies, and they leave no trace."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.harness import Pool


class Two(nn.Module):
    """Two parameters, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        return (x * (self.right if right else self.left)).sum()


def fills(rank: int) -> tuple[float, bool]:
    net = Two()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for x in join.iterate([torch.full((1,), 1.0 + rank)], window=2, fill_window=True):
            with nullcontext() if join.ends_window else ddp.no_sync():
                join.scale(ddp(x, right=join.shadowing)).backward()
    return net.left.grad.item(), net.right.grad is None


def test_a_parameter_that_only_filling_steps_use_has_no_gradient(pool: Pool) -> None:
    assert pool.run(fills, ranks=2) == [(1.5, True)] * 2


def keeps(rank: int) -> list[float]:
    """Gradients are kept; a dummy alone uses the second parameter in the second step."""
    net = Two()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for step, x in enumerate(join.iterate([torch.full((1,), 1.0 + rank)] * (2 - rank))):
            (ddp(x, right=step == 0 or join.shadowing)).backward()
    return [0.0 if parameter.grad is None else parameter.grad.item() for parameter in (net.left, net.right)]


def test_a_parameter_that_dummies_alone_use_keeps_its_gradient(pool: Pool) -> None:
    assert pool.run(keeps, ranks=2) == [[1.0, 1.5]] * 2
