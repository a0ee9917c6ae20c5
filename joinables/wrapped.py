"""Removal of frameworks' wrappers: :func:`unwrapped` returns the object that is trained.

A wrapper of an optimizer is removed only if it shares the state of the optimizer inside. Wrappers are recognised by
their attributes rather than their classes, so that no framework is imported::

    Accelerate   AcceleratedOptimizer    .optimizer
                 AcceleratedScheduler    .scheduler
    Lightning    LightningOptimizer      .optimizer
                 Fabric's optimizer      .optimizer
                 Fabric's module         ._forward_module
    torch        torch.compile           ._orig_mod
                 PostLocalSGDOptimizer   .optim
    others       wrapped optimizers      .base_optimizer, ._optimizer
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from joinables._torch.objects import compiled_from, has_hooks


def unwrapped(obj: Any) -> Any:
    """Return the optimizer, scheduler or module inside all wrappers of ``obj``, or ``obj`` itself without any."""
    while (inner := _inner(obj)) is not None:
        obj = inner
    return obj


def holds_optimizers(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer contains others whose state its ``state_dict`` returns, so that it has no own hooks.

    Raises:
        TypeError: If its ``state_dict`` does not return that state.
    """
    holds, state = not has_hooks(optimizer), getattr(optimizer, "state", None)
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer and inner.state is not state:
            if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
                raise TypeError(
                    f"{type(optimizer).__name__} contains the optimizer {type(inner).__name__} in .{name}, but its"
                    f" state_dict does not return the state of that. List optimizer.{name} instead. [J443]"
                )
            holds = True
    return holds


def _inner(obj: Any) -> Any:
    if isinstance(obj, torch.nn.Module):
        inner = compiled_from(obj) or dict(obj.named_children()).get("_forward_module")
        return inner if isinstance(inner, torch.nn.Module) else None
    if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
        return None
    for inner in [getattr(obj, name, None) for name in ("optimizer", "optim", "base_optimizer", "_optimizer")]:
        if isinstance(inner, torch.optim.Optimizer) and _shares_state(obj, inner):
            return inner
    inner = None if hasattr(obj, "param_groups") else getattr(obj, "scheduler", None)
    return inner if isinstance(inner, torch.optim.lr_scheduler.LRScheduler) else None


def _shares_state(wrapper: Any, inner: torch.optim.Optimizer) -> bool:
    """Return whether a wrapper has the state of the optimizer inside, and no other."""
    state = getattr(wrapper, "state", None)
    if state is not None and state is not getattr(inner, "state", None):
        return False
    with suppress(Exception):  # some wrappers of optimizers have no state_dict, or one only after they are set up
        return wrapper.state_dict().keys() == inner.state_dict().keys()
    return hasattr(wrapper, "param_groups")
