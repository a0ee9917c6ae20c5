"""A run on one rank: its state and its loops, :class:`Run` and :class:`Fit`, with the :class:`Task` of all ranks.

A run lives in the process of its rank, from the start of the rank's work to its end. The trainer lives longer.

The order of collectives, on every rank::

    start      a broadcast of the state to resume from, from rank 0; DDP's own, as the module is wrapped
               one object all-gather for each loader with a sampler of the user's
    an epoch   one object all-gather: the numbers and sizes of all ranks' batches
               a vote: has every rank wrapped the same parameters before? If not, as at the start
               the block: see joinables.ddp; a rank that is out of data shadows the others
                   with sync_batchnorm and unknown lengths, a vote before each batch: does every rank have another one?
               one object all-gather each: the metrics of the epoch, of its validation, of each hook at its end
               checkpoints at its end: see joinables.trainer.checkpoint

Within a block, a rank that accumulates k batches runs one synchronised backward for every k batches, and one for the
remainder at its end. So the n-th synchronised backward of one rank meets the n-th of every other rank.

A snapshot is everything that a fit resumes from. It has the same form in checkpoint files, for a second ``fit`` of the
same trainer, and on its way from processes that were started to the process that started them. It is a dict of plain
data and tensors::

    epochs, global_step          counters
    module                       the module's state dict
    optimizers, schedulers       a list each, in the order of configure_optimizers; sharded state is put together
    callbacks                    by state_key
    metrics                      the latest value of each
    ranks                        a list, by rank: batches trained on in the current epoch, the seed of its order, its
                                 metrics so far, random numbers

An epoch counts as completed after its validation and the steps of its schedulers. A fit that resumes from an earlier
snapshot of the epoch skips all batches and validates again.

Taking a snapshot is collective, since each rank holds a part. Ranks without data take part through ``Snapshots``::

    all-gather of the ranks' parts; the lowest rank with data becomes the writer
    for each sharded optimizer: its shards go to the writer
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
from typing_extensions import override

from join import Join
from join.batch import map_tensors
from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.errors import add_note
from join.joinable import Burst, OnGroup
from join.transfer import broadcast_tree
from joinables._torch.objects import mark_stepped, run_hooks
from joinables.modules import keeping_modes, replaced
from joinables.trainer import rng
from joinables.trainer.checkpoint import keep_trained
from joinables.trainer.data import (
    Plan,
    Position,
    SampleCounter,
    compare_first,
    counts_samples,
    gather_on_first,
    sampler_of,
    share,
)
from joinables.trainer.launch import Place
from joinables.trainer.loggers import Log, Screen
from joinables.trainer.metrics import MetricStore, Reduction, monitored
from joinables.trainer.module import TrainModule, overrides, own_tensors

logger = logging.getLogger("joinables")


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
        trained: The trained weights, if that process has trained them itself.
    """

    stage: str
    saved: Mapping[str, Any] | None
    folder: Path
    home: int
    random: dict[str, Any]
    seed: int
    trained: dict[str, Any] = field(default_factory=dict[str, Any])


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


class Run:
    """A run on one rank: the module on its device, the collective of the ranks, the metrics, and the progress of a fit.

    The trainer and the module are the objects of this process, which may be copies of the user's.
    """

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
        shown = [*trainer.loggers, Screen()] if trainer.enable_progress_bar else trainer.loggers
        self.log = Log(shown if place.rank == 0 and task.stage != "predict" else [])
        self.position = Position(self.store, trainer.epochs)
        self.weight_unit: int | None = None
        """The number of samples that weigh 1 in gradients; ``None`` if all batches weigh the same."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.snapshot: dict[str, Any] | None = None
        """The snapshot at the end of a fit, on rank 0."""

    def set_up(self) -> None:
        """Call the hooks that come before the stage, which may add parts to the module."""
        self.module.to(self.device)
        if self.place.local_rank == 0:
            self.module.prepare_data()
        self.trainer.strategy.meet("has prepared its data")
        self.call("setup", self.task.stage)
        self.module.to(self.device)
        self.log.begin(getattr(self.module, "hparams", None))

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
        """Return the snapshot on the rank that writes it, ``None`` elsewhere; called on all ranks.

        Args:
            active: Whether this rank still has data; outside a block, all ranks are active.
        """
        parts = self.collective.all_gather_object({**self.position.state_dict(), "active": active})
        writer = next(rank for rank, part in enumerate(parts) if part["active"])
        for optimizer in self.optimizers:
            consolidate: Any = getattr(optimizer, "consolidate_state_dict", None)
            if consolidate is not None:
                consolidate(to=writer)
        if self.collective.rank != writer:
            return None
        state: dict[str, Any] = {
            **self.trainer.state_dict(),
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [stepped.scheduler.state_dict() for stepped in self.schedulers],
            "ranks": parts,
        }
        self.call("on_save_checkpoint", state)
        return state

    def load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Load the weights of a snapshot, the same on all ranks, and return the snapshot as hooks have changed it."""
        loaded = dict(state)
        self.call("on_load_checkpoint", loaded)
        if "module" in loaded:  # the last fit of the trainer kept the weights in the module
            self.module.load_state_dict(loaded["module"])
        return loaded

    def hooks(self, name: str) -> list[Callable[..., Any]]:
        """Return a hook of the module, and the same hook of all callbacks, in their order, and of the log.

        The log comes before callbacks that write files, so no fit resumes from an epoch whose row is lost.
        """
        trainer, module = self.trainer, self.module
        callbacks = (each for each in [*trainer.callbacks, self.log] if hasattr(each, name))
        callbacks = sorted(callbacks, key=lambda each: each.is_last)
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

    def record(self, name: str, value: Any, samples: int | None, reduce_fx: Reduction) -> None:
        """Record a metric; arguments as of ``TrainModule.log``. ``samples=None`` is the number of the batch."""
        if not self.takes_metrics:
            raise RuntimeError(
                f"Metric {name!r} was logged in a prediction or in teardown, which have no metrics. Log it in a step or"
                " another hook. [J272]"
            )
        self.store.record(name, value, self.samples if samples is None else samples, reduce_fx)

    def reduce_metrics(self) -> dict[str, float]:
        """Reduce the logged values over all ranks into the trainer's metrics; the sums stay. One object all-gather."""
        self.trainer.strategy.meet("reduces metrics")
        metrics = self.store.reduce(self.collective)
        self.log.latest.update(metrics)
        self.trainer.callback_metrics.update(metrics)
        return metrics

    def backward(self, loss: torch.Tensor, *, sync: bool = True, **options: Any) -> None:
        """Add the gradients of the batch's loss; arguments as of ``Strategy.backward``."""
        weight = None if self.weight_unit is None else self.samples / self.weight_unit
        self.trainer.strategy.backward(loss, weight, sync=sync, **options)

    # -- validation, test and prediction ------------------------------------------------------------------------------

    # Each rank evaluates its own batches without communicating, so no rank shadows. Metrics are gathered at the end.

    def evaluate(self, loader: Any, stage: str) -> Any:
        """Evaluate on ``loader`` and return the metrics over all ranks, or the outputs of a prediction by batch.

        Rank 0 returns the outputs of all ranks, and the other ranks return none. They are in the order of the data set.
        If the trainer did not distribute the data, all outputs of rank 0 come first, then all of rank 1, and so on.

        Args:
            loader: The batches. A loader that is distributed already is used as it is.
            stage: ``"validate"``, ``"test"`` or ``"predict"``.
        """
        module, outputs, local = self.module, list[Any](), share(loader, self.collective, 0, shuffle=False)
        name = "validation" if stage == "validate" else stage
        with keeping_modes(module), torch.no_grad(), replaced(self, "store", MetricStore()):
            module.eval()
            samples = SampleCounter(module, local)
            for index, batch in enumerate(rng.iterate(local)):
                batch = self.take(batch, samples(batch, index))
                output = getattr(module, f"{name}_step")(batch, index)
                if stage == "predict":
                    outputs.append(map_tensors(_on_cpu, output))
            metrics = self.call_and_reduce(f"on_{name}_epoch_end")
            parts = gather_on_first(self.collective, outputs)
        if self.task.stage != "fit":  # otherwise they are in the row of the epoch
            self.log.write(self.trainer)
        if stage != "predict":
            return metrics
        if local is loader:
            return [output for part in parts for output in part]
        return [part[index] for index in range(max(map(len, parts))) for part in parts if index < len(part)]


class Fit(Run):
    """Fit on one rank, which trains a module and validates it after every epoch if it has batches for that."""

    def __init__(self, trainer: Any, module: TrainModule, task: Task, place: Place) -> None:
        super().__init__(trainer, module, task, place)
        self._loader = self._val_loader = None
        self._hooks: list[Any] = []
        self._accumulated = 1
        """The number of batches in one optimizer step of this epoch."""
        self._window_samples = 0
        """The number of samples since the last optimizer step."""
        self.plan = Plan((None,), False)
        """The numbers and sizes of all ranks' batches: of the current epoch, or of the first one, before it."""

    def start(self, train_loader: Any, val_loader: Any) -> None:
        """Wrap the module, build its optimizers, and resume from the snapshot of rank 0, if it has one."""
        trainer, module, ranks = self.trainer, self.module, self.collective.world_size
        trainer.strategy.meet("begins a fit")
        seed, state = self.task.seed, self.task.saved
        if self.is_at_home or trainer.num_nodes > 1:  # processes that one process has started all have its task
            seed, state = broadcast_tree(self.collective, (seed, state), 0)
        self._loader = share(train_loader, self.collective, seed)
        self.position.sampler = sampler_of(self._loader)
        self._val_loader = None if val_loader is None else share(val_loader, self.collective, 0, shuffle=False)
        self.plan = Plan.agree(self.collective, self._loader)
        self._wrap()
        optimizers, self.schedulers = parse_optimizers(module.configure_optimizers())
        if foreign := set(parameters_of(optimizers)).difference(module.parameters()):
            raise ValueError(
                f"The optimizers of configure_optimizers hold {len(foreign)} parameters that {type(module).__name__}"
                " lacks, so these would be neither averaged over the ranks nor saved. Make the modules that hold them"
                " attributes of the module, and put lists of modules into torch.nn.ModuleList. [J597]"
            )
        if module.automatic_optimization and len(optimizers) > 1:
            raise ValueError(
                f"configure_optimizers returned {len(optimizers)} optimizers, and the trainer steps only one. Set"
                " automatic_optimization = False in the module, and step them in training_step. [J236]"
            )
        if ranks > 1 and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise ValueError(
                "LBFGS calls its closure a different number of times on each rank. Pass devices=1 to the Trainer, or"
                " return a different optimizer from configure_optimizers. [J249]"
            )
        self.optimizers = self.trainer.strategy.shard(optimizers)
        for optimizer in self.optimizers:  # a rank without data steps its shard of a sharded one, with the same hooks
            run_hooks(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._prepare_step))
            self._hooks.append(optimizer.register_step_post_hook(self._count_step))
        if trainer.seed is not None:
            rng.seed_all(trainer.seed + self.collective.rank)
        elif self.collective.rank:  # rank 0 continues with the state of the process that called, and others must differ
            rng.seed_all(int(torch.randint(2**32, (), device="cpu")) + self.collective.rank)
        if state is not None:
            self._resume(state)

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Load a snapshot, the same on all ranks, into a fit that has its optimizers but has not begun.

        Raises:
            ValueError: If it was taken from other optimizers, groups of parameters or schedulers, or in the middle of
                an epoch by a different number of ranks, if the remainder of the epoch cannot be distributed.
        """
        state = self.load(state)
        part = self._part_of(state["ranks"])
        try:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
                if state["global_step"]:  # otherwise a scheduler that steps in an epoch without a batch left warns
                    mark_stepped(optimizer)
            for stepped, saved in zip(self.schedulers, state["schedulers"], strict=True):
                stepped.scheduler.load_state_dict(saved)
        except (ValueError, LookupError) as error:
            raise ValueError(
                f"The checkpoint has other optimizers or schedulers than configure_optimizers ({error!r}). Return the"
                " same ones, with the same groups. If a hook adds groups during a fit, add them again in"
                " on_load_checkpoint. [J251]"
            ) from error
        self.trainer.load_state_dict(state)
        self.position.epoch = self.trainer.epochs
        if part is not None:
            self.position.load_state_dict(part)

    def _part_of(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the part that this rank resumes from; ``None`` if a different number of ranks begins an epoch.

        If a different number of ranks resumes in the middle of an epoch, or the batch size is different, the other
        samples of the epoch are distributed over the present ranks. A rank loads the random numbers of one previous
        rank. It loads the metrics of all previous ranks whose number equals its own modulo the number of ranks.
        """
        rank, ranks, before = self.collective.rank, self.collective.world_size, len(parts)
        first, sampler = parts[0], self.position.sampler
        if sampler is not None and first.get("seed") is not None:
            sampler.start, sampler.seed = first["start"], first["seed"]
        if before == ranks and (sampler is None or first["used"] in (None, sampler.used(first["batches"]))):
            return parts[rank]
        if not any(part["batches"] or part["start"] for part in parts):
            return None  # no batch of the epoch was used
        batches, used = [part["batches"] for part in parts], first["used"]
        distributed = [len(range(place, sum(batches), before)) for place in range(before)]
        if sampler is None or used is None or batches != distributed:
            raise ValueError(
                f"{before} ranks wrote the checkpoint in the middle of an epoch, and {ranks} ranks cannot share the"
                f" rest of it. Resume with {before} ranks, or from a checkpoint of the end of an epoch. To resume with"
                " a different number of ranks, train with a DataLoader whose samples the trainer distributes. [J203]"
            )
        metrics = MetricStore()
        for part in parts[rank::ranks]:
            metrics.merge(part["metrics"])
        return {**parts[rank % before], "batches": 0, "start": used, "metrics": metrics.state_dict()}

    def run(self) -> None:
        """Train up to the number of epochs or steps, or until a callback stops the fit."""
        trainer = self.trainer
        self.position.redo_from_here()
        self._set_modes()
        self.call("on_train_start")
        self._agree_to_stop()
        if (trainer.should_stop or not self._is_within_limits(trainer.epochs)) and self.collective.rank == 0:
            text = (
                "This fit trains nothing: %d epochs and %d steps reach max_epochs=%s or max_steps=%s, or a callback"
                " stops it, such as EarlyStopping. Raise these limits, or its patience."
            )
            logger.warning(text, trainer.epochs, trainer.global_step, trainer.max_epochs, trainer.max_steps)
        began = trainer.epochs, trainer.global_step
        while self._is_within_limits(trainer.epochs) and not trainer.should_stop:
            steps, is_resumed = trainer.global_step, self.position.resume_from is not None
            self._epoch()
            if trainer.global_step == steps and not is_resumed:
                if self.collective.rank == 0:
                    text = "An epoch made no optimizer step. No rank had a batch, or no optimizer was stepped."
                    warnings.warn(text, stacklevel=2)
                if trainer.max_epochs is None:
                    break  # the fit would never reach max_steps
        if (trainer.epochs, trainer.global_step) != began:
            self._keep_trained(trainer.epochs)
        self.position.redo_from_here()
        self.snapshot = self.snapshots.take()  # the last hook may free what on_save_checkpoint saves
        # If max_steps has cut an epoch short, its metrics are kept for the fit that completes it.
        with replaced(self, "store", MetricStore()):
            self.call_and_reduce("on_train_end")

    def _keep_trained(self, epochs: int) -> None:
        """Put the trained weights where no failure of a later hook can reach them."""
        trainer, module = self.trainer, self.module
        counts = {"epochs": epochs, "global_step": trainer.global_step}
        try:
            if self.collective.rank == 0:
                trainer.keep({**counts, "module": module.state_dict()})
        except Exception as error:  # of the user's get_extra_state, or since the disk is full
            tensors = dict([*module.named_parameters(), *module.named_buffers()])
            kept = keep_trained(trainer.default_root_dir, {**counts, "module": tensors})
            add_note(error, kept := f"The module was trained. {kept}")
            logger.error(kept)
            raise
        trainer.strategy.meet("has kept the trained weights")  # only then can a rank fail in a later hook

    def end(self) -> None:
        """Remove the hooks on the user's optimizers, free the gradients, and release persistent data workers."""
        for hook in self._hooks:
            hook.remove()
        self._loader = self._val_loader = None
        self.module.zero_grad(set_to_none=True)

    def _is_within_limits(self, epochs: int) -> bool:
        """Return whether the fit has not reached its limits after this number of epochs; a hook may change them."""
        trainer = self.trainer
        limits = (epochs, trainer.max_epochs), (trainer.global_step, trainer.max_steps)
        return all(limit is None or count < limit for count, limit in limits)

    def _wrap(self) -> None:
        """Wrap the module for training; a new wrapper is made if other parameters have to be reduced."""
        several = not self.module.automatic_optimization
        held = parameters_of(self.optimizers)
        self.trainer.strategy.wrap(self.module, self.device, several_backwards=several, held=held)

    def _set_modes(self) -> None:
        """Put the module into training mode, except for parts that are in eval mode while the module is not."""
        frozen = [part for part in self.module.modules() if self.module.training and not part.training]
        self.module.train()  # the user may have overridden it to freeze parts
        for part in frozen:
            part.training = False

    # -- an epoch -----------------------------------------------------------------------------------------------------

    def _epoch(self) -> None:
        trainer = self.trainer
        self.position.begin_epoch(trainer.epochs, self._loader)
        self.call("on_train_epoch_start")
        # A hook may end the epoch of one rank. Under a launcher, it may be a hook of one rank, and all need the block.
        hooked = [self.module, *trainer.callbacks]
        may_end = any(overrides(each, "on_train_batch_start") for each in hooked)
        may_end = not trainer.strategy.meet("reads its first batch", not may_end)
        self.plan = Plan.agree(self.collective, self._loader)
        self.log.latest.clear()
        self._wrap()
        # A rank that ran out of data before the others reached max_steps did not complete the epoch either.
        finished = trainer.strategy.meet("has ended an epoch", self._train(self.plan, may_end))
        trained = self.reduce_metrics()
        if not finished:
            return  # a later fit resumes in the middle of this epoch
        self.position.redo_from_here()
        goes_on = self._is_within_limits(trainer.epochs + 1) and not trainer.should_stop
        if not trainer.strategy.meet("has trained an epoch", goes_on):
            self._keep_trained(trainer.epochs + 1)
        if self._val_loader is not None:
            validated = self.evaluate(self._val_loader, "validate")
            if (both := trained.keys() & validated) and self.collective.rank == 0:
                warnings.warn(
                    f"{', '.join(sorted(both))} was logged in training and in validation, so callback_metrics has"
                    " the value of the validation. Log it under two names.",
                    stacklevel=2,
                )
        # Before the first optimizer step a scheduler has nothing to do, and torch would warn.
        if self.module.automatic_optimization and trainer.global_step:
            self._schedule("epoch")
        trainer.epochs += 1
        self.position.end_epoch()
        self.call_and_reduce("on_train_epoch_end")
        self._agree_to_stop()

    def _agree_to_stop(self) -> None:
        """Stop on all ranks if one of them stops."""
        self.trainer.should_stop = not self.trainer.strategy.meet("begins an epoch", not self.trainer.should_stop)

    def _train(self, plan: Plan, may_end: bool) -> bool:
        """Train on one epoch's batches, and return whether this rank reached their end.

        Args:
            plan: The numbers and sizes of all ranks' batches.
            may_end: Whether a hook of any rank may end the epoch.
        """
        needs_even, are_known = getattr(self.trainer.strategy, "sync_batchnorm", False), None not in plan.lengths
        if needs_even and are_known and not plan.even:
            self._refuse_uneven(f"The ranks have {plan.lengths} batches")
        vote = needs_even and not are_known and len(plan.lengths) > 1
        self._accumulated = self.trainer.accumulate_grad_batches
        is_weighted = self._accumulated > 1 or not plan.equal_batches or counts_samples(self.module)
        self.weight_unit = plan.batch_size if is_weighted else None
        listed = [*self.optimizers, *(stepped.scheduler for stepped in self.schedulers), self.trainer]
        hooked = [self.module, *self.trainer.callbacks]
        enable = not plan.even or is_weighted or may_end
        block = self.trainer.strategy.block(listed, enable=enable)
        batches = self.position.batches(self._loader, self._while_all_have_one if vote else None)
        is_first = self.trainer.epochs == 0
        before = own_tensors(hooked, None) if is_first else {}
        if is_first:
            batches = compare_first(self.collective, self._loader, batches)
        with block:
            finished = self._train_batches(batches)
            self.samples = 0  # values that this rank logs while it shadows others weigh nothing
        report = self.trainer.strategy.report  # a block of the user's may report nothing
        is_even = report is None or report.even
        after = own_tensors(hooked, before) if is_first and not is_even else before
        if changed := sorted(name for name in after if after[name] != before.get(name)):
            warnings.warn(
                f"Ranks with fewer batches have called hooks of batches less often, so {', '.join(changed)} may differ"
                " between ranks. Make them parts of the module, or return them from state_dict of the callback, which"
                " a rank out of data then loads.",
                stacklevel=2,
            )
        return finished

    def _train_batches(self, batches: Iterator[tuple[int, Any, bool]]) -> bool:
        """Train on the batches, and return whether they were the rest of the epoch.

        A hook that returns -1 before a batch ends the epoch, as in Lightning.
        """
        module, samples = self.module, SampleCounter(self.module, self._loader)
        for index, batch, is_last in batches:
            batch = self.take(batch, samples(batch, index))
            if -1 in self.call("on_train_batch_start", batch, index):
                return True
            if module.automatic_optimization:
                outputs = self._automatic_step(batch, index, is_last)
            else:
                outputs = module.training_step(batch, index)
            self.position.advance()
            self.call("on_train_batch_end", outputs, batch, index)
            if not self._is_within_limits(self.trainer.epochs):
                return is_last
        return True

    def _while_all_have_one(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches until a rank has no more: before each, the ranks vote, so no rank shadows another."""
        batch = next(batches, None)
        while self.collective.reduce_boolean_decision(batch is not None):
            yield batch
            batch = next(batches, None)
        if self.collective.reduce_boolean_decision(batch is not None, all=False):
            self._refuse_uneven("The ranks have different numbers of batches")

    @staticmethod
    def _refuse_uneven(what: str) -> NoReturn:
        raise ValueError(
            f"{what}, and sync_batchnorm=True needs equally many on all ranks, since a rank without data has no samples"
            " for SyncBatchNorm. Write the loop yourself over join.iterate, which runs all ranks equally often. [J881]"
        )

    # -- a step -------------------------------------------------------------------------------------------------------

    def _automatic_step(self, batch: Any, index: int, is_last: bool) -> Any:
        k = self._accumulated
        (optimizer,) = self.optimizers
        if index % k == 0:
            optimizer.zero_grad()
            self._window_samples = 0
        self._window_samples += self.samples
        outputs: Any = self.module.training_step(batch, index)
        loss = cast("dict[str, Any]", outputs).get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError(
                f"training_step of {type(self.module).__name__} returned {outputs!r}. Return the mean loss over the"
                " samples as a tensor that depends on the parameters, or a dict with it under 'loss'. [J240]"
            )
        sync = is_last or (index + 1) % k == 0
        self.backward(loss, sync=sync)
        if sync:
            with replaced(self, "samples", self._window_samples):  # values logged there are of the whole step
                optimizer.step()
            self._schedule("step")
        return cast("Any", outputs)

    def _schedule(self, interval: str) -> None:
        """Step the schedulers with this interval."""
        for stepped in self.schedulers:
            if stepped.interval == interval:
                is_plateau = isinstance(stepped.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                args = [monitored(self.trainer.callback_metrics, stepped.monitor)] if is_plateau else []
                stepped.scheduler.step(*args)

    def _prepare_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.call("on_before_optimizer_step", optimizer)

    def _count_step(self, *_: Any) -> None:
        self.trainer.global_step += 1


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU, in a storage of its own size: a view would keep and send the whole storage."""
    tensor = tensor.cpu()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def is_movable(part: Any) -> bool:
    """Return whether a part of a batch is an object that ``to(device)`` moves, and not a tensor or a mapping."""
    return callable(getattr(part, "to", None)) and not isinstance(part, (torch.Tensor, Mapping))


# -- results of configure_optimizers ----------------------------------------------------------------------------------


class Scheduler(NamedTuple):
    """A scheduler and the times when it steps.

    Attributes:
        interval: ``"epoch"`` or ``"step"``.
        monitor: The metric that a ``ReduceLROnPlateau`` steps on.
    """

    scheduler: Any
    interval: str
    monitor: str | None


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the parameters that optimizers hold."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def parse_optimizers(configured: Any) -> tuple[list[torch.optim.Optimizer], list[Scheduler]]:
    """Return the optimizers and schedulers in the result of ``configure_optimizers``."""
    parts = list(cast("Sequence[Any]", configured)) if isinstance(configured, (list, tuple)) else [configured]
    optimizers, schedulers = list[torch.optim.Optimizer](), list[Scheduler]()
    for part in parts:
        options = cast("dict[str, Any]", part if isinstance(part, dict) else {"optimizer": part})
        scheduler = options.get("lr_scheduler")
        own = cast("dict[str, Any]", scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler})
        if (
            not isinstance(options.get("optimizer"), torch.optim.Optimizer)
            or not options.keys() <= {"optimizer", "lr_scheduler"}
            or not own.keys() <= {"scheduler", "interval", "monitor"}
            or own.get("interval", "epoch") not in ("epoch", "step")
        ):
            raise TypeError(
                f"configure_optimizers returned {configured!r}, which has no known form. Return an optimizer,"
                ' {"optimizer": ..., "lr_scheduler": ...} or a list of these. A scheduler may be {"scheduler": ...,'
                ' "interval": "epoch" or "step", "monitor": ...}. [J247]'
            )
        optimizers.append(options["optimizer"])
        if scheduler is not None:
            schedulers.append(Scheduler(own["scheduler"], own.get("interval", "epoch"), own.get("monitor")))
    return optimizers, schedulers
