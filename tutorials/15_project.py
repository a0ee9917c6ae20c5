"""Tutorial 15: a project with the trainer: validation, early stopping, the best checkpoint and a log.

The trainer writes the metrics of each epoch into a CSV file.
On a terminal, it also shows them. After the fit, the best checkpoint is tested on other images.
"""

import csv
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from joinables.trainer import CSVLogger, ModelCheckpoint, Trainer, TrainModule


class Digits(TrainModule):
    def __init__(self, width: int = 64):
        super().__init__()
        torch.manual_seed(0)
        self.hparams = {"width": width}  # the trainer logs them
        self.losses = []
        self.net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.score(batch, "val")

    def on_train_epoch_end(self):
        """Stop after two epochs without a better loss."""
        self.losses.append(self.trainer.callback_metrics["val_loss"])
        self.trainer.should_stop = len(self.losses) - self.losses.index(min(self.losses)) > 2

    def test_step(self, batch, batch_idx):
        self.score(batch, "test")

    def score(self, batch, stage):
        images, labels = batch
        scores = self.net(images)
        self.log(f"{stage}_loss", cross_entropy(scores, labels))
        self.log(f"{stage}_accuracy", (scores.argmax(1) == labels).double().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(folder: Path) -> None:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    parts = random_split(TensorDataset(images.float() / 16, labels), [1000, 397, 400], torch.Generator().manual_seed(0))
    training, validation, test = (DataLoader(part, 16, shuffle=part is parts[0]) for part in parts)

    best = ModelCheckpoint(folder, monitor="val_loss")
    trainer = Trainer(devices=2, accelerator="cpu", max_epochs=30, callbacks=best, logger=CSVLogger(folder), seed=0)
    trainer.fit(Digits(), training, validation)
    assert trainer.should_stop and trainer.epochs < 30

    (tested,) = trainer.test(Digits(), test, ckpt_path=best.best_model_path)
    assert tested["test_accuracy"] > 0.9
    print(f"{Path(best.best_model_path).name} is the best of {trainer.epochs} checkpoints.")
    with (folder / "metrics.csv").open() as log:
        rows = [row for row in csv.DictReader(log) if row["val_loss"]]
    assert min(rows, key=lambda row: float(row["val_loss"]))["epoch"] == str(trainer.epochs - 2)
    print(f"The log has {len(rows)} epochs. The last one: {', '.join(name for name in rows[-1] if rows[-1][name])}.")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
