"""One run on one rank: :class:`Run`, with its :class:`Task`, and its :class:`Position` in an epoch.

A run lives from the start of a rank's work to its end, in the process of that rank; the trainer lives on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch
from typing_extensions import override

from join.batch import map_tensors, samples_in
from join.collectives import Collective
from join.joinable import Burst, OnGroup
from joinables.trainer import rng
from joinables.trainer.data import UnevenDistributedSampler, set_epoch
from joinables.trainer.metrics import MetricStore, Reduction
from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.strategy import Strategy

T = TypeVar("T")
Uneven: TypeAlias = Literal["join", "stop", "error"]


@dataclass(frozen=True)
class Task:
    """The task of all ranks of a run, and the process that has set it.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        saved: the checkpoint to begin from, if any: its module, and for a fit, all of it.
        folder: where callbacks leave their states for the process that asked for the run.
        home: the id of that process; the ranks may be processes started for it.
        random: the random state of that process, as of ``rng.capture``.
    """

    stage: str
    saved: Mapping[str, Any] | None
    folder: Path
    home: int
    random: dict[str, Any]


class Counters:
    """How far a fit is; a rank that ran out of data early takes over the others' counts when the block ends.

    Attributes:
        global_step: optimizer steps, over all fits.
        epochs: completed epochs, over all fits.
    """

    def __init__(self) -> None:
        self.global_step = self.epochs = 0

    def state_dict(self) -> dict[str, int]:
        """Both counts."""
        return {"global_step": self.global_step, "epochs": self.epochs}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over both counts."""
        self.global_step, self.epochs = state["global_step"], state["epochs"]


class TrainerState:
    """The part of a trainer that its runs read and change."""

    strategy: Strategy
    callbacks: list[Callback]
    dtype: torch.dtype
    seed: int | None
    max_epochs: int | None
    max_steps: int | None
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    uneven: Uneven
    counters: Counters
    metrics: dict[str, float]
    should_stop: bool


class CollectiveCall(OnGroup, Burst, Generic[T]):
    """A call with collectives that all ranks make together, also those that have run out of data.

    Args:
        collective: the ranks.
        function: its first argument says whether this rank still has data; the others come from the call, if any.
    """

    def __init__(self, collective: Collective, function: Callable[..., T]) -> None:
        super().__init__(collective)
        self._function = function
        self._join: Any = None  # while a block is open

    def __call__(self, *args: Any) -> T:
        """Call the function, and have joined ranks call it, too."""
        if self._join is not None:
            self._join.channel.announce(self)
        return self._function(True, *args)

    @override
    def attach(self, join: Any) -> None:
        self._join = join

    @override
    def detach(self) -> None:
        self._join = None

    @override
    def main_hook(self) -> None:
        self._function(False)


class Position:
    """Where in an epoch a rank is, and its part of a snapshot: what a fit that resumes from here needs of this rank.

    Args:
        metrics: the store of the epoch's metrics, also while those of its validation are recorded elsewhere.
        epoch: see below.

    Attributes:
        epoch: the epoch under way, from 0.
        batches_read: how many of its batches this rank has trained on; 0 between epochs.
        sampler: what deals out the samples to train on, if the trainer does.
        resume_from: this rank's part of the snapshot that the fit resumes from, until the first batches are read.
    """

    def __init__(self, metrics: MetricStore, epoch: int) -> None:
        self._metrics, self.epoch, self.batches_read = metrics, epoch, 0
        self.sampler: UnevenDistributedSampler | None = None
        self.resume_from: dict[str, Any] | None = None
        self._random_at_start: dict[str, Any] | None = None
        """The random state before the epoch's first batch was read; ``None`` between epochs."""
        self._random_before_read: dict[str, Any] | None = None
        """The random state before the batch that comes next was read."""
        self._random_to_resume: dict[str, Any] | None = None
        """The random state for a snapshot taken now; ``None`` if it is the present one.

        It is an older one where a fit that resumes from there does something again: see ``redo_from_here``, and in a
        step, before which the next batch was read.
        """

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a snapshot taken now."""
        return self.resume_from or {
            "batches": self.batches_read,
            "start": None if self.sampler is None else self.sampler.start,
            "used": None if self.sampler is None else self.sampler.used(self.batches_read),
            "metrics": self._metrics.state_dict(),
            "random_at_start": self._random_at_start,
            "random_before_read": self._random_before_read,
            "random": self._random_to_resume or rng.capture(),
        }

    def load_state_dict(self, part: dict[str, Any]) -> None:
        """Have the fit resume from this rank's part of a snapshot."""
        self.resume_from = part
        if part["random_at_start"] is None:  # else the generators are set as the batches are read again
            rng.restore(part["random"])

    def begin_epoch(self, epoch: int, loader: Any) -> None:
        """Have ``loader`` deal out an epoch, or what is left of the one in which the fit resumes."""
        self.epoch = epoch
        self.redo_from_here()
        set_epoch(loader, epoch)
        if self.sampler is not None and self.resume_from is not None:
            self.sampler.set_epoch(epoch, self.resume_from["start"] or 0)

    def redo_from_here(self) -> None:
        """Have a fit that resumes do again what follows: the hooks before an epoch's batches, or a validation.

        Snapshots have the random state of this moment until batches are read or the epoch ends.
        """
        self._random_to_resume = rng.capture()

    def batches(
        self, loader: Any, limit: int | None, voting: Callable[[Iterator[Any]], Iterator[Any]] | None
    ) -> Iterator[tuple[int, Any, bool]]:
        """The batches of an epoch, each with its index and whether it is the last; begins where the fit resumes.

        The next batch is read before the one at hand is used, since nothing else says which is the last.

        Args:
            loader: this rank's batches.
            limit: how many there may be.
            voting: given the batches, returns those before which all ranks still have one; for ranks that do not know
                each other's number.
        """
        part, self.resume_from = self.resume_from, None
        resumed = part if part is not None and part["random_at_start"] is not None else None
        self.batches_read = 0 if resumed is None else resumed["batches"]
        if resumed is not None:
            rng.restore(resumed["random_at_start"])
            self._metrics.clear()
            self._metrics.merge(resumed["metrics"])
        self._random_at_start, self._random_to_resume = rng.capture(), None
        coming: Iterator[tuple[int, Any]] = islice(enumerate(rng.iterate(loader)), limit)
        for _ in range(self.batches_read):
            next(coming, None)
        if resumed is not None:
            # The next batch was read before the last step drew random numbers.
            rng.restore(resumed["random_before_read"])
        if voting is not None:
            coming = voting(coming)
        self._random_before_read = rng.capture()
        following = next(coming, None)
        if resumed is not None:
            rng.restore(resumed["random"])
        while following is not None:
            index, batch = following
            self._random_to_resume = rng.capture()
            following = next(coming, None)
            yield index, batch, following is None

    def advance(self) -> None:
        """Count a batch as trained on: a fit that resumes from here begins with the next."""
        self.batches_read += 1
        self._random_before_read, self._random_to_resume = self._random_to_resume, None

    def end_epoch(self) -> None:
        """Forget the epoch, whose validation is over: a fit that resumes from here begins with the next."""
        self.batches_read = 0
        self._random_at_start = self._random_before_read = self._random_to_resume = None
        self._metrics.clear()


class Run:
    """A run on one rank: the module on its device, the collective of the ranks, the metrics; for a fit, how far it is.

    The trainer and the module are those of this process, which may be copies of the user's.
    """

    take_snapshot: CollectiveCall[dict[str, Any] | None]
    """Takes a snapshot of the fit, see ``joinables.trainer.checkpoint``; all ranks call it."""

    def __init__(self, trainer: TrainerState, module: TrainModule, task: Task, device: torch.device) -> None:
        self.trainer, self.module, self.task, self.device = trainer, module, task, device
        self.collective: Collective = trainer.strategy.collective
        module.to(self.device, torch.float64 if trainer.dtype is torch.float64 else None)
        self.store = MetricStore()
        self.takes_metrics = task.stage == "fit"
        """Whether metrics may be logged now."""
        self.samples = 1
        """The number of samples in the batch at hand."""
        self.position = Position(self.store, trainer.counters.epochs)
        self.weight_unit: int | None = None
        """How many samples weigh 1 in gradients, where batches may differ; ``None`` if all weigh the same."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=trainer.dtype is torch.float16)

    def take(self, batch: Any) -> Any:
        """The batch, on the device and in the run's precision; counts its samples."""
        self.samples = samples_in(batch)
        doubles = self.trainer.dtype is torch.float64
        if self.device.type == "cpu" and not doubles:
            return batch

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            dtype = torch.float64 if doubles and tensor.is_floating_point() else None
            return tensor.to(self.device, dtype, non_blocking=True)

        return map_tensors(taken, batch)

    def autocast(self) -> torch.autocast:
        """The context for a forward, in mixed precision or as the module is."""
        dtype = self.trainer.dtype
        is_mixed = dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.device.type, dtype if is_mixed else None, enabled=is_mixed)

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks."""
        for callback in self.trainer.callbacks:
            getattr(callback, hook)(self.trainer, self.module, *args)

    def log(self, name: str, value: Any, batch_size: int | None, reduce_fx: Reduction) -> None:
        """Record a metric; arguments as of ``TrainModule.log``."""
        if not self.takes_metrics:
            where = "a prediction, or in a callback's on_start or on_end"
            raise RuntimeError(f"metric {name!r} was logged in {where}, which have no metrics; log it elsewhere [J272]")
        self.store.record(name, value, self.samples if batch_size is None else batch_size, reduce_fx)

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
            self.store = outer

    def backward(self, loss: torch.Tensor, *, sync: bool = True, **options: Any) -> None:
        """Add the gradients of the batch's loss; arguments as of ``Strategy.backward``."""
        weight = None if self.weight_unit is None else self.samples / self.weight_unit
        self.trainer.strategy.backward(loss, weight, sync=sync, **options)
