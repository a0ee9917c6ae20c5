"""Loops of one rank: :class:`Fit`, :func:`evaluate`.

The order of collectives, on every rank::

    start      a broadcast of the state to resume from, from rank 0; DDP's own, as the module is wrapped
               one object all-gather for each loader with a sampler of the user's
    an epoch   one object all-gather: the numbers and sizes of all ranks' batches
               a vote: has every rank wrapped the same parameters before? If not, as at the start
               the block: see joinables.ddp; a rank that is out of data shadows the others
                   with sync_batchnorm and unknown lengths, a vote before each batch: does every rank have another one?
               one object all-gather each: the metrics of the epoch, of its validation, of each hook at its end
               checkpoints at its end: see joinables.trainer.checkpoint
    a hook     all_gather or reduce of the module, if called: one object all-gather, and an all-gather or all-reduce

Within a block, a rank that accumulates k batches runs one synchronised backward for every k batches, and one for the
remainder at its end. So the n-th synchronised backward of one rank meets the n-th of every other rank.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from typing_extensions import override

from join.batch import map_tensors
from join.collectives._torch_private import pytree
from join.errors import add_note
from join.transfer import broadcast_tree
from joinables.modules import keeping_modes, replaced
from joinables.trainer import checkpoint, rng
from joinables.trainer.checkpoint import keep_trained
from joinables.trainer.data import (
    Plan,
    compare_first,
    gather_on_first,
    is_read_by_all,
    sampler_of,
    share,
)
from joinables.trainer.launch import Place
from joinables.trainer.metrics import monitored
from joinables.trainer.module import TrainModule, warn_of_own_state
from joinables.trainer.run import Run, Task
from joinables.trainer.samples import SampleCounter, counts_samples

logger = logging.getLogger("joinables")


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

    @override
    def take_snapshot(self, active: bool) -> dict[str, Any] | None:
        return checkpoint.take(self, active)

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
        self.call("on_train_start")
        self._agree_to_stop()
        if (trainer.should_stop or not self._is_within_limits) and self.collective.rank == 0:
            text = (
                "This fit trains nothing: %d epochs and %d steps reach max_epochs=%s or max_steps=%s, or a callback"
                " stops it, such as EarlyStopping. Raise these limits, or its patience."
            )
            logger.warning(text, trainer.epochs, trainer.global_step, trainer.max_epochs, trainer.max_steps)
        while self._is_within_limits and not trainer.should_stop:
            steps, is_resumed = trainer.global_step, self.position.resume_from is not None
            self._epoch()
            if trainer.global_step == steps and not is_resumed:
                if self.collective.rank == 0:
                    reason = "No rank had a batch, a rank without batches stopped all, or no optimizer was stepped"
                    warnings.warn(f"An epoch made no optimizer step. {reason}.", stacklevel=2)
                if trainer.max_epochs is None:
                    break  # the fit would never reach max_steps
        self._keep_trained()
        # If max_steps has cut an epoch short, its metrics are kept for the fit that completes it.
        with self.fresh_metrics():
            self.call_and_reduce("on_train_end")

    def _keep_trained(self) -> None:
        """Put the trained weights where no failure of the user's last hooks can reach them."""
        trainer, state = self.trainer, None
        try:
            # On the CPU, since the trainer keeps the snapshot until the next fit.
            state = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, self.snapshots.take())
            if state is not None:
                trainer.hand_over(state)
        except Exception as error:  # of a hook or a state of the user's, or since the disk is full
            if self.collective.rank == 0:
                tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
                counts = {"epochs": trainer.epochs, "global_step": trainer.global_step}
                kept = keep_trained(trainer.default_root_dir, {**counts, "module": tensors})
                add_note(error, kept := f"The module was trained. {kept}")
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
        trainer.strategy.meet("reads its first batch")
        self.plan = Plan.agree(self.collective, self._loader)
        self.latest.clear()
        self._wrap()
        # A rank that ran out of data before the others reached max_steps did not complete the epoch either.
        finished = trainer.strategy.meet("has ended an epoch", self._train(self.plan))
        trained = self.reduce_metrics()
        if not finished:
            return  # a later fit resumes in the middle of this epoch
        self.position.redo_from_here()
        if self._val_loader is not None:
            validated = evaluate(self, self._val_loader, "validate")
            if (both := trained.keys() & validated) and self.collective.rank == 0:
                warnings.warn(
                    f"{', '.join(sorted(both))} was logged in training and in validation, so trainer.metrics has"
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

    def _train(self, plan: Plan) -> bool:
        """Train on one epoch's batches and return whether this rank reached their end."""
        needs_even, are_known = getattr(self.trainer.strategy, "sync_batchnorm", False), None not in plan.lengths
        if needs_even and are_known and not plan.even:
            self._refuse_uneven(f"The ranks have {plan.lengths} batches")
        vote = needs_even and not are_known and len(plan.lengths) > 1
        self._accumulated = self.trainer.accumulate_grad_batches
        is_weighted = self._accumulated > 1 or not plan.equal_batches or counts_samples(self.module)
        self.weight_unit = plan.batch_size if is_weighted else None
        listed = [*self.optimizers, *(stepped.scheduler for stepped in self.schedulers), self.trainer]
        enable = not plan.even or is_weighted
        block = self.trainer.strategy.block(listed, enable=enable, transform_gradients=self._prepare_gradients)
        apart = "" if plan.even or vote else "an epoch in which ranks may have different numbers of batches"
        batches = self.position.batches(self._loader, self._while_all_have_one if vote else None)
        if len(plan.lengths) > 1 and self.trainer.epochs == 0 and is_read_by_all(self._loader):
            batches = compare_first(self.collective, batches)
        with replaced(self, "apart", apart), block:
            finished = self._train_batches(batches)
            self.samples = 0  # values that this rank logs while it shadows others weigh nothing
        if are_known and not plan.even and self.trainer.epochs == 0:
            warn_of_own_state([self.module, *self.trainer.callbacks])
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
                with self.autocast():
                    outputs = module.training_step(batch, index)
            self.position.advance()
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
        with self.autocast():
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
                self._prepare_gradients()
            optimizer.step()
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
        """Call the user's hook; under manual optimization, torch does, as a step begins."""
        if self.module.automatic_optimization:
            self.module.on_before_optimizer_step(self.optimizers[0])

    # Under manual optimization, torch calls these before and after each step of an optimizer.

    def _prepare_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.module.on_before_optimizer_step(optimizer)

    def _count_step(self, *_: Any) -> None:
        self.trainer.global_step += 1


# -- validation, test and prediction ----------------------------------------------------------------------------------

# Each rank evaluates its own batches without communicating, so no rank shadows. Metrics are gathered at the end.


def evaluate(run: Run, loader: Any, stage: str) -> Any:
    """Evaluate on ``loader`` and return the metrics over all ranks, or the outputs of a prediction by batch.

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
        run.samples = 1  # values logged in a hook weigh the same on all ranks
        run.call(f"on_{name}_epoch_start")
        samples = SampleCounter(module, local)
        with replaced(run, "apart", f"a batch of {name}"):
            for index, batch in enumerate(rng.iterate(local)):
                batch = run.take(batch, samples(batch, index))
                with run.autocast():
                    output = getattr(module, f"{name}_step")(batch, index)
                if stage == "predict":
                    outputs.append(map_tensors(_on_cpu, output))
        metrics = run.call_and_reduce(f"on_{name}_epoch_end")
        parts = gather_on_first(run.collective, outputs)
    if stage != "predict":
        return metrics
    if local is loader:
        return [output for part in parts for output in part]
    return [part[index] for index in range(max(map(len, parts))) for part in parts if index < len(part)]


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
