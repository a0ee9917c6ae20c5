"""Every private API of torch's optimizers that this package calls, each with what it stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from joinables._torch.versions import require

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


def has_stepped(target: Any) -> bool:
    """Whether an optimizer has made a step. Stands in for a question that schedulers ask before they warn."""
    return bool(getattr(target, "_opt_called", False))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know that an optimizer is where others have stepped to. Stands in for the step itself."""
    vars(optimizer).update(_opt_called=True)


def zero_redundancy_optimizer() -> type[ZeroRedundancyOptimizer]:
    """The class. Stands in for an import that does not warn of ``torch.jit.script`` and costs only who needs it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.(script|interface)` is ", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    require({"torch.distributed.optim:ZeroRedundancyOptimizer": ("_sync_params",)})
    return ZeroRedundancyOptimizer


def overlaps_with_ddp(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Whether the optimizer was built with ``overlap_with_ddp=True``."""
    return optimizer._overlap_with_ddp


def broadcast_shards(optimizer: ZeroRedundancyOptimizer) -> None:
    """The collectives of a step without the step. Stands in for the rest of a step that raised half-way."""
    optimizer._sync_params()
