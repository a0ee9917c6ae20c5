"""Units of weights in a plain block: they change with the weights, and no gradient shows it."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.harness import Pool
from tests.training import TOLERANCE, assert_same, flat_state

WEIGHT = 50.0  # far from the first unit, which is 1


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)) for _ in range(2)]


def of_both(nets: list[nn.Module], step: int) -> torch.Tensor:
    x = torch.full((2, 4), 0.1 + step)
    return (nets[0](x) + nets[1](x)).square().mean()


def steps_shards(rank: int) -> dict[str, torch.Tensor]:
    """The rank without data steps shards of both modules, on the gradients that it has shadowed."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddps: list[nn.Module] = [DistributedDataParallel(net) for net in modules()]
    parameters = list(chain(*(ddp.parameters() for ddp in ddps)))
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    with Join([*ddps, optimizer]) as join:
        for step in range(0 if rank else 3):
            join.weight = WEIGHT
            optimizer.zero_grad()
            join.scale(of_both(ddps, step)).backward()
            optimizer.step()
    return flat_state([ddp.state_dict() for ddp in ddps])


def test_the_unit_of_several_modules(pool: Pool) -> None:
    nets = modules()
    optimizer = torch.optim.SGD(chain(*(net.parameters() for net in nets)), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        of_both(nets, step).backward()
        optimizer.step()
    expected = list(flat_state([net.state_dict() for net in nets]).values())
    for state in pool.run(steps_shards, ranks=2):
        assert_same(dict(zip(state, state.values(), strict=True)), dict(zip(state, expected, strict=True)), TOLERANCE)


class Product(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: float) -> torch.Tensor:
        return (self.factor * x).sum()


def scales_before(rank: int) -> float:
    """Both losses are scaled before the first backward, after which the unit is another one."""
    ddp = DistributedDataParallel(Product(torch.float32))
    with Join([ddp]) as join:
        for _ in range(0 if rank else 1):
            join.weight = WEIGHT
            losses = [join.scale(ddp(x)) for x in (1.0, 10.0)]
            for loss in losses:
                loss.backward()
    return ddp.module.factor.grad.item()


def test_a_loss_that_was_scaled_before_the_unit_changed(pool: Pool) -> None:
    assert pool.run(scales_before, ranks=2) == pytest.approx([11.0, 11.0])


def in_half_precision(rank: int) -> list[float]:
    ddp, found = DistributedDataParallel(Product(torch.float16)), list[float]()
    with Join([ddp]) as join:
        for x in () if rank else (1.0, 100.0):
            ddp.zero_grad()
            join.weight = 1000.0
            join.scale(ddp(x)).backward()
            found.append(ddp.module.factor.grad.item())
    return found


def test_weights_do_not_overflow_half_precision(pool: Pool) -> None:
    """A gradient of 100 times a weight of 1,000 would."""
    assert pool.run(in_half_precision, ranks=2) == [[1.0, 100.0], []]
