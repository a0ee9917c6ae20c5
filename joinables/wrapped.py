"""Removal of frameworks' wrappers: :func:`unwrapped` returns the object that is trained.

A wrapper of an optimizer is removed only if it shares the state of the optimizer inside. Wrappers are recognised by
their attributes rather than their classes, so that no framework is imported::

    Accelerate   AcceleratedOptimizer    .optimizer
                 AcceleratedScheduler    .scheduler
    Lightning    LightningOptimizer      .optimizer
                 Fabric's optimizer      .optimizer
                 Fabric's module         ._forward_module
    torch        torch.compile           ._orig_mod
"""

from __future__ import annotations

from typing import Any

import torch

from joinables._torch.objects import compiled_from


def unwrapped(obj: Any) -> Any:
    """Return the optimizer, scheduler or module inside all wrappers of ``obj``, or ``obj`` itself without any."""
    while True:
        inner = _inner(obj)
        if inner is None:
            return obj
        obj = inner


def holds_optimizers(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer contains others with separate state, which its ``state_dict`` returns.

    Raises:
        TypeError: If its ``state_dict`` does not return that state.
    """
    holds = False
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer and inner.state is not optimizer.state:
            if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
                kind, held = type(optimizer).__name__, type(inner).__name__
                raise TypeError(
                    f"{kind} contains a {held} in .{name}, but its state_dict does not return the state of that. List"
                    f" optimizer.{name} instead. [J443]"
                )
            holds = True
    return holds


def _inner(obj: Any) -> Any:
    if isinstance(obj, torch.nn.Module):
        inner = compiled_from(obj) or dict(obj.named_children()).get("_forward_module")
        return inner if isinstance(inner, torch.nn.Module) else None
    if hasattr(obj, "param_groups"):  # a scheduler has none
        inner = getattr(obj, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return None
        state = getattr(obj, "state", None)
        return inner if state is None or state is getattr(inner, "state", None) else None
    inner = None if isinstance(obj, torch.optim.lr_scheduler.LRScheduler) else getattr(obj, "scheduler", None)
    return inner if isinstance(inner, torch.optim.lr_scheduler.LRScheduler) else None
