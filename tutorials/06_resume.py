"""Tutorial 6: a rank is killed in the middle of an epoch, and a resumed fit ends as if nothing had happened.

A checkpoint holds more than weights: the optimizer's state, the number of batches of the epoch that each rank has
trained on, and the state of each rank's random number generators. So the resumed fit shuffles data and applies dropout
as the first fit would have done, and the weights are the same to the last bit. A checkpoint file is replaced, never
overwritten. A process that is killed at any moment therefore leaves a whole file.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from joinables.trainer import Callback, ModelCheckpoint, Trainer, TrainModule, WorkerDied


class Digits(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Disaster(Callback):
    """Callback that kills rank 1 without an exception or a message, as the loss of a machine does."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 45:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(*callbacks: Callback, ckpt_path: Path | None = None) -> tuple[torch.Tensor, float]:
    """Train two epochs, each with 32 batches on rank 0 and 31 on rank 1. Return the weights and the loss."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    loader = DataLoader(TensorDataset(images[:1000].float() / 16, labels[:1000]), 16, shuffle=True)
    module = Digits()
    trainer = Trainer(devices=2, accelerator="cpu", max_epochs=2, logger=False, seed=0, callbacks=callbacks)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return parameters_to_vector(module.parameters()), trainer.callback_metrics["loss"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        weights, loss = fit()
        print(f"Undisturbed, the loss of the last epoch is {loss:.6f}.")

        try:
            fit(ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=10), Disaster())
            raise AssertionError("rank 1 was to be killed")
        except WorkerDied as error:
            print(f"\nDisturbed, fit raises {type(error).__name__}: {error} No process is left behind.")

        last = Path(folder) / "last.ckpt"
        print(f"There is {last.name}, of step {torch.load(last)['global_step']}; the killed fit had come to step 45.")

        resumed_weights, resumed_loss = fit(ckpt_path=last)
        difference = (resumed_weights - weights).abs().max().item()
        print(f"\nResumed, the loss is {resumed_loss:.6f}, and the weights differ by {difference:g}.")
        assert difference == 0 and resumed_loss == loss, "a resumed fit must end like one that was not disturbed"
