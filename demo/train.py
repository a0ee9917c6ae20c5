"""The code that a user writes. It also runs alone: ``python -m demo.train``."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from demo.data import BATCH_SIZE, BATCHES, Shard, load
from joinables.trainer import Callback, Trainer, TrainModule


class Digits(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # No bias before BatchNorm, which subtracts it again: its gradient would be noise, and Adam would step on it.
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).double().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def train(epochs: int = 3, strategy: str = "ddp", callbacks: Callback | None = None) -> Trainer:
    """Train on ranks with 14, 44, 0 and 30 batches. The code is the same as for even ranks."""
    trainer = Trainer(
        devices=len(BATCHES), accelerator="cpu", strategy=strategy, max_epochs=epochs,
        callbacks=callbacks, logger=False,
    )  # fmt: skip
    digits, validation = load()
    trainer.fit(Digits(), DataLoader(digits, BATCH_SIZE, sampler=Shard()), DataLoader(validation, 64))
    return trainer


if __name__ == "__main__":
    trainer = train()
    print(f"{trainer.join_report}\naccuracy {trainer.callback_metrics['accuracy']:.1%}")
