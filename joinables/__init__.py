"""Joinables: adapters with which stock torch objects take part in :class:`join.Join`.

The import of this package registers them. ``join`` imports it when it first meets an object of an unknown class.
"""

from __future__ import annotations

import joinables.before  # noqa: F401  # isort: skip  # pyright: ignore[reportUnusedImport]

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Joinable as TorchJoinableBase
from torch.nn.parallel import DistributedDataParallel

import join
from join import *  # noqa: F403
from join import Joinable, register_joinable
from join.collectives.version import VERSION
from join.registry import joinables_of
from joinables._torch.objects import is_replicated
from joinables.adapter import TorchJoinable
from joinables.ddp import joinables_of_ddp
from joinables.ddp.buffers import BucketRebuild, BufferSync
from joinables.ddp.reduction import GradientSync
from joinables.loss_gate import LossGate
from joinables.metrics import joinable_of_metric
from joinables.over_ranks import Mean, steps
from joinables.own_collectives import ShardedModule, is_dtensor, is_sharded
from joinables.state import ModuleState, OptimizerState, SchedulerState, State
from joinables.wrapped import holds_optimizers, unwrapped

if TYPE_CHECKING:
    from joinables.zero import ZeroStep

__all__ = [
    "BucketRebuild",
    "BufferSync",
    "GradientSync",
    "LossGate",
    "Mean",
    "ShardedModule",
    "State",
    "TorchJoinable",
    "ZeroStep",
    "steps",
]
__all__ += join.__all__

__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name == "ZeroStep":  # its import takes a second, and most programs never need it
        from joinables.zero import ZeroStep

        return ZeroStep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _through_wrappers(adapter: Callable[[Any], Joinable | Sequence[Joinable]]) -> Callable[[Any], Any]:
    """Return the adapter, extended to objects that a framework has wrapped: it adapts the object inside."""

    def adapt(obj: Any) -> Joinable | Sequence[Joinable]:
        inner = unwrapped(obj)
        return adapter(obj) if inner is obj else joinables_of(inner)

    return adapt


def _joinables_of_optimizer(optimizer: torch.optim.Optimizer) -> Joinable | Sequence[Joinable]:
    """Return the joinables of an optimizer: state, or, if it is torch's own ``Joinable``, ZeRO's or a foreign one."""
    if not isinstance(optimizer, TorchJoinableBase):
        return State(optimizer) if holds_optimizers(optimizer) else OptimizerState(optimizer)
    from joinables.zero import ZeroRedundancyOptimizer, ZeroStep

    return ZeroStep(optimizer) if isinstance(optimizer, ZeroRedundancyOptimizer) else TorchJoinable(optimizer)


def _joinables_of_module(module: torch.nn.Module) -> Joinable | Sequence[Joinable]:
    """Return the joinables of a module: a plain one is state, such as an EMA copy; a sharded one or a metric is not."""
    if isinstance(module, TorchJoinableBase):
        return TorchJoinable(module)
    if is_sharded(module):
        return ShardedModule(module)
    if any(map(is_replicated, module.modules())):
        raise TypeError(
            f"replicate was called on {type(module).__name__} or a part of it. Join does not support the module that"
            " replicate hides there. Write model = DistributedDataParallel(model) instead, and list it. [J545]"
        )
    if any(is_dtensor(parameter) for parameter in module.parameters()):
        raise TypeError(
            f"The parameters of {type(module).__name__} are DTensors, and Join cannot determine what reduces their"
            " gradients. Apply fully_shard to the module, or wrap it in DistributedDataParallel. [J102]"
        )
    return joinable_of_metric(module) or ModuleState(module)


register_joinable(object, _through_wrappers(State))
register_joinable(torch.optim.lr_scheduler.LRScheduler, SchedulerState)
register_joinable(torch.amp.GradScaler, SchedulerState)
register_joinable(torch.nn.Module, _through_wrappers(_joinables_of_module))
register_joinable(torch.optim.Optimizer, _through_wrappers(_joinables_of_optimizer))
register_joinable(TorchJoinableBase, TorchJoinable)
register_joinable(DistributedDataParallel, joinables_of_ddp)
