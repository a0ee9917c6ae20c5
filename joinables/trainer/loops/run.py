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
from join.transfer import broadcast_tree
from joinables.trainer.loops.collective_calls import CollectiveCall, Counters, Ticker
from joinables.trainer.loops.data import UnevenDistributedSampler
from joinables.trainer.loops.metrics import MetricStore
from joinables.trainer.loops.optimizers import Scheduler
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

    Args:
        trainer: the trainer, or this process's copy of it.
        module: the module, likewise.
        task: what to do.
    """

    def __init__(self, trainer: Trainer, module: TrainModule, task: Task) -> None:
        self.trainer, self.module, self.task, self.stage = trainer, module, task, task.stage
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

    def load_weights(self, weights: Any) -> None:
        """Load the module's state dict that rank 0 has, on all ranks."""
        self.module.load_state_dict(broadcast_tree(self.collective, weights, 0))

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks."""
        for callback in self.trainer.callbacks:
            getattr(callback, hook)(self.trainer, self.module, *args)

    @contextmanager
    def fresh_metrics(self) -> Generator[MetricStore]:
        """A context in which metrics are recorded in a store of their own."""
        outer, self.store = self.store, MetricStore()
        try:
            yield self.store
        finally:
            outer.reduced.update(self.store.reduced)
            self.store = outer


class FitRun(Run):
    """A run that trains: optimizers, counters, and where in its epoch it is. The fit loop fills it."""

    take_snapshot: CollectiveCall[dict[str, Any] | None]
    """Takes a snapshot of the fit, see ``joinables.trainer.checkpoints.snapshot``; all ranks call it."""

    def __init__(self, trainer: Trainer, module: TrainModule, task: Task) -> None:
        super().__init__(trainer, module, task)
        self.counters = Counters()
        self.ticker = Ticker(self.collective, lambda: self.call("on_shadowed_step"))
        self.is_weighted = False
        """Whether gradients are weighted by the number of samples in the batch, since batches may differ."""
        self.epoch = 0
        """The epoch under way, from 0."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Scheduler] = []
        self.scaler = self.precision.make_scaler()
        self.epoch_store = self.store
        """The metrics of the epoch under way, also while those of its validation are recorded."""
        self.batches_read = 0
        """How many batches of the epoch under way this rank has trained on; 0 between epochs."""
        self.sampler: UnevenDistributedSampler | None = None
        """What deals out the samples to train on, if the trainer does."""
        self.random_at_start: dict[str, Any] | None = None
        """The random state before the epoch's first batch was read; ``None`` between epochs."""
        self.random_before_read: dict[str, Any] | None = None
        """The random state before the batch that comes next was read."""
        self.random_to_resume: dict[str, Any] | None = None
        """The random state for a snapshot taken now; ``None`` if it is the present one.

        It is an older one where a fit that resumes from there does something again: in the hooks before an epoch's
        batches, in a step, before which the next batch was read, and in a validation.
        """
        self.resume_from: dict[str, Any] | None = None
        """This rank's part of the snapshot that the fit resumes from, until the first epoch's batches are read."""

    def backward(self, loss: torch.Tensor, *, sync: bool = True, **options: Any) -> None:
        """Add the gradients of the batch's loss; arguments as of ``Strategy.backward``."""
        self.strategy.backward(loss, float(self.samples) if self.is_weighted else None, sync=sync, **options)
        if sync:
            self.ticker()

    def advance(self) -> None:
        """Count a batch as trained on: a fit that resumes from here begins with the next."""
        self.batches_read += 1
        self.random_before_read, self.random_to_resume = self.random_to_resume, None

    def end_epoch(self) -> None:
        """Count the epoch as completed, with its validation: a fit that resumes from here begins with the next."""
        self.counters.epochs += 1
        self.batches_read = 0
        self.random_at_start = self.random_before_read = self.random_to_resume = None
        self.epoch_store.metrics.clear()
