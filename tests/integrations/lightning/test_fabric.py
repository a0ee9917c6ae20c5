"""Fabric: what it has set up is listed as it is."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

import torch
from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.ending import Ending
from tests.integrations.lightning.training import (
    FEATURES,
    Case,
    batch,
    build,
    flat,
    in_one_process,
    optimizers_of,
    quiet,
)


def train(rank: int, case: Case, iterate: bool) -> list[torch.Tensor]:
    quiet(rank)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = build(case)
    optimizer, scheduler = optimizers_of(net)
    model, wrapped = fabric.setup(net, optimizer)
    for epoch in range(case.epochs):
        with Join([model, wrapped, scheduler], divide_by_initial_world_size=False) as join:
            batches = [batch(rank, step, epoch) for step in range(case.counts[rank])]
            for x, y in join.iterate(batches, weigh=lambda data: len(data[0])) if iterate else batches:
                if not iterate:
                    join.weight = len(x)
                wrapped.zero_grad()
                fabric.backward(join.scale(nn.functional.mse_loss(model(x), y)))
                wrapped.step()
                scheduler.step()
    return flat(net, optimizer)


def wrap_twice(rank: int) -> None:
    quiet(rank)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = fabric.setup(DistributedDataParallel(nn.Linear(FEATURES, 1)))
    with pytest.raises(ValueError, match="is wrapped in DistributedDataParallel twice"):
        Join([model])


def test_a_module_that_is_wrapped_already(ending: Ending) -> None:
    ending.run(wrap_twice, ranks=2)


@pytest.mark.parametrize("iterate", [False, True])
@pytest.mark.parametrize("counts", [(5, 2), (0, 3)], ids=str)
def test_as_one_process(ending: Ending, counts: tuple[int, int], iterate: bool) -> None:
    case = Case(counts=counts)
    for state in ending.run(train, case, iterate, ranks=2):
        torch.testing.assert_close(state, in_one_process(case), rtol=1e-4, atol=2e-6)


def train_on_one_device(rank: int, case: Case) -> list[torch.Tensor]:
    fabric = Fabric(accelerator="cpu", devices=1)
    net = build(case)
    optimizer, scheduler = optimizers_of(net)
    model, wrapped = fabric.setup(net, optimizer)
    for epoch in range(case.epochs):
        with Join([model, wrapped, scheduler], divide_by_initial_world_size=False) as join:
            batches = [batch(1, step, epoch) for step in range(case.counts[1])]
            for x, y in join.iterate(batches, weigh=lambda data: len(data[0])):
                wrapped.zero_grad()
                fabric.backward(join.scale(nn.functional.mse_loss(model(x), y)))
                wrapped.step()
                scheduler.step()
    return flat(net, optimizer)


def test_on_one_device(ending: Ending) -> None:
    case = Case(counts=(0, 3))
    (state,) = ending.run(train_on_one_device, case, ranks=1, group=False)
    torch.testing.assert_close(state, in_one_process(case), rtol=1e-4, atol=2e-6)
