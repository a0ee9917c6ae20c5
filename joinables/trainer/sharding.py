"""Optimizers as ``ZeroRedundancyOptimizer``: :func:`sharded`, and :func:`optimizer_state` of either kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from joinables.zero import ZeroRedundancyOptimizer


def sharded(optimizer: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
    """Return an optimizer that does what ``optimizer``, which is new, would do, with its state spread over the ranks.

    Raises:
        TypeError: for an optimizer that is not made from parameter groups alone.
    """
    from joinables.zero import ZeroRedundancyOptimizer  # it takes a second to import; most programs never need it

    options = {name: value for name, value in optimizer.defaults.items() if name != "differentiable"}
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    try:
        zero = ZeroRedundancyOptimizer(groups[0]["params"], type(optimizer), **options)
    except TypeError as error:
        raise TypeError(
            f"{type(optimizer).__name__} cannot be sharded: ZeroRedundancyOptimizer builds it from parameters and"
            f" {sorted(options)}, which failed: {error}"
        ) from error
    zero.param_groups[0].update({name: value for name, value in groups[0].items() if name != "params"})
    for group in groups[1:]:
        zero.add_param_group(group)
    return zero


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
