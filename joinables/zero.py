"""Adapter for ``ZeroRedundancyOptimizer``: :class:`ZeroStep`.

Every rank owns a shard of the parameters: it steps its shard and broadcasts it. A joined rank must go on stepping its
shard, on the true gradients, or these parameters would no longer train. The order of collectives of one step::

    active rank                              joined rank
    -----------                              -----------
    header   (before the local step)         header
    local step on the own shard              .
    header is read                           .
    all-reduce of the hyperparameters (*)    all-reduce of the hyperparameters
    .                                        take these over; change gradients as the user does; step on the own shard
    broadcast of each rank's shard           broadcast of each rank's shard

(*) only if a rank is joined, and not awaited: ``joinables.optimizer_step``.

What the loop does to gradients between ``backward`` and ``step``, such as clipping, a joined rank does by
``transform_gradients``. A GradScaler's unscaling is no such change, since a joined rank does not know its scale: use
ZeRO without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from typing_extensions import override

from join.joinable import BurstState
from joinables._torch.optimizers import broadcast_shards, overlaps_with_ddp, zero_redundancy_optimizer
from joinables.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer
else:
    ZeroRedundancyOptimizer = zero_redundancy_optimizer()


class ZeroStep(OptimizerStep):
    """Shadows the steps of a ``ZeroRedundancyOptimizer``; ``Join`` makes one for a stock optimizer by itself.

    Args:
        optimizer: the sharded optimizer.
        transform_gradients: what the loop does to the gradients between backward and step (clipping, adding noise);
            called without arguments on a joined rank, where ``param.grad`` holds the reduced gradients of all
            parameters.

    Raises:
        TypeError: for an optimizer of another class.
        ValueError: for an optimizer with ``overlap_with_ddp=True``: its step happens inside DDP's communication hook,
            where it cannot be shadowed.
    """

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, transform_gradients: Callable[[], object] | None = None
    ) -> None:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}, and ZeroStep is for ZeroRedundancyOptimizer; list others"
                " as they are [J278]"
            )
        super().__init__(optimizer)
        if overlaps_with_ddp(optimizer):
            raise ValueError(
                "optimizer has overlap_with_ddp=True: its step runs inside DDP's communication hook and cannot be"
                " shadowed; build it with overlap_with_ddp=False [J279]"
            )
        self._zero = optimizer
        self._transform_gradients = transform_gradients

    @property
    @override
    def _local_optimizer(self) -> torch.optim.Optimizer:
        return cast("Any", self._optimizer).optim

    @override
    def _skip_step(self) -> None:
        broadcast_shards(self._zero)

    @override
    def _shadow_step(self) -> None:
        try:
            if self._transform_gradients is not None:
                self._transform_gradients()
        except BaseException:
            broadcast_shards(self._zero)  # the others are in their broadcasts
            self.state = BurstState.IDLE
            raise
        super()._shadow_step()
