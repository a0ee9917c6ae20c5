"""What a run leaves to look at: :class:`Recorder`, the callback that brings it home from all ranks."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from joinables.trainer import Callback, Trainer, TrainModule

Record = dict[str, Any]
"""One rank's run: ``losses`` and ``snapshots`` (all parameters, as one vector) by step, for the steps at which the rank
had a batch, and in the end its ``state``, the module's state dict."""


def flat_parameters(module: torch.nn.Module) -> torch.Tensor:
    """A copy of all parameters, as one vector."""
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def flat_buffers(module: torch.nn.Module) -> torch.Tensor:
    """A copy of all buffers, as one vector: BatchNorm's running means and variances."""
    return torch.cat([buffer.flatten().float() for buffer in module.buffers()])


class Recorder(Callback):
    """Records all ranks.

    Attributes:
        records: one a rank.
        reports: what ``trainer.join_report`` said, one an epoch.
    """

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps = steps_per_epoch
        self._mine: Record = {"losses": {}, "snapshots": {}}
        self.records: list[Record] = []
        self.reports: list[dict[str, Any]] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.current_epoch * self._steps + batch_idx
        self._mine["losses"][step] = outputs.item()
        self._mine["snapshots"][step] = flat_parameters(module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.join_report is not None:
            self.reports.append(trainer.join_report.to_dict())

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.records = trainer.run.collective.all_gather_object({**self._mine, "state": module.state_dict()})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"records": self.records, "reports": self.reports}

    @override
    def load_state_dict(self, state: Any) -> None:
        self.records, self.reports = state["records"], state["reports"]
