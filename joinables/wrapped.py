"""What frameworks wrap: :func:`unwrapped` sees through it to what is trained.

By what the wrapper has and not by its class, so that no framework is imported::

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

from joinables._torch.compiler import compiled_from


def unwrapped(obj: Any) -> Any:
    """The optimizer, scheduler or module that ``obj`` hands its calls on to, through all its wrappers; or ``obj``."""
    while True:
        inner = _inner(obj)
        if inner is None:
            return obj
        obj = inner


def _inner(obj: Any) -> Any:
    if isinstance(obj, torch.nn.Module):
        inner = compiled_from(obj) or dict(obj.named_children()).get("_forward_module")
        return inner if isinstance(inner, torch.nn.Module) else None
    if hasattr(obj, "param_groups"):  # a scheduler has none
        inner = getattr(obj, "optimizer", None)
        return inner if isinstance(inner, torch.optim.Optimizer) else None
    inner = None if isinstance(obj, torch.optim.lr_scheduler.LRScheduler) else getattr(obj, "scheduler", None)
    return inner if isinstance(inner, torch.optim.lr_scheduler.LRScheduler) else None
