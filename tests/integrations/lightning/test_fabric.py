"""Fabric: what it has set up is listed as it is."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

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

PAGE = Path(__file__).parents[3] / "docs" / "frameworks" / "lightning.md"


def launched(rank: int) -> Any:
    quiet(rank)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return fabric


def train(rank: int, case: Case, iterate: bool) -> list[torch.Tensor]:
    fabric = launched(rank)
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
    fabric = launched(rank)
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


def train_in_windows(rank: int, case: Case) -> tuple[list[torch.Tensor], list[list[float]]]:
    """Accumulate and clip; in each step, the mean loss as the page of Fabric has it, and a count of all ranks."""
    fabric = launched(rank)
    net = build(case)
    optimizer, scheduler = optimizers_of(net)
    model, wrapped = fabric.setup(net, optimizer)
    seen = list[list[float]]()
    code = re.search(r"## Means and evaluation in Fabric.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    with Join([model, wrapped, scheduler], divide_by_initial_world_size=False) as join:
        batches = [batch(rank, step) for step in range(case.counts[rank])]
        for x, y in join.iterate(batches, weigh=lambda data: len(data[0]), window=2):
            with fabric.no_backward_sync(model, enabled=not join.ends_window):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(join.scale(loss))
            if join.ends_window:
                fabric.clip_gradients(model, wrapped, max_norm=case.clip)
                wrapped.step()
                scheduler.step()
                wrapped.zero_grad()
            names: dict[str, Any] = {"torch": torch, "fabric": fabric, "join": join, "loss": loss}
            exec(code[1], names)
            seen.append([names["mean"].item(), fabric.all_reduce(torch.tensor(rank + 2), reduce_op="sum").item()])
    return flat(net, optimizer), seen


def test_windows_and_means(ending: Ending) -> None:
    case = Case(counts=(0, 3), accumulate=2, clip=0.3, epochs=1)
    for state, seen in ending.run(train_in_windows, case, ranks=2):
        torch.testing.assert_close(state, in_one_process(case), rtol=1e-4, atol=2e-6)
        assert [count for _, count in seen] == [5] * 3
        assert all(math.isfinite(mean) for mean, _ in seen)


def loses_its_state(rank: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    quiet(rank)
    fabric = Fabric(accelerator="cpu", devices=1)
    numbers: Any = list(range(4))
    loader = StatefulDataLoader(numbers, batch_size=1)
    wrapped = fabric.setup_dataloaders(loader)
    with Join([], process_group=None) as join:
        with pytest.raises(TypeError, match=r"wrapper\.state_dict = loader\.state_dict before the loop\. \[J075\]"):
            join.iterate(wrapped, resumable=True)
        wrapped.state_dict = loader.state_dict
        for step, _ in enumerate(join.iterate(wrapped, resumable=True), 1):
            assert join.loader_state()["_num_yielded"] == step


def test_a_loader_whose_state_is_hidden(ending: Ending) -> None:
    pytest.importorskip("torchdata")
    ending.run(loses_its_state, ranks=1)


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
