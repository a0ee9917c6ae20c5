"""One run on one rank: :class:`Run`, and :class:`FitRun`, which also trains; :class:`Task` says what to do.

A run lives from the start of a rank's work to its end, in the process of that rank; the trainer lives on.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from join.batch import map_tensors, samples_in
from join.collectives import Collective
from joinables.trainer.loops.collective_calls import CollectiveCall, Counters
from joinables.trainer.loops.metrics import MetricStore
from joinables.trainer.loops.optimizers import Scheduler
from joinables.trainer.loops.position import Position
from joinables.trainer.loops.precision import Precision

if TYPE_CHECKING:
    from joinables.trainer.module import TrainModule
    from joinables.trainer.trainer import Trainer


@dataclass(frozen=True)
class Task:
    """What all ranks of a run are to do, and for which process.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        ckpt_path: the checkpoint file to begin from, if any.
        folder: where files go that processes hand each other; it is gone after the run.
        home: the id of the process that asked for the run; the ranks may be processes started for it.
        random: the random state of that process, as of ``rng.capture``.
    """

    stage: str
    ckpt_path: Path | None
    folder: Path
    home: int
    random: dict[str, Any]

    @property
    def is_at_home(self) -> bool:
        """Whether this is the process that asked for the run."""
        return os.getpid() == self.home


class Run:
    """A run on one rank: the module on its device, the collective of the ranks, and the metrics.

    The trainer and the module are those of this process, which may be copies of the user's.
    """

    def __init__(self, trainer: Trainer, module: TrainModule, task: Task) -> None:
        self.trainer, self.module, self.task = trainer, module, task
        self.strategy = trainer.strategy
        self.collective: Collective = self.strategy.collective
        self.rank = self.collective.rank
        self.device = trainer.device_of(self.rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.precision = Precision(trainer.precision, self.device.type)
        self.precision.convert_module(module)
        module.to(self.device)
        self.store = MetricStore()
        self.takes_metrics = task.stage == "fit"
        """Whether metrics may be logged now."""
        self.samples = 1
        """The number of samples in the batch at hand."""

    def take(self, batch: Any) -> Any:
        """The batch, on the device and in the run's precision; counts its samples."""
        self.samples = samples_in(batch)
        batch = self.precision.convert_batch(batch)
        if self.device.type == "cpu":
            return batch
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks."""
        for callback in self.trainer.callbacks:
            getattr(callback, hook)(self.trainer, self.module, *args)

    def reduce_metrics(self) -> dict[str, float]:
        """Reduce what was logged over all ranks, for the trainer too; the sums go on. One object all-gather."""
        values = self.store.reduce(self.collective)
        self.trainer.metrics.update(values)
        return values

    @contextmanager
    def fresh_metrics(self) -> Generator[None]:
        """A context in which metrics are recorded in a store of their own."""
        outer, self.store = self.store, MetricStore()
        try:
            yield
        finally:
            outer.reduced.update(self.store.reduced)
            self.store = outer


class FitRun(Run):
    """A run that trains: optimizers, counters, and the position in the epoch. The fit loop fills it."""

    take_snapshot: CollectiveCall[dict[str, Any] | None]
    """Takes a snapshot of the fit, see ``joinables.trainer.checkpoints.snapshot``; all ranks call it."""

    def __init__(self, trainer: Trainer, module: TrainModule, task: Task) -> None:
        super().__init__(trainer, module, task)
        self.counters = Counters()
        self.is_weighted = False
        """Whether gradients are weighted by the number of samples in the batch, since batches may differ."""
        self.position = Position(self.store)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Scheduler] = []
        self.scaler = torch.amp.GradScaler(self.device.type) if self.precision.scales_loss else None

    def backward(self, loss: torch.Tensor, *, sync: bool = True, **options: Any) -> None:
        """Add the gradients of the batch's loss; arguments as of ``Strategy.backward``."""
        self.strategy.backward(loss, float(self.samples) if self.is_weighted else None, sync=sync, **options)
