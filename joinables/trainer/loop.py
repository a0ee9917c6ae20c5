"""Loops of one rank: :class:`Fit`, :func:`evaluate`.

The order of collectives, on every rank::

    start      a broadcast of the state to resume from, from rank 0; DDP's own, as the module is wrapped
               one object all-gather for each loader with a sampler of the user's
               a broadcast of the folders of the log, from rank 0, unless there is no logger
    an epoch   one object all-gather: the numbers and sizes of all ranks' batches
               a vote: has every rank wrapped the same parameters before? If not, as at the start
               the block: see joinables.ddp; a rank that is out of data shadows the others
                   with uneven="stop" and unknown lengths, a vote before each batch: does every rank have another one?
               one object all-gather each: the metrics of the epoch, of its validation, of each hook at its end
               checkpoints at its end: see joinables.trainer.checkpoint
    a hook     all_gather or reduce of the module, if called: one object all-gather, and an all-gather or all-reduce

Within a block, a rank that accumulates k batches runs one synchronised backward for every k batches, and one for the
remainder at its end. So the n-th synchronised backward of one rank meets the n-th of every other rank.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from typing_extensions import override

from join.batch import map_tensors
from join.collectives._torch_private import pytree
from join.errors import add_note
from join.transfer import broadcast_tree
from joinables.modules import keeping_modes, replaced
from joinables.trainer import checkpoint, rng
from joinables.trainer.checkpoint import FileCheckpointIO, keep_trained, weights_only
from joinables.trainer.data import (
    Plan,
    gather_on_first,
    is_read_by_all,
    known_length,
    refuse_same,
    sampler_of,
    share,
)
from joinables.trainer.launch import Place
from joinables.trainer.metrics import monitored
from joinables.trainer.module import TrainModule, warn_of_own_state
from joinables.trainer.run import Run, Task, TrainerState, is_limit
from joinables.trainer.samples import SampleCounter, counts_samples

logger = logging.getLogger("joinables")


class Fit(Run):
    """Fit on one rank, which trains a module and validates it after every epoch if it has batches for that."""

    def __init__(self, trainer: TrainerState, module: TrainModule, task: Task, place: Place) -> None:
        super().__init__(trainer, module, task, place)
        self._loader = self._val_loader = None
        self._hooks: list[Any] = []
        self._accumulated = 1
        """The number of batches in one optimizer step of this epoch."""
        self._window_samples = 0
        """The number of samples since the last optimizer step."""
        self._has_warned = False  # of states that drift
        self._needs_even = False
        """Whether different numbers of batches are an error."""

    @override
    def take_snapshot(self, active: bool) -> dict[str, Any] | None:
        return checkpoint.take(self, active)

    @property
    def steps_of_an_epoch(self) -> float:
        """Number of optimizer steps in an epoch, from the lengths when the fit began; infinite if one is unknown."""
        if self.plan.shortest is None:
            return math.inf
        batches = (
            self.plan.shortest if self.trainer.uneven == "stop" else max(filter(None, self.plan.lengths), default=0)
        )
        return math.ceil(batches / self.trainer.accumulate_grad_batches)

    def start(self, train_loader: Any, val_loader: Any) -> None:
        """Wrap the module, build its optimizers, and resume from the snapshot of rank 0, if it has one."""
        trainer, module, ranks = self.trainer, self.module, self.collective.world_size
        trainer.strategy.meet("begins a fit")
        seed, state = self.task.seed, self.task.saved
        if self.is_at_home or trainer.num_nodes > 1:  # processes that one process has started all have its task
            seed, state = broadcast_tree(self.collective, (seed, state), 0)
        self._loader = share(train_loader, self.collective, seed)
        self.position.sampler = sampler_of(self._loader)
        self._val_loader = None if val_loader is None else local_loader(self, val_loader)
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
        if not module.automatic_optimization:
            for optimizer in self.optimizers:
                self._hooks.append(optimizer.register_step_pre_hook(self._prepare_step))
                self._hooks.append(optimizer.register_step_post_hook(self._count_step))
        if trainer.seed is not None:
            rng.seed_all(trainer.seed + self.collective.rank)
        elif self.collective.rank:  # rank 0 continues with the state of the process that called, and others must differ
            rng.seed_all(int(torch.randint(2**32, (), device="cpu")) + self.collective.rank)
        if state is not None:
            checkpoint.resume(self, state)

    def run(self) -> None:
        """Train up to the number of epochs or steps, or until a callback stops the fit."""
        trainer = self.trainer
        self.position.redo_from_here()
        self._set_modes()
        self.module.on_train_start()
        self.call("on_train_start")
        if not self._is_within_limits and self.collective.rank == 0:
            text = "This fit trains nothing, as %d epochs and %d steps reach max_epochs=%s or max_steps=%s. Raise them."
            logger.warning(text, trainer.epochs, trainer.global_step, trainer.max_epochs, trainer.max_steps)
        self._agree_to_stop()
        while self._is_within_limits and not trainer.should_stop:
            steps, is_resumed = trainer.global_step, self.position.resume_from is not None
            self._epoch()
            if trainer.global_step == steps and not is_resumed:
                if self.collective.rank == 0:
                    reason = "No rank had a batch, a rank without batches stopped all, or no optimizer was stepped"
                    warnings.warn(f"An epoch made no optimizer step. {reason}.", stacklevel=2)
                if not is_limit(trainer.max_epochs):
                    break  # the fit would never reach max_steps
        self._keep_trained()
        # If max_steps has cut an epoch short, its metrics are kept for the fit that completes it.
        with self.fresh_metrics():
            self._call_and_reduce("on_train_end")

    def _keep_trained(self) -> None:
        """Put the trained weights where no failure of the user's last hooks can reach them."""
        trainer, state, io = self.trainer, None, self.trainer.checkpoint_io if self.is_at_home else FileCheckpointIO()
        try:
            # On the CPU, since the trainer keeps the snapshot until the next fit.
            state = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, self.snapshots.take())
            if state is not None:
                trainer.hand_over(state)
        except Exception as error:  # of a hook or a state of the user's, or since the disk is full
            if self.collective.rank == 0:
                state = state or weights_only(self)
                add_note(error, kept := f"The module was trained. {keep_trained(trainer.default_root_dir, io, state)}")
                logger.error(kept)
            raise
        trainer.strategy.meet("has kept the trained weights")  # only then can a rank fail in a last hook

    def end(self) -> None:
        """Remove the hooks on the user's optimizers, free the gradients, and release persistent data workers."""
        for hook in self._hooks:
            hook.remove()
        self._loader = self._val_loader = None
        self.module.zero_grad(set_to_none=True)

    @property
    def _is_within_limits(self) -> bool:
        """Whether the fit has not reached its number of epochs or steps, which a hook may change."""
        trainer = self.trainer
        limits = (trainer.epochs, trainer.max_epochs), (trainer.global_step, trainer.max_steps)
        return all(not is_limit(limit) or count < limit for count, limit in limits)

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
        self.module.on_train_epoch_start()
        self.call("on_train_epoch_start")
        trainer.strategy.meet("reads its first batch")
        plan = Plan.agree(self.collective, self._loader)
        if self.shown is not None:
            self.shown.lengths = [plan.shortest] if trainer.uneven == "stop" else plan.lengths
        self._wrap()
        # A rank that ran out of data before the others reached max_steps did not complete the epoch either.
        finished = trainer.strategy.meet("has ended an epoch", self._train(plan))
        trained = self.reduce_metrics()
        if not finished:
            return  # a later fit resumes in the middle of this epoch
        self.position.redo_from_here()
        if self._val_loader is not None:
            validated, _ = evaluate(self, self._val_loader, "validate")
            if (both := trained.keys() & validated) and self.collective.rank == 0:
                warnings.warn(
                    f"{', '.join(sorted(both))} was logged in training and in validation, so trainer.callback_metrics"
                    " has the value of the validation. Log it under two names.",
                    stacklevel=2,
                )
        # Before the first optimizer step a scheduler has nothing to do, and torch would warn.
        if self.module.automatic_optimization and trainer.global_step:
            self._schedule("epoch")
        trainer.epochs += 1
        self.position.end_epoch()
        self._call_and_reduce("on_train_epoch_end")
        self._agree_to_stop()

    def _agree_to_stop(self) -> None:
        """Stop on all ranks if one of them stops."""
        self.trainer.should_stop = not self.trainer.strategy.meet("begins an epoch", not self.trainer.should_stop)

    def _call_and_reduce(self, hook: str) -> None:
        """Call a hook of the module and of all callbacks; each sees the metrics that the previous ones have logged."""
        self.samples = 1  # values logged in hooks weigh the same on all ranks
        callbacks = (partial(getattr(called, hook), self.trainer, self.module) for called in self.trainer.callbacks)
        for call in (getattr(self.module, hook), *callbacks):
            call()
            self.reduce_metrics()
            self.store.clear()

    def _train(self, plan: Plan) -> bool:
        """Train on one epoch's batches and return whether this rank reached their end."""
        uneven = self.trainer.uneven
        self._needs_even = uneven != "stop" and getattr(self.trainer.strategy, "sync_batchnorm", False)
        vote = (uneven == "stop" or self._needs_even) and plan.shortest is None and len(plan.lengths) > 1
        self._accumulated = self.trainer.accumulate_grad_batches
        is_weighted = self._accumulated > 1 or not plan.equal_batches or counts_samples(self.module)
        self.weight_unit = plan.batch_size if is_weighted else None
        even = plan.even or (uneven == "stop" and plan.shortest is not None)
        if self._needs_even and not even and plan.shortest is not None:
            self._refuse_uneven(f"The ranks have {plan.lengths} batches")
        listed = [
            *self.optimizers,
            *(stepped.scheduler for stepped in self.schedulers),
            *([self.scaler] if self.scaler.is_enabled() else []),
            self.trainer,
        ]
        block = self.trainer.strategy.block(
            listed,
            enable=not even or is_weighted,
            throw=uneven == "error",
            transform_gradients=self._prepare_gradients,
        )
        apart = "" if even or vote else "an epoch in which ranks may have different numbers of batches"
        limit, voting = plan.shortest if uneven == "stop" else None, self._while_all_have_one if vote else None
        batches = self.position.batches(self._loader, limit, voting)
        if len(plan.lengths) > 1 and self.trainer.epochs == 0 and is_read_by_all(self._loader):
            batches = refuse_same(self.collective, batches)
        with replaced(self, "apart", apart), block:
            finished = self._train_batches(batches)
            self.samples = 0  # values that this rank logs while it shadows others weigh nothing
        if plan.shortest is not None and not (even or self._has_warned):
            self._has_warned = True
            warn_of_own_state([self.module, *self.trainer.callbacks])
        return finished

    def _train_batches(self, batches: Iterator[tuple[int, Any, bool]]) -> bool:
        """Train on the batches, and return whether they were the rest of the epoch.

        A hook that returns -1 before a batch ends the epoch, as in Lightning.
        """
        module, samples = self.module, SampleCounter(self.module, self._loader)
        for index, batch, is_last in batches:
            batch = self.take(batch, samples(batch, index))
            told = [module.on_train_batch_start(batch, index)]
            told += [each.on_train_batch_start(self.trainer, module, batch, index) for each in self.trainer.callbacks]
            if -1 in told:
                return True
            if module.automatic_optimization:
                outputs = self._automatic_step(batch, index, is_last)
            else:
                with self.autocast():
                    outputs = module.training_step(batch, index)
            self.position.advance()
            module.on_train_batch_end(outputs, batch, index)
            self.call("on_train_batch_end", outputs, batch, index)
            if not self._is_within_limits:
                return is_last
        return True

    def _while_all_have_one(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches until a rank has no more: before each, the ranks vote, so no rank shadows another."""
        batch = next(batches, None)
        while self.collective.reduce_boolean_decision(batch is not None):
            yield batch
            batch = next(batches, None)
        if self._needs_even and self.collective.reduce_boolean_decision(batch is not None, all=False):
            self._refuse_uneven("The ranks have different numbers of batches")

    @staticmethod
    def _refuse_uneven(what: str) -> NoReturn:
        raise ValueError(
            f"{what}, and sync_batchnorm=True needs equally many on all ranks, since a rank without data has no samples"
            " for SyncBatchNorm. Pass Trainer(uneven='stop'), or write the loop yourself over join.iterate, which runs"
            " all ranks equally often. [J881]"
        )

    # -- a step -------------------------------------------------------------------------------------------------------

    def _automatic_step(self, batch: Any, index: int, is_last: bool) -> Any:
        k = self._accumulated
        (optimizer,) = self.optimizers
        if index % k == 0:
            optimizer.zero_grad()
            self._window_samples = 0
        self._window_samples += self.samples
        with self.autocast():
            outputs: Any = self.module.training_step(batch, index)
        loss = cast("dict[str, Any]", outputs).get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError(
                f"training_step of {type(self.module).__name__} returned {outputs!r}. Return the mean loss over the"
                " samples as a tensor that depends on the parameters, or a dict with it under 'loss'. [J240]"
            )
        sync = is_last or (index + 1) % k == 0
        self.backward(self.scaler.scale(loss), sync=sync)
        if sync:
            self.scaler.unscale_(optimizer)
            with replaced(self, "samples", self._window_samples):  # values logged there are of the whole step
                self._prepare_gradients()
            self.scaler.step(optimizer)
            self.scaler.update()
            self.trainer.global_step += 1
            self._schedule("step")
        return cast("Any", outputs)

    def _schedule(self, interval: str) -> None:
        """Step the schedulers with this interval."""
        for stepped in self.schedulers:
            if stepped.interval == interval:
                is_plateau = isinstance(stepped.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                stepped.scheduler.step(*([monitored(self.trainer.metrics, stepped.monitor)] if is_plateau else []))

    def _prepare_gradients(self) -> None:
        """Call the user's hook and clip the gradients; under manual optimization, the training step does both."""
        if not self.module.automatic_optimization:
            return
        self.module.on_before_optimizer_step(self.optimizers[0])
        if self.trainer.gradient_clip_val is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.trainer.gradient_clip_val)

    # Under manual optimization, torch calls these before and after each step of an optimizer.

    def _prepare_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.module.on_before_optimizer_step(optimizer)

    def _count_step(self, *_: Any) -> None:
        self.trainer.global_step += 1


# -- validation, test and prediction ----------------------------------------------------------------------------------

# Each rank evaluates its own batches without communicating, so no rank shadows. Metrics are gathered at the end.


def evaluate(run: Run, loader: Any, stage: str) -> tuple[dict[str, float], list[Any]]:
    """Evaluate on ``loader`` and return the metrics over all ranks, and the outputs of a prediction by batch.

    Rank 0 returns the outputs of all ranks, and the other ranks return none. They are in the order of the data set. If
    the trainer did not distribute the data, all outputs of rank 0 come first, then those of rank 1, and so on.

    Args:
        run: The current run.
        loader: The batches. A loader that is distributed already is used as it is.
        stage: ``"validate"``, ``"test"`` or ``"predict"``.
    """
    module, name, local = run.module, "validation" if stage == "validate" else stage, local_loader(run, loader)
    outputs: list[Any] = []
    with keeping_modes(module), torch.no_grad(), run.fresh_metrics():
        module.eval()
        if run.shown is not None:
            run.shown.lengths = [known_length(local)]
        run.call("on_evaluation_start", stage)
        run.samples = 1  # values logged in a hook weigh the same on all ranks
        getattr(module, f"on_{name}_epoch_start")()
        samples = SampleCounter(module, local)
        with replaced(run, "apart", f"a batch of {name}"):
            for index, batch in enumerate(rng.iterate(local)):
                batch = run.take(batch, samples(batch, index))
                with run.autocast():
                    output = getattr(module, f"{name}_step")(batch, index)
                run.call("on_evaluation_batch_end", output, batch, index, stage)
                if stage == "predict":
                    outputs.append(map_tensors(_on_cpu, output))
        run.samples = 1
        getattr(module, f"on_{name}_epoch_end")()
        metrics = run.reduce_metrics()
        run.store.clear()
        parts = gather_on_first(run.collective, outputs)
        run.call("on_evaluation_end", stage)
        metrics.update(run.reduce_metrics())
    if local is loader:
        return metrics, [output for part in parts for output in part]
    return metrics, [part[index] for index in range(max(map(len, parts))) for part in parts if index < len(part)]


def local_loader(run: Run, loader: Any) -> Any:
    """Return this rank's part of a loader, in order; a loader that is distributed already is returned as it is."""
    return share(loader, run.collective, 0, shuffle=False)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU, in a storage of its own size: a view would keep and send the whole storage."""
    tensor = tensor.cpu()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


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
    optimizers: list[torch.optim.Optimizer] = []
    schedulers: list[Scheduler] = []
    parts = list(cast("Sequence[Any]", configured)) if isinstance(configured, (list, tuple)) else [configured]
    if isinstance(configured, tuple) and len(parts) == 2 and all(isinstance(part, list) for part in parts):
        parts = [*parts[0], *({"lr_scheduler": scheduler} for scheduler in parts[1])]
    for part in parts:
        options: Any = {"optimizer": part} if isinstance(part, torch.optim.Optimizer) else part
        if not isinstance(options, dict) or not options.keys() <= {"optimizer", "lr_scheduler", "monitor"}:
            raise TypeError(
                f"configure_optimizers returned {configured!r}, which has no known form. Return an optimizer, a list"
                ' of them, ([optimizers], [schedulers]), or {"optimizer": ..., "lr_scheduler": ..., "monitor": ...}.'
                " [J247]"
            )
        options = cast("dict[str, Any]", options)
        optimizers += [options["optimizer"]] if "optimizer" in options else []
        configured_scheduler: Any = options.get("lr_scheduler")
        if configured_scheduler is not None:
            is_dict = isinstance(configured_scheduler, dict)
            own = cast("dict[str, Any]", configured_scheduler if is_dict else {"scheduler": configured_scheduler})
            interval = own.get("interval", "epoch")
            if interval not in ("epoch", "step") or own.get("frequency", 1) != 1:
                raise ValueError(
                    f"The scheduler {own!r} has an interval or a frequency that the trainer does not support. Use the"
                    " interval 'epoch' or 'step', and the frequency 1. [J253]"
                )
            schedulers.append(Scheduler(own["scheduler"], interval, own.get("monitor", options.get("monitor"))))
    return optimizers, schedulers
