"""What frameworks wrap: :func:`unwrapped` sees through it to what is trained.

An optimizer is looked through only if the state of the wrapper is that of the optimizer inside. Wrappers are known by
what they have and not by their class, so that no framework is imported::

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
    """The optimizer, scheduler or module that ``obj`` hands its calls on to, through all its wrappers; or ``obj``."""
    while True:
        inner = _inner(obj)
        if inner is None:
            return obj
        obj = inner


def holds_optimizers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has others inside, with state that is not its own, and hands it out by ``state_dict``.

    Raises:
        TypeError: if it does not hand it out.
    """
    holds = False
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer and inner.state is not optimizer.state:
            if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
                kind, held = type(optimizer).__name__, type(inner).__name__
                raise TypeError(
                    f"{kind} holds a {held} in .{name}, and its state_dict does not have the state of that. List"
                    f" optimizer.{name} in its place [J443]"
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
