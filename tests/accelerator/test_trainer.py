"""The trainer on an accelerator ends as it does on the CPU, and waits for the device as often as there are epochs."""

from __future__ import annotations

import gc
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from joinables.trainer import DDPStrategy, LaunchError, Trainer, TrainModule
from joinables.trainer.metrics import MetricStore
from tests.accelerator import device_module
from tests.accelerator.target import CPU, SIMULATED, Target, device_of_rank, prepare_simulated, waits
from tests.ending import Ending
from tests.harness import Pool, at_night
from tests.joinables.trainer.ranks import trainer

SAMPLES = 50  # not as many batches on both ranks
EPOCHS = 2


seeded: list[int] = []
"""The device whose random numbers this process has been given, where a trainer has started it."""


class Regression(TrainModule):
    """Trains on a device of this type, or says so."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.device_type = device

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert batch[0].device.type == self.net[0].weight.device.type == self.device_type
        assert seeded in ([], [self.trainer.global_rank])
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))), 6)


def frees_memory(device: Any) -> bool:
    """Whether all memory of the device is free soon, after one collection of garbage or another."""
    deadline = time.monotonic() + 5
    while device.memory_allocated() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return device.memory_allocated() == 0


def fit(rank: int, target: Target, shards: bool) -> tuple[torch.Tensor, dict[str, float], Counter[str]]:
    strategy = {"shard_optimizers": shards}
    fitting, module = (
        trainer(accelerator=target.device, max_epochs=EPOCHS, strategy=strategy),
        Regression(target.device),
    )
    device = torch.get_device_module(target.device)
    with waits(target) as found, mock.patch.object(device, "empty_cache", create=True) as empties:
        fitting.fit(module, loader(), loader())
    assert module.net[0].weight.device.type == "cpu" and empties.call_count == (target.device != "cpu")
    assert not target.is_simulated or frees_memory(device)
    parameters = nn.utils.parameters_to_vector(module.parameters()).detach()
    return parameters, fitting.callback_metrics, Counter(wait.function for wait in found if wait.is_ours)


@pytest.mark.parametrize("shards", [False, True])
def test_fit(target: Target, accelerator_pool: Pool, pool: Pool, shards: bool) -> None:
    backend = "gloo" if target.backend == "gloo" else f"cpu:gloo,{target.device}:{target.backend}"
    ranks = 2 if target.is_simulated else min(2, torch.cuda.device_count())  # a trainer gives each a GPU of its own
    for found, expected in zip(
        accelerator_pool.run(fit, target, shards, ranks=ranks, backend=backend),
        pool.run(fit, CPU, shards, ranks=ranks),
        strict=True,
    ):
        torch.testing.assert_close(found[0], expected[0], atol=2e-6, rtol=0.0)
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
        assert found[2]["joinables/trainer/metrics.py:_fetch"] <= 3 * EPOCHS  # and each epoch has 5 steps


class Registers(DDPStrategy):
    """Its workers know the simulated accelerator, which is registered in them before their process group is made."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        prepare_simulated(0)
        device_module.set_rng_state = lambda *_: seeded.append(device_module.current_device())
        self.__dict__.update(state)


def launch(rank: int) -> None:
    """A script that trains on what accelerator there is, on two devices of it."""
    module = Regression("sim")
    run = Trainer(devices=2, max_epochs=1, strategy=Registers(), logger=False)
    run.fit(module, loader())
    assert run.global_step == 5 and module.net[0].weight.device.type == "cpu"
    dist.destroy_process_group()
    with pytest.raises(LaunchError, match="because it has used its GPU"):
        Trainer(accelerator="gpu", devices=2, strategy="ddp_fork", logger=False).fit(module, loader())


@at_night
@pytest.mark.skipif(bool(SIMULATED.why_not()), reason=SIMULATED.why_not())
def test_processes_that_are_started(ending: Ending, built: None) -> None:
    [end] = ending.start(launch, ranks=1, prepare=prepare_simulated).ends()
    assert end.code == 0, end.text


def log(rank: int, target: Target) -> None:
    """Numbers that are logged are as they were then, and are of another kind than the last ones, or refused."""
    device, store = device_of_rank(target), MetricStore()
    number = torch.ones((), device=device)
    with waits(target) as found:
        for _ in range(3):
            store.record("number", number, 1, "sum")
            number += 1
        store.record("half", number.half().reshape(1, 1), 1)
    assert not [wait for wait in found if wait.is_ours]
    with pytest.raises(ValueError, match="'number' was logged with reduce_fx='max'"):
        store.record("number", number, 1, "max")
    with pytest.raises(TypeError, match="not one number"):
        store.record("numbers", torch.ones(2, device=device), 1)
    assert {name: fields["parts"] for name, fields in store.state_dict().items()} == {"number": [6.0], "half": [4.0]}
    store.record("number", number, 1, "sum")
    store.clear()
    assert store.state_dict() == {}


def test_what_is_logged_stays_on_the_device(target: Target, accelerator_pool: Pool) -> None:
    accelerator_pool.run(log, target, ranks=1, backend=target.backend)
