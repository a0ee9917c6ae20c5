"""The reference: a single process that trains on the same global batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from demo.data import BATCH_SIZE, STEPS, AllShards, load
from demo.record import Recorder
from demo.train import Digits
from joinables.trainer import Trainer


class OneProcess(Digits):
    """A module that trains on the batches of all ranks in one step.

    BatchNorm normalises each rank's batch alone, as it does in DDP. DDP does not average its running statistics. It
    broadcasts them from the lowest rank that had a batch to all ranks.
    """

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for images, labels in zip(*(part.split(BATCH_SIZE) for part in batch), strict=True):
            buffers = dict(self.net.named_buffers())
            if losses:  # not the lowest rank: DDP overwrites its statistics
                buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            losses.append(cross_entropy(functional_call(self.net, buffers, (images,)), labels))
        loss = torch.stack(losses).mean()
        self.log("loss", loss)
        return loss


def train_alone(epochs: int) -> tuple[Recorder, float]:
    """Train in this process; return the recorder and the accuracy on the validation images."""
    digits, validation = load()
    recorder = Recorder(STEPS)
    trainer = Trainer(devices=1, accelerator="cpu", max_epochs=epochs, callbacks=recorder, logger=False)
    training = DataLoader(digits, batch_sampler=AllShards())
    trainer.fit(OneProcess(), training, DataLoader(validation, 64))
    return recorder, trainer.callback_metrics["accuracy"]
