"""State of one run on one rank: :class:`Run`, with its :class:`Task`, and its :class:`Position` in an epoch.

A run lives in the process of its rank, from the start of the rank's work to its end. The trainer lives longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from join import Join
from join.batch import map_tensors
from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.joinable import Burst, OnGroup
from joinables.modules import replaced
from joinables.trainer import rng
from joinables.trainer.data import UnevenDistributedSampler, set_epoch
from joinables.trainer.launch import Place
from joinables.trainer.metrics import MetricStore, Reduction
from joinables.trainer.module import TrainModule
from joinables.trainer.samples import is_movable
from joinables.trainer.strategy import Strategy


@dataclass(frozen=True)
class Task:
    """Task of all ranks of a run, from the process that started the run.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        saved: The checkpoint to start from, if any. A fit loads all of it, other stages load the module only.
        folder: The folder in which callbacks write their states for the process that started the run.
        home: The id of that process; the ranks may be processes started for it.
        random: The random state of that process, as of ``rng.capture``.
        seed: The seed of the order of a fit's training data.
    """

    stage: str
    saved: Mapping[str, Any] | None
    folder: Path
    home: int
    random: dict[str, Any]
    seed: int


class Snapshots(OnGroup, Burst):
    """Snapshots of a fit, which all ranks take together, including ranks that are out of data.

    Args:
        collective: The collective of the ranks.
        take: The function that takes a snapshot. Its argument is whether this rank still has data.
    """

    def __init__(self, collective: Collective, take: Callable[[bool], dict[str, Any] | None]) -> None:
        super().__init__(collective)
        self._take = take

    @property
    @override
    def join_name(self) -> str:
        return "a checkpoint"

    def take(self) -> dict[str, Any] | None:
        """Return a snapshot on one rank and ``None`` on the others; ranks that are out of data take part."""
        Join.notify_join_context(self)
        return self._take(True)

    @override
    def main_hook(self) -> None:
        self._take(False)


class Position:
    """Position of a rank in an epoch, and the rank's part of a snapshot.

    Args:
        metrics: The store of the epoch's metrics, which stays the same while a validation records into another store.
        epoch: The current epoch, from 0.

    Attributes:
        epoch: The current epoch, from 0.
        batches_trained: The number of the epoch's batches that this rank has trained on; 0 between epochs.
        sampler: The sampler that distributes the training samples, if the trainer made one.
        resume_from: This rank's part of the snapshot that the fit resumes from, until the first batches are read.
    """

    def __init__(self, metrics: MetricStore, epoch: int) -> None:
        self._metrics, self.epoch, self.batches_trained = metrics, epoch, 0
        self.sampler: UnevenDistributedSampler | None = None
        self.resume_from: dict[str, Any] | None = None
        self._random_at_start: dict[str, Any] | None = None
        """The random state before the epoch's first batch was read; ``None`` between epochs."""
        self._random_before_read: dict[str, Any] | None = None
        """The random state before the next batch was read."""
        self._random_to_resume: dict[str, Any] | None = None
        """The random state for a snapshot taken now; ``None`` for the present state.

        It is an older state if a fit that resumes from there repeats some work. This is so after ``redo_from_here``,
        and in a step, since the next batch was read before the step.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a snapshot taken now."""
        return self.resume_from or {
            "batches": self.batches_trained,
            "seed": None if self.sampler is None else self.sampler.seed,
            "start": None if self.sampler is None else self.sampler.start,
            "used": None if self.sampler is None else self.sampler.used(self.batches_trained),
            "metrics": self._metrics.state_dict(),
            "random_at_start": self._random_at_start,
            "random_before_read": self._random_before_read,
            "random": self._random_to_resume or rng.capture(),
        }

    def load_state_dict(self, part: dict[str, Any]) -> None:
        """Have the fit resume from this rank's part of a snapshot."""
        self.resume_from = part
        if part["random_at_start"] is None:  # within an epoch, the generators are restored as batches are read again
            rng.restore(part["random"])

    def begin_epoch(self, epoch: int, loader: Any) -> None:
        """Have ``loader`` yield an epoch, or the remainder of the epoch in which the fit resumes."""
        self.epoch = epoch
        self.redo_from_here()
        set_epoch(loader, epoch)
        if self.sampler is not None and self.resume_from is not None:
            self.sampler.set_epoch(epoch, self.resume_from["start"] or 0)

    def redo_from_here(self) -> None:
        """Have a fit that resumes repeat the work that follows: hooks before an epoch's batches, or a validation.

        Snapshots contain the random state of this moment until batches are read or the epoch ends.
        """
        self._random_to_resume = rng.capture()

    def batches(
        self, loader: Any, voting: Callable[[Iterator[Any]], Iterator[Any]] | None
    ) -> Iterator[tuple[int, Any, bool]]:
        """Yield the batches of an epoch, from the position in which the fit resumes.

        Each batch comes with its index and whether it is the last. The next batch is read before the current one is
        used, since nothing else shows which batch is the last.

        Args:
            loader: This rank's batches.
            voting: If ranks must have the same number of batches and do not know it, a function of the batches. It
                yields them until a rank has no more.
        """
        part, self.resume_from = self.resume_from, None
        resumed = part if part is not None and part["random_at_start"] is not None else None
        self.batches_trained = 0 if resumed is None else resumed["batches"]
        if resumed is not None:
            rng.restore(resumed["random_at_start"])
            self._metrics.clear()
            self._metrics.merge(resumed["metrics"])
        self._random_at_start, self._random_to_resume = rng.capture(), None
        skipped = 0
        if self.sampler is not None:
            self.sampler.skip = skipped = self.batches_trained
        numbered: Iterator[tuple[int, Any]] = enumerate(rng.iterate(loader), skipped)
        for _ in range(self.batches_trained - skipped):
            next(numbered, None)
        if resumed is not None:
            # The next batch was read before the last step drew random numbers.
            rng.restore(resumed["random_before_read"])
        if voting is not None:
            numbered = voting(numbered)
        self._random_before_read = rng.capture()
        following = next(numbered, None)
        if resumed is not None:
            rng.restore(resumed["random"])
        while following is not None:
            index, batch = following
            self._random_to_resume = rng.capture()
            following = next(numbered, None)
            yield index, batch, following is None

    def advance(self) -> None:
        """Count a batch as trained on: a fit that resumes from here starts with the next."""
        self.batches_trained += 1
        self._random_before_read, self._random_to_resume = self._random_to_resume, None

    def end_epoch(self) -> None:
        """Forget the epoch after its validation: a fit that resumes from here starts with the next epoch."""
        self.batches_trained = 0
        self._random_at_start = self._random_before_read = self._random_to_resume = None
        self._metrics.clear()


class Run:
    """A run on one rank: the module on its device, the collective of the ranks, the metrics, and the progress of a fit.

    The trainer and the module are the objects of this process, which may be copies of the user's.
    """

    apart: str = ""
    """Current place, if other ranks may not reach it, so that a call which waits for them is refused."""

    def __init__(self, trainer: Any, module: TrainModule, task: Task, place: Place) -> None:
        self.trainer, self.module, self.task, self.place = trainer, module, task, place
        self.device = trainer.strategy.device(trainer.accelerator, place)
        self.is_at_home = os.getpid() == task.home
        """Whether this is the process that has started the run."""
        self.collective: Collective = trainer.strategy.collective
        self.snapshots = Snapshots(self.collective, self.take_snapshot)
        self.store = MetricStore()
        self.takes_metrics = False
        """Whether metrics may be logged now."""
        self.samples = 1
        """The number of samples in the current batch."""
        self.latest: dict[str, float] = {}
        """The metrics of the current epoch or evaluation that loggers have not received."""
        self.position = Position(self.store, trainer.epochs)
        self.weight_unit: int | None = None
        """The number of samples that weigh 1 in gradients; ``None`` if all batches weigh the same."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []

    def set_up(self) -> None:
        """Call the hooks that come before the stage, which may add parts to the module."""
        self.module.to(self.device)
        if self.place.local_rank == 0:
            with replaced(self, "apart", "prepare_data"):
                self.module.prepare_data()
        self.trainer.strategy.meet("has prepared its data")
        self.call("setup", self.task.stage)
        self.module.to(self.device)

    def take(self, batch: Any, samples: int) -> Any:
        """Return the batch, with this number of samples, on the device."""
        self.samples = samples
        self.trainer.strategy.moves()
        if self.device.type == "cpu":
            return batch

        def taken(part: Any) -> Any:
            if is_movable(part):
                return part.to(self.device)
            return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), part)

        return pytree.tree_map(taken, batch, is_leaf=is_movable)

    def take_snapshot(self, active: bool) -> dict[str, Any] | None:
        """Return a snapshot of a fit on one rank; ``active`` says whether this rank still has data."""
        raise NotImplementedError

    def autocast(self) -> torch.autocast:
        """Return the context for a forward, in mixed precision or as the module is."""
        is_mixed = self.trainer.dtype is torch.bfloat16
        return torch.autocast(self.device.type, self.trainer.dtype if is_mixed else None, enabled=is_mixed)

    def hooks(self, name: str) -> list[Callable[..., Any]]:
        """Return a hook of the module, and those of all callbacks, in the order in which they are called."""
        trainer, module = self.trainer, self.module
        callbacks = (each for each in trainer.callbacks if hasattr(each, name))
        return [getattr(module, name), *(partial(getattr(each, name), trainer, module) for each in callbacks)]

    def call(self, hook: str, *args: Any) -> list[Any]:
        """Call a hook of the module and of all callbacks, and return their results."""
        return [call(*args) for call in self.hooks(hook)]

    def call_and_reduce(self, hook: str) -> dict[str, float]:
        """Call a hook of the module and of all callbacks, and return the metrics so far.

        Each sees the metrics that the previous ones have logged.
        """
        self.samples, metrics = 1, dict[str, float]()  # values logged in hooks weigh the same on all ranks
        for call in self.hooks(hook):
            call()
            metrics.update(self.reduce_metrics())
            self.store.clear()
        return metrics

    def log(self, name: str, value: Any, samples: int | None, reduce_fx: Reduction) -> None:
        """Record a metric; arguments as of ``TrainModule.log``. ``None`` stands for the samples of the batch."""
        if not self.takes_metrics:
            raise RuntimeError(
                f"Metric {name!r} was logged in a prediction or in teardown, which have no metrics. Log it in a step or"
                " another hook. [J272]"
            )
        self.store.record(name, value, self.samples if samples is None else samples, reduce_fx)

    def together(self, call: str) -> Strategy:
        """Return the strategy for a call that all ranks make.

        Raises:
            RuntimeError: If other ranks may not make the call. Nothing is sent.
        """
        if self.apart and self.collective.world_size > 1:
            raise RuntimeError(
                f"self.{call} was called in {self.apart}, where it could wait forever for ranks that do not call it."
                " Call it in a hook that all ranks run, such as on_train_epoch_end or on_validation_epoch_end, or pass"
                " the value to self.log. Training steps may call it if all ranks have equally many batches. [J703]"
            )
        return self.trainer.strategy

    def reduce_metrics(self) -> dict[str, float]:
        """Reduce the logged values over all ranks into the trainer's metrics; the sums stay. One object all-gather."""
        self.trainer.strategy.meet("reduces metrics")
        metrics = self.store.reduce(self.collective)
        self.latest.update(metrics)
        self.trainer.metrics.update(metrics)
        return metrics

    def fresh_metrics(self) -> AbstractContextManager[None]:
        """Return a context in which metrics are recorded in a separate store."""
        return replaced(self, "store", MetricStore())

    def backward(self, loss: torch.Tensor, *, sync: bool = True, **options: Any) -> None:
        """Add the gradients of the batch's loss; arguments as of ``Strategy.backward``."""
        weight = None if self.weight_unit is None else self.samples / self.weight_unit
        self.trainer.strategy.backward(loss, weight, sync=sync, **options)
