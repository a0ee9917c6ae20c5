"""The optimizers and schedulers that ``configure_optimizers`` returns: :func:`parse_optimizers`, checks, states."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from join.arguments import did_you_mean
from joinables.trainer.loops.metrics import monitored


@dataclass
class Scheduler:
    """A scheduler and when it steps.

    Attributes:
        interval: ``"epoch"`` or ``"step"``.
        monitor: the metric it steps on, for ``ReduceLROnPlateau``.
    """

    scheduler: Any
    interval: str = "epoch"
    monitor: str | None = None

    def step(self, metrics: Mapping[str, float]) -> None:
        """Step the scheduler; ``ReduceLROnPlateau`` needs its metric to have been logged."""
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(monitored(metrics, self.monitor))
        else:
            self.scheduler.step()


def parse_optimizers(configured: Any) -> tuple[list[torch.optim.Optimizer], list[Scheduler]]:
    """Return the optimizers and schedulers in what ``configure_optimizers`` has returned."""
    optimizers: list[torch.optim.Optimizer] = []
    schedulers: list[Scheduler] = []
    several = isinstance(configured, (list, tuple))
    found = list(cast("Sequence[Any]", configured)) if several else [configured]
    if isinstance(configured, tuple) and len(found) == 2 and all(isinstance(part, list) for part in found):
        found = [*found[0], *({"lr_scheduler": each} for each in found[1])]
    for each in found:
        options: Any = {"optimizer": each} if isinstance(each, torch.optim.Optimizer) else each
        if not isinstance(options, dict) or not options.keys() & {"optimizer", "lr_scheduler"}:
            raise TypeError(
                f"configure_optimizers returned {configured!r}; return an optimizer, a list of them, ([optimizers],"
                ' [schedulers]), or {"optimizer": ..., "lr_scheduler": ...} [J247]'
            )
        options = cast("dict[str, Any]", options)
        _check_keys("what configure_optimizers returned", options, ("optimizer", "lr_scheduler", "monitor"))
        if "optimizer" in options:
            optimizers.append(options["optimizer"])
        if options.get("lr_scheduler") is not None:
            schedulers.append(_scheduler(options["lr_scheduler"], options.get("monitor")))
    if not optimizers:
        raise TypeError(
            f"configure_optimizers returned {configured!r}, which has no optimizer; return one in it [J248]"
        )
    return optimizers, schedulers


def check_closure(optimizer: torch.optim.Optimizer, automatic: bool, ranks: int) -> None:
    """Refuse optimizers whose ``step`` needs a closure: automatic optimization has none, and LBFGS is for one rank."""
    name = type(optimizer).__name__
    several = any(group.get("max_iter", 1) > 1 for group in optimizer.param_groups)
    if ranks > 1 and several and isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{name} evaluates its closure as often as the loss tells it to, another number on each rank; train with"
            " devices=1 and automatic_optimization = False, or take another optimizer [J249]"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if automatic and closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} needs a closure in its step; set automatic_optimization = False and call"
            " self.optimizers().step(closure) in training_step, with a closure that calls self.manual_backward(loss)"
            " [J250]"
        )


def check_groups(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse a saved state whose parameter groups are not those of the optimizer."""
    if "param_groups" not in saved:
        return
    mine, theirs = (
        [len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if mine != theirs:
        raise ValueError(
            f"the {type(optimizer).__name__} in the state to resume from has groups of {theirs} parameters, and that of"
            f" configure_optimizers of {mine}; make the same there, and those that a hook adds in a fit again in"
            " on_load_checkpoint(checkpoint), where checkpoint['epochs'] says how far it was [J251]"
        )


def _check_keys(where: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse unknown keys in a dict; ``frequency`` and ``strict`` may have the values that change nothing."""
    for name, value in options.items():
        if name not in known and (name, value) not in (("frequency", 1), ("strict", True)):
            raise ValueError(
                f"{name!r}: {value!r} in {where} is unknown; use {', '.join(known)}{did_you_mean(name, known)} [J252]"
            )


def _scheduler(given: Any, monitor: str | None) -> Scheduler:
    """Parse what was given as ``"lr_scheduler"``; ``monitor`` is the metric where its own dict has none."""
    options = dict(cast("dict[str, Any]", given)) if isinstance(given, dict) else {"scheduler": given}
    if not hasattr(options.get("scheduler"), "step") or isinstance(options["scheduler"], torch.optim.Optimizer):
        raise TypeError(
            f"configure_optimizers returned {given!r} where a scheduler belongs; return a scheduler, or a dict with one"
            " under 'scheduler' [J253]"
        )
    _check_keys("a scheduler's dict", options, ("scheduler", "interval", "monitor", "name"))
    made = Scheduler(options["scheduler"], options.get("interval", "epoch"), options.get("monitor", monitor))
    if made.interval not in ("epoch", "step"):
        raise ValueError(f"interval={made.interval!r} of a scheduler is neither 'epoch' nor 'step' [J254]")
    if isinstance(made.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and made.monitor is None:
        raise ValueError('ReduceLROnPlateau needs a metric: {"scheduler": ..., "monitor": "val_loss"} [J255]')
    return made


def retarget(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make a scheduler that was built for one optimizer drive another with the same groups."""
    # A scheduler marks the step of its optimizer, and warns if the mark is gone; one that changes nothing sets it.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    scheduler.optimizer = optimizer


def optimizer_state(optimizer: torch.optim.Optimizer, *, writer: int, rank: int) -> Any:
    """The whole state of an optimizer on rank ``writer``, ``None`` elsewhere; called on all ranks."""
    consolidate: Any = getattr(optimizer, "consolidate_state_dict", None)
    if consolidate is not None:
        consolidate(to=writer)
    return optimizer.state_dict() if rank == writer else None
