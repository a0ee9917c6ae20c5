"""The training loop of one rank: :class:`FitLoop`.

The order of collectives, on every rank::

    start      DDP's own, as the module is wrapped; a broadcast of the state to resume from, from rank 0
    an epoch   one object all-gather: the numbers and sizes of all ranks' batches
               the block: see joinables.ddp; a rank that is out of data shadows the others
                   with uneven="stop" and unknown lengths, a vote before each batch: has every rank another one?
                   with uneven="error" and unknown lengths, once a rank runs out, one object all-gather: which have?
               one object all-gather each: the metrics of the epoch, of its validation, of each hook at its end
               checkpoints at its end: see joinables.trainer.checkpoints.snapshot

Within a block, a rank that accumulates k batches runs one synchronised backward for every k of them, and one for the
rest at its end. So the n-th synchronised backward of one rank meets the n-th of every other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch

from join import EarlyTerminationError
from join.transfer import broadcast_tree
from joinables.trainer.callbacks.base import Callback
from joinables.trainer.checkpoints import snapshot
from joinables.trainer.loops import rng
from joinables.trainer.loops.collective_calls import CollectiveCall
from joinables.trainer.loops.data import Plan, distribute, sampler_of
from joinables.trainer.loops.evaluate import evaluate, local_loader
from joinables.trainer.loops.optimizers import check_closure, parse_optimizers, retarget
from joinables.trainer.loops.run import FitRun

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class FitLoop:
    """Trains a module on one rank, and validates on ``val_loader``, if there is one, after every epoch."""

    def __init__(self, run: FitRun, train_loader: Any, val_loader: Any) -> None:
        self._run = run
        self._trainer, self._module, self._strategy = run.trainer, run.module, run.strategy
        self._loader = distribute(train_loader, run.rank, run.collective.world_size, self._trainer.seed or 0)
        run.position.sampler = sampler_of(self._loader)
        self._val_loader = None if val_loader is None else local_loader(run, val_loader)
        self._hooks: list[Any] = []
        run.take_snapshot = CollectiveCall(run.collective, lambda active: snapshot.take(run, active))
        self._has_another = False
        self._all_have_another = CollectiveCall(
            run.collective, lambda active: run.collective.reduce_boolean_decision(active and self._has_another)
        )

    def start(self, saved: Any) -> None:
        """Wrap the module, build its optimizers, and resume from the snapshot that rank 0 has ``saved``, if any."""
        run, trainer, module = self._run, self._trainer, self._module
        automatic = module.automatic_optimization
        self._strategy.wrap(module, run.device, several_backwards=not automatic)
        optimizers, run.schedulers = parse_optimizers(module.configure_optimizers())
        if automatic and len(optimizers) > 1:
            raise ValueError(
                f"configure_optimizers returned {len(optimizers)} optimizers, but automatic optimization knows what to"
                " do with one; set automatic_optimization = False and step them in training_step [J236]"
            )
        for optimizer in optimizers:
            check_closure(optimizer, automatic, run.collective.world_size)
            if run.rank == 0:
                _warn_of_foreign_parameters(optimizer, module)
        run.optimizers = self._strategy.shard(optimizers)
        for scheduler in run.schedulers:
            for mine, given in zip(run.optimizers, optimizers, strict=True):
                if mine is not given and scheduler.scheduler.optimizer is given:
                    retarget(scheduler.scheduler, mine)
        if not automatic:
            for optimizer in run.optimizers:
                self._hooks.append(optimizer.register_step_pre_hook(self._prepare_step))
                self._hooks.append(optimizer.register_step_post_hook(self._count_step))
        if trainer.seed is not None:
            rng.seed_all(trainer.seed + run.rank)
        state = broadcast_tree(run.collective, saved, 0)
        if state is not None:
            snapshot.resume(run, state)

    def run(self) -> None:
        """Train until there are enough epochs or steps, or a callback wants to stop."""
        run, trainer = self._run, self._trainer
        run.position.redo_from_here()
        self._set_modes()
        self._module.on_train_start()
        run.call("on_train_start")
        trainer.should_stop = run.collective.reduce_boolean_decision(trainer.should_stop, all=False)
        while not self._has_enough_epochs and not self._has_enough_steps and not trainer.should_stop:
            steps, is_resumed = run.counters.global_step, run.position.resume_from is not None
            self._epoch()
            if run.counters.global_step == steps and not is_resumed:
                self._warn_of_no_step()
                if trainer.max_epochs is None:
                    break  # the steps would never be enough
        with run.fresh_metrics():  # those of an epoch that max_steps has cut short are kept for the fit that ends it
            self._tell("on_train_end")

    def end(self) -> None:
        """Remove the hooks on the user's optimizers, free the gradients, and let persistent data workers end."""
        for hook in self._hooks:
            hook.remove()
        self._loader = self._val_loader = None
        self._module.zero_grad(set_to_none=True)

    def _set_modes(self) -> None:
        """Put the module into training mode; parts that alone are in eval mode stay in it."""
        module = self._module
        parts = dict(cast("Iterator[tuple[str, torch.nn.Module]]", module.named_modules()))
        frozen = {name: part for name, part in parts.items() if module.training and not part.training}
        module.train()  # which the user may have overridden, to freeze parts there
        for part in frozen.values():
            part.training = False
        # BatchNorm and frozen layers are put into eval mode on purpose. A pretrained model comes in it as a whole.
        found = [
            name
            for name, part in frozen.items()
            if not isinstance(part, _BATCH_NORMS)
            if any(parameter.requires_grad for parameter in part.parameters(recurse=False))
        ]
        if found and self._run.rank == 0:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            warnings.warn(
                f"{type(module).__name__} has parts in eval mode that are trained, and stay in it:"
                f" {', '.join(found[:5])}{more}. Unless that is meant, call train() on them in __init__",
                stacklevel=2,
            )

    def _warn_of_no_step(self) -> None:
        """Warn, on rank 0, of an epoch in which no optimizer was stepped, and say why."""
        if self._run.rank == 0:
            why = "train_loader gave no batch" if self._module.automatic_optimization else "no optimizer was stepped"
            stops = self._trainer.uneven == "stop"
            some = "on one of the ranks, with which uneven='stop' stops all" if stops else "on any rank"
            end = ", so the fit ends before max_steps" if self._trainer.max_epochs is None else ""
            warnings.warn(f"an epoch made no optimizer step: {why} {some}{end}", stacklevel=2)

    @property
    def _has_enough_epochs(self) -> bool:
        limit = self._trainer.max_epochs
        return limit is not None and self._run.counters.epochs >= limit

    @property
    def _has_enough_steps(self) -> bool:
        limit = self._trainer.max_steps
        return limit is not None and self._run.counters.global_step >= limit

    # -- an epoch -----------------------------------------------------------------------------------------------------

    def _epoch(self) -> None:
        run, trainer = self._run, self._trainer
        run.position.begin_epoch(run.counters.epochs, self._loader)
        trainer.plan = plan = Plan.agree(run.collective, self._loader)
        self._module.on_train_epoch_start()
        run.call("on_train_epoch_start")
        # A hook may have frozen or unfrozen parameters: then a fresh wrapper.
        self._strategy.wrap(self._module, run.device, several_backwards=not self._module.automatic_optimization)
        # A rank that ran out of data before the others reached max_steps did not complete the epoch either.
        finished = run.collective.reduce_boolean_decision(self._train(plan))
        run.reduce_metrics()
        if not finished:
            return  # a later fit resumes in the middle of this epoch
        run.position.redo_from_here()
        if self._val_loader is not None:
            evaluate(run, self._val_loader, "validate")
        for scheduler in run.schedulers:
            # Before the first optimizer step of all there is nothing to schedule, and torch warns.
            if scheduler.interval == "epoch" and self._module.automatic_optimization and run.counters.global_step:
                scheduler.step(trainer.metrics)
        run.counters.epochs += 1
        run.position.end_epoch()
        self._tell("on_train_epoch_end")
        run.store.reduced.clear()
        trainer.should_stop = run.collective.reduce_boolean_decision(trainer.should_stop, all=False)

    def _tell(self, hook: str) -> None:
        """Call a hook of the module and of all callbacks; each finds the metrics that those before it have logged."""
        run = self._run
        run.samples = 1  # what hooks log weighs the same on all ranks
        callbacks = (partial(getattr(each, hook), run.trainer, run.module) for each in run.trainer.callbacks)
        for call in (getattr(run.module, hook), *callbacks):
            call()
            run.reduce_metrics()
            run.store.metrics.clear()

    def _train(self, plan: Plan) -> bool:
        """Train on one epoch's batches; return whether this rank came to their end."""
        run, uneven = self._run, self._trainer.uneven
        if uneven == "error" and plan.shortest is not None and not plan.even:
            raise ValueError(
                f"uneven='error' and the ranks have {list(plan.lengths)} batches; make them even, or use uneven='join'"
                " [J237]"
            )
        unknown = plan.shortest is None and len(plan.lengths) > 1
        vote = unknown and uneven == "stop"
        run.is_weighted = self._trainer.accumulate_grad_batches > 1 or not plan.equal_batches
        even = plan.even or (uneven == "stop" and plan.shortest is not None)
        listed = [
            *run.optimizers,
            *(each.scheduler for each in run.schedulers),
            *([] if run.scaler is None else [run.scaler]),
            run.counters,
            *(each for each in self._trainer.callbacks if type(each).state_dict is not Callback.state_dict),
            run.take_snapshot,
            *([self._all_have_another] if vote else []),
        ]
        block = self._strategy.block(
            listed,
            enable=not even or run.is_weighted,
            throw=unknown and uneven == "error",
            transform_gradients=self._prepare_gradients,
        )
        limit = plan.shortest if uneven == "stop" else None
        finished: bool | None = None
        try:
            with block:
                finished = self._train_batches(limit, vote=vote)
                run.samples = 0  # what this rank logs while it shadows others weighs nothing
        except EarlyTerminationError as error:
            raise self._uneven_error(ran_out=finished is not None) from error
        return finished

    def _uneven_error(self, *, ran_out: bool) -> EarlyTerminationError:
        """The error that all ranks raise at the same step, with who ran out: one object all-gather."""
        run = self._run
        counts: list[int | None] = run.collective.all_gather_object(run.position.batches_read if ran_out else None)
        told = ", ".join(f"rank {rank} after {count} batches" for rank, count in enumerate(counts) if count is not None)
        return EarlyTerminationError(
            f"uneven='error' and the ranks have different numbers of batches: there are no more on {told}; make them"
            " even, or use uneven='join' [J238]"
        )

    def _train_batches(self, limit: int | None, *, vote: bool) -> bool:
        run = self._run
        voting = self._while_all_have_one if vote else None
        for index, batch, is_last in run.position.batches(self._loader, limit, voting):
            batch = run.take(batch)
            if cast("Any", self._module.on_train_batch_start(batch, index)) == -1:
                raise ValueError(
                    "on_train_batch_start returned -1, and the trainer does not skip the rest of an epoch; return"
                    " nothing [J239]"
                )
            run.call("on_train_batch_start", batch, index)
            if self._module.automatic_optimization:
                outputs = self._automatic_step(batch, index, is_last)
            else:
                with run.precision.forward_context():
                    outputs = self._module.training_step(batch, index)
            run.position.advance()
            self._module.on_train_batch_end(outputs, batch, index)
            run.call("on_train_batch_end", outputs, batch, index)
            run.store.singles.clear()
            if self._has_enough_steps:
                return is_last
        return True

    def _while_all_have_one(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches up to those of the first rank that has no more: before each, the ranks vote."""
        while True:
            found = next(batches, None)
            self._has_another = found is not None
            if not self._all_have_another():
                return
            yield found

    # -- a step -------------------------------------------------------------------------------------------------------

    def _automatic_step(self, batch: Any, index: int, is_last: bool) -> Any:
        run, k = self._run, self._trainer.accumulate_grad_batches
        optimizer = run.optimizers[0]
        if index % k == 0:
            optimizer.zero_grad()
        with run.precision.forward_context():
            outputs: Any = self._module.training_step(batch, index)
        loss = cast("dict[str, Any]", outputs).get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"training_step of {type(self._module).__name__} returned {outputs!r}; return the loss, a tensor, or a"
                ' dict with it under "loss" [J240]'
            )
        if loss.numel() != 1 or not loss.requires_grad:
            what = "does not depend on a parameter" if loss.numel() == 1 else f"has the shape {list(loss.shape)}"
            raise ValueError(
                f"the loss that training_step of {type(self._module).__name__} returned {what}; return the mean over"
                " the samples, computed from the module's outputs [J241]"
            )
        sync = is_last or (index + 1) % k == 0
        run.backward(loss if run.scaler is None else run.scaler.scale(loss), sync=sync)
        if sync:
            self._step(optimizer)
        return cast("Any", outputs)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        run = self._run
        if run.scaler is None:
            self._prepare_gradients()
            optimizer.step()
        else:
            run.scaler.unscale_(optimizer)
            self._prepare_gradients()
            run.scaler.step(optimizer)
            run.scaler.update()
        run.counters.global_step += 1
        for scheduler in run.schedulers:
            if scheduler.interval == "step":
                scheduler.step(self._trainer.metrics)

    def _prepare_gradients(self) -> None:
        """Change gradients before the optimizer's step; under manual optimization, the user's step does that."""
        if not self._module.automatic_optimization:
            return
        self._module.on_before_optimizer_step(self._run.optimizers[0])
        if self._trainer.gradient_clip_val is not None:
            torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._trainer.gradient_clip_val)

    # Under manual optimization, torch calls these before and after each step of an optimizer.

    def _prepare_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._module.on_before_optimizer_step(optimizer)

    def _count_step(self, *_: Any) -> None:
        self._run.counters.global_step += 1


def _warn_of_foreign_parameters(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Warn of an optimizer that has no parameter of the module."""
    mine = set(map(id, module.parameters()))
    if not any(id(each) in mine for group in optimizer.param_groups for each in group["params"]):
        kind = type(module).__name__
        warnings.warn(
            f"the {type(optimizer).__name__} that configure_optimizers returned has none of the parameters of {kind},"
            " and trains nothing of it; make it there, from self.parameters()",
            stacklevel=2,
        )
