"""Tutorial 7: the same script with the trainer's processes and with torchrun's.

    python tutorials/07_torchrun.py
    torchrun --standalone --nproc-per-node 2 tutorials/07_torchrun.py

In the first command, the trainer starts two processes. In the second command, torchrun starts
them. Each process then runs the script from top to bottom, reads its rank from the environment, and trains as that
rank. With both commands, every process has the trained weights after `fit`, and the weights are the same to the last
bit.
"""

import hashlib
import os

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from joinables.trainer import Trainer, TrainModule


class Digits(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).double().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def checksum(module: torch.nn.Module) -> str:
    weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    torch.set_num_threads(1)  # as under torchrun: more threads would add in a different order, and round differently
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    training = TensorDataset(images[:1000].float() / 16, labels[:1000])
    validation = TensorDataset(images[1000:].float() / 16, labels[1000:])

    module = Digits()
    trainer = Trainer(devices=2, accelerator="cpu", max_epochs=3, logger=False, seed=0)
    trainer.fit(module, DataLoader(training, 16, shuffle=True), DataLoader(validation, 16))

    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "the trainer"
    if trainer.global_rank == 0:  # under torchrun, each process runs the script; only rank 0 prints
        print(f"Processes started by {launcher}; {[row.steps for row in trainer.join_report.ranks]} batches an epoch.")
        print(
            f"result: accuracy {trainer.callback_metrics['accuracy']:.4f}, checksum of the weights {checksum(module)}"
        )
