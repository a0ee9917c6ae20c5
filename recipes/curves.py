"""Recipe: curves of a fit of the trainer in TensorBoard.

A logger of the trainer is any object with `log_metrics` and `log_hyperparams`, and perhaps `finalize(status)`. The
trainer calls it on rank 0. The writer opens with the first value, because started processes cannot receive an open
file. Needs tensorboard.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from joinables.trainer import Trainer, TrainModule


class TensorBoard:
    """Logger that writes files for TensorBoard into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.writer = folder, None

    def open(self) -> Any:
        if self.writer is None:  # only rank 0 logs, and processes that are started cannot receive an open writer
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder))
        return self.writer

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.open().add_scalar(name, value, step)
        self.open().flush()

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        for name, value in params.items():
            self.open().add_text(f"hyperparameters/{name}", str(value))

    def finalize(self, status: str) -> None:
        self.writer = self.open().close()


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.hparams, self.net = {"width": 1}, torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - 3 * batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, 36).unsqueeze(1)), 4)  # ranks have 5 and 4 batches
    with tempfile.TemporaryDirectory() as name:
        trainer = Trainer(devices=2, accelerator="cpu", max_epochs=5, logger=TensorBoard(Path(name)), seed=0)
        trainer.fit(Line(), data)
        (file,) = Path(name).glob("events.out.tfevents.*")
        print(f"The curve of loss is in {file.name[:20]}. Show it: tensorboard --logdir FOLDER")
