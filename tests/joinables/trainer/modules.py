"""Modules and data of the trainer's tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from joinables.trainer import FileCheckpointIO, TrainModule

FEATURES, CLASSES = 6, 3


def dataset(samples: int = 50, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(x, (x[:, :CLASSES] + 0.3 * x[:, CLASSES:]).argmax(1))


def loader(samples: int = 50, batch_size: int = 6, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(samples), batch_size, **options)


def write_checkpoint(state: Mapping[str, Any], path: str | Path) -> None:
    FileCheckpointIO().save_checkpoint(dict(state), str(path))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    return FileCheckpointIO().load_checkpoint(str(path))


class Classifier(TrainModule):
    """A small classifier, with everything that a fit can carry along."""

    def __init__(
        self, dropout: float = 0.0, optimizer: str = "adam", scheduler: str = "epoch", clip: float | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))
        self.kind, self.interval, self.clip = optimizer, scheduler, clip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def shared_step(self, batch: Any, stage: str) -> torch.Tensor:
        x, y = batch
        scores = self(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.log(f"{stage}_loss", loss)
        self.log(f"{stage}_accuracy", (scores.argmax(1) == y).double().mean())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.shared_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_step(batch, "test")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.clip_gradients(optimizer, self.clip)

    def configure_optimizers(self) -> Any:
        kinds: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        optimizer = kinds[self.kind](self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class KillsWhoWritesIt:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError
