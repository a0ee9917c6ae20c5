"""The record of a run: :class:`Recorder`, a callback that collects losses and parameters of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from joinables.trainer import Callback, Trainer, TrainModule

Record = dict[str, Any]
"""One rank's run: ``losses`` and ``snapshots`` (all parameters as one vector) of each step in which the rank had a
batch, and ``state``, the module's state dict at the end."""


def flat_parameters(module: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all parameters, as one vector."""
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def flat_buffers(module: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all buffers, as one vector: BatchNorm's running means and variances."""
    return torch.cat([buffer.flatten().float() for buffer in module.buffers()])


class Recorder(Callback):
    """Callback that records all ranks.

    Attributes:
        records: one for each rank.
        reports: ``trainer.join_report`` of each epoch, as a dict.
    """

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps = steps_per_epoch
        self._mine: Record = {"losses": {}, "snapshots": {}}
        self.records: list[Record] = []
        self.reports: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.current_epoch * self._steps + batch_idx
        self._mine["losses"][step] = outputs.item()
        self._mine["snapshots"][step] = flat_parameters(module)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.join_report is not None:
            self.reports.append(trainer.join_report.to_dict())

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.records = trainer.run.collective.all_gather_object({**self._mine, "state": module.state_dict()})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"records": self.records, "reports": self.reports}

    @override
    def load_state_dict(self, state: Any) -> None:
        self.records, self.reports = state["records"], state["reports"]
