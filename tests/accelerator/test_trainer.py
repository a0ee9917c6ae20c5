"""The trainer on an accelerator ends as it does on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from joinables.trainer import DDPStrategy, Launcher, Trainer, TrainModule
from tests.accelerator import simulated
from tests.accelerator.target import SIMULATED, prepare_simulated

SAMPLES = 50  # not as many batches on both ranks
pytestmark = pytest.mark.skipif(bool(SIMULATED.why_not()), reason=SIMULATED.why_not())


class SimulatedStrategy(DDPStrategy):
    """Starts ranks on the simulated accelerator, which is registered in them before their process group is made."""

    @override
    def launch(self, world_size: int, accelerator: str, fn: Callable[..., Any], *args: Any) -> Any:
        backend = f"cpu:gloo,{SIMULATED.device}:{SIMULATED.backend}"
        return Launcher(world_size, start_method=self.start_method, backend=backend).launch(fn, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        simulated.install()
        self.__dict__.update(state)


class SimulatedTrainer(Trainer):
    @override
    def device_of(self, rank: int) -> torch.device:
        prepare_simulated(rank)
        return torch.device("sim", rank)


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def fit(trainer: Trainer) -> tuple[torch.Tensor, dict[str, float]]:
    samples = TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)))
    module = Regression()
    trainer.fit(module, DataLoader(samples, 6), DataLoader(samples, 6))
    return nn.utils.parameters_to_vector(module.parameters()).detach(), trainer.metrics


@pytest.mark.parametrize("shards", [False, True])
def test_fit(server: None, built: None, shards: bool) -> None:
    strategies = [kind("forkserver", shard_optimizers=shards) for kind in (SimulatedStrategy, DDPStrategy)]
    (found, metrics), (expected, others) = (
        fit(cls(devices=2, accelerator="cpu", max_epochs=2, strategy=strategy))
        for cls, strategy in zip((SimulatedTrainer, Trainer), strategies, strict=True)
    )
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0.0)
    assert metrics == pytest.approx(others, rel=1e-5)
