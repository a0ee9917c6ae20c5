"""A fit over another library than torch's, on uneven data, compared with a single process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from join.collectives import Collective
from joinables.trainer import Strategy, Trainer
from tests.joinables.trainer.modules import Classifier, loader
from tests.training import TOLERANCE, assert_same, flat_state

OPTIONS: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2}
SAMPLES, BATCH = 27, 4


class Normalised(Classifier):
    """Has buffers, and a parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.spare = torch.nn.Parameter(torch.ones(3))
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.norm(x)
        return super().forward(x)


def alone(ranks: int, epochs: int, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
    """Return what a single process trains on the batches of all ranks in each step, and its loss in validation."""
    module = Normalised()
    single = Trainer(strategy=Strategy(), devices=1, **{**OPTIONS, **options, "max_epochs": epochs})
    single.fit(module, loader(SAMPLES, BATCH * ranks), loader(9, BATCH))
    state = {name: each for name, each in module.state_dict().items() if "norm" not in name}
    return flat_state(state), single.callback_metrics["val_loss"]


def check_trainer(collective: Collective, name: str) -> None:
    """Check fits over a library's real ranks."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(collective.broadcast_object(own, 0))
        for accumulated in (1, 2):
            check_fits(collective, name, folder, accumulate_grad_batches=accumulated)
            collective.barrier()  # rank 0 removes the folder


def check_fits(collective: Collective, name: str, folder: Path, **options: Any) -> None:
    """Fit over the library's ranks, resume from a checkpoint, and compare both with a single process.

    Args:
        collective: The ranks, which have their own collective here, beside the trainer's.
        name: The name of the strategy.
        folder: A folder of all ranks.
        **options: Options of the trainers.
    """
    ranks = collective.world_size
    (two, _), (three, loss) = (alone(ranks, epochs, options) for epochs in (2, 3))
    module, again = Normalised(), Normalised()
    first = Trainer(strategy=name, default_root_dir=folder, **{**OPTIONS, **options})
    assert (first.world_size, first.global_rank) == (ranks, collective.rank)
    first.fit(module, loader(SAMPLES, BATCH))
    assert first.save_checkpoint(folder / "end.ckpt") is (collective.rank == 0)
    collective.barrier()
    more = Trainer(strategy=name, **{**OPTIONS, **options, "max_epochs": 3})
    more.fit(again, loader(SAMPLES, BATCH), loader(9, BATCH), ckpt_path=folder / "end.ckpt")
    found, resumed = flat_state(module.state_dict()), flat_state(again.state_dict())
    assert_same({each: found[each] for each in two}, two, TOLERANCE)
    assert_same({each: resumed[each] for each in three}, three, TOLERANCE)
    assert more.callback_metrics["val_loss"] == pytest.approx(loss)
    for of_rank in (found, resumed):
        assert_same(of_rank, collective.broadcast_object(of_rank, 0))
