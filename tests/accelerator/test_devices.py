"""Which devices ranks use, and how torch is told of them: tensors that the library makes are where they should be."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join
from tests.accelerator import simulated
from tests.accelerator.target import CPU, Target
from tests.harness import Pool
from tests.training import FEATURES, TARGETS, TOLERANCE, TOLERANCE_OF_GPUS, assert_same, batch, build, flat_state

CPU_DEVICE = torch.device("cpu")
COUNTS = 2, 4, 0
WAYS = ["block", "weights", "zero", "iterate"]


def end_soon(target: Target) -> None:
    """Ranks that call a collective on different communicators hang. Let them die of it soon."""
    if target.is_simulated:
        simulated.configure(stall=10.0 if "PYTEST_XDIST_WORKER" in os.environ else 4.0, watchdog=1.0)


def train(rank: int, target: Target, way: str, told: str) -> dict[str, torch.Tensor]:
    """Train on a device of this rank's own, of which torch is told in one way or another."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    device = target.device_of(rank)
    end_soon(target)
    if target != CPU:
        torch.accelerator.set_device_index(0 if told == "nothing" else device.index)
    model = DistributedDataParallel(build("norm").to(device), device_ids=None if target == CPU else [device.index])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if way == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    mine = [tuple(part.to(device) for part in batch(rank, 0, step)) for step in range(COUNTS[rank])]
    torch.set_default_device(device if told == "a default" else None)
    try:
        with Join([model, optimizer], divide_by_initial_world_size=False) as join:
            for step, (x, y) in enumerate(join.iterate(mine) if way == "iterate" else mine):
                if way == "weights":
                    join.weight = 1.0 + rank + step
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                (join.scale(loss) if way in ("weights", "iterate") else loss).backward()
                optimizer.step()
    finally:
        torch.set_default_device(None)
    return flat_state(model.module.state_dict())


def check(pool: Pool, cpu: Pool, target: Target, way: str, told: str, **options: Any) -> None:
    """Ranks with a device each end as ranks on the CPU do, which other tests compare with one process."""
    if target.backend == "gloo":
        pytest.skip("all ranks use one GPU with gloo")
    ranks = target.ranks(len(COUNTS))
    first, *others = pool.run(train, target, way, told, ranks=ranks, backend=target.backend, **options)
    for other in others:
        assert_same(first, other)
    [expected, *_] = cpu.run(train, CPU, way, "", ranks=ranks)
    assert_same(first, expected, TOLERANCE if target.is_simulated else TOLERANCE_OF_GPUS)


@pytest.mark.parametrize("way", ["block", "iterate"])
def test_no_current_device(target: Target, accelerator_pool: Pool, pool: Pool, way: str) -> None:
    """Ranks have not called ``set_device``: the first device is the current one of each."""
    check(accelerator_pool, pool, target, way, "nothing")


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_default_device(target: Target, accelerator_pool: Pool, pool: Pool, way: str, over_group: bool) -> None:
    check(accelerator_pool, pool, target, way, "a default", over_group=over_group)


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_bound_device(target: Target, accelerator_pool: Pool, pool: Pool, way: str, over_group: bool) -> None:
    """``init_process_group`` was given a ``device_id``."""
    check(accelerator_pool, pool, target, way, "the current", over_group=over_group, bound=True)


class Halves(nn.Module):
    """A module on two devices."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, 8).to(first), nn.Linear(8, TARGETS).to(second)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).to(self.second.weight.device))


def train_halves(rank: int, target: Target, kind: str) -> dict[str, torch.Tensor]:
    end_soon(target)
    first, second = (torch.device(target.device, 2 * rank + half) for half in range(2))
    if target != CPU:
        torch.accelerator.set_device_index(first)
    model = DistributedDataParallel(Halves(first, second) if target != CPU else Halves(CPU_DEVICE, CPU_DEVICE))
    makers = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = makers[kind](model.parameters(), lr=0.05)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    with Join([model, optimizer, average], divide_by_initial_world_size=False):
        for step in range((2, 5)[rank]):
            x, y = batch(rank, 0, step)
            optimizer.zero_grad()
            output = model(x.to(next(model.parameters()).device))
            (output - y.to(output.device)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model.module)
    return flat_state(model.module.state_dict(), optimizer.state_dict()["state"], average.state_dict())


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_module_on_two_devices(target: Target, accelerator_pool: Pool, pool: Pool, kind: str) -> None:
    if not target.is_simulated and (target.backend == "gloo" or torch.cuda.device_count() < 4):
        pytest.skip("each of two ranks needs two GPUs of its own")
    first, other = accelerator_pool.run(train_halves, target, kind, ranks=2, backend=target.backend)
    assert_same(first, other)
    [expected, _] = pool.run(train_halves, CPU, kind, ranks=2)
    assert_same(first, expected, TOLERANCE if target.is_simulated else TOLERANCE_OF_GPUS)
