"""Adapter for ``ZeroRedundancyOptimizer``: :class:`ZeroStep`.

Every rank owns a shard of the parameters: it steps its shard and broadcasts it. A joined rank must go on stepping its
own, on the true gradients, or the shard stands still. The order of collectives of one step::

    active rank                              joined rank
    -----------                              -----------
    header   (before the local step)         header
    local step on the own shard              .
    header is read                           .
    sum of the active ranks' numbers (*)     sum of the active ranks' numbers
    .                                        take these over; change gradients as the user does; step on the own shard
    broadcast of each rank's shard           broadcast of each rank's shard

(*) only if a rank is joined, and not awaited. The numbers are the hyperparameters: ``joinables.hyperparameters``.

What the loop does to gradients between ``backward`` and ``step`` is unknown to a joined rank. Say it once::

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with Join([model, ZeroStep(optimizer, transform_gradients=clip)]):
        for x, y in loader:
            ...
            loss.backward()
            clip()
            optimizer.step()

A GradScaler's unscaling is such a change, but its scale is not known on a joined rank: use ZeRO without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from typing_extensions import override

from join import Burst, Join, JoinHook
from joinables._torch_reducer import broadcast_shards, overlaps_with_ddp, zero_redundancy_optimizer
from joinables.hyperparameters import Hyperparameters
from joinables.stand_in import StandIn

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer
else:
    ZeroRedundancyOptimizer = zero_redundancy_optimizer()


class ZeroStep(StandIn, Burst, JoinHook):
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

    join_keywords: ClassVar[frozenset[str] | None] = frozenset()

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, transform_gradients: Callable[[], object] | None = None
    ) -> None:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}; ZeroStep is for ZeroRedundancyOptimizer, list others as"
                " they are"
            )
        super().__init__(optimizer)
        if overlaps_with_ddp(optimizer):
            raise ValueError(
                "optimizer has overlap_with_ddp=True: its step runs inside DDP's communication hook and cannot be"
                " shadowed; build it with overlap_with_ddp=False"
            )
        self._optimizer = optimizer
        self._transform_gradients = transform_gradients
        self._owes = self._announced = self._shadowing = False
        self._handles: list[Any] = []

    # -- Joinable -----------------------------------------------------------------------------------------------------

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @property
    @override
    def join_name(self) -> str:
        return f"the step of {type(self._optimizer).__name__}"

    @override
    def attach(self, join: Join) -> None:
        self._channel = join.channel
        self._hyperparameters = Hyperparameters(self._optimizer, join)
        self._owes = self._announced = self._shadowing = False
        inner = cast("torch.optim.Optimizer", cast("Any", self._optimizer).optim)
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_step),
            inner.register_step_post_hook(self._after_local_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]

    @override
    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    @override
    def synchronise(self, source: int) -> None:
        # Every rank kept its own shard up to date; what schedulers changed is not in the shards.
        self._hyperparameters.broadcast(source)

    # -- the active side ----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A closure runs bursts of its own inside the local step; then the announcement comes after it.
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        if not self._shadowing and not has_closure:
            self._announce()

    def _after_local_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._shadowing:
            return
        if not self._announced:
            self._announce()
        self._channel.confirm()
        self._hyperparameters.share(active=True)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._owes = self._announced = False

    def _announce(self) -> None:
        self._channel.announce(self, confirm=False)
        self._owes = self._announced = True

    @property
    @override
    def owes(self) -> bool:
        return self._owes

    @override
    def fulfil(self) -> None:
        self._owes = self._announced = False
        self._hyperparameters.share(active=True)
        broadcast_shards(self._optimizer)

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        self._hyperparameters.share(active=False)
        self._shadowing = True
        try:
            self._step_shard()
        finally:
            self._shadowing = False

    def _step_shard(self) -> None:
        try:
            if self._transform_gradients is not None:
                self._transform_gradients()
        except BaseException:
            broadcast_shards(self._optimizer)  # the others are in their broadcasts
            raise
        self._optimizer.step()
