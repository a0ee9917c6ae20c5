"""Adapter for ``ZeroRedundancyOptimizer``: :class:`ZeroStep`.

Every rank owns a shard of the parameters: it steps its shard and broadcasts it. A joined rank must go on stepping its
shard, on the true gradients, or these parameters would no longer train. The order of collectives of one step::

    active rank                              joined rank
    -----------                              -----------
    header   (before the local step)         header
    local step on the own shard              .
    header is read                           .
    election of a leader, if the old one     the same
    left (*)
    all-reduce of the hyperparameters (*):   the same:
        the leader's, of others 0; not           0; takes over the sums
        awaited
    .                                        change gradients as the user does; step on the own shard
    broadcast of each rank's shard           broadcast of each rank's shard

(*) only if a rank is joined. Learning rate, momentum and the like may change meanwhile, because schedulers run on
active ranks only.

What the loop does to gradients between ``backward`` and ``step``, such as clipping, a joined rank does by
``transform_gradients``. A GradScaler's unscaling is no such change, since a joined rank does not know its scale: use
ZeRO without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from typing_extensions import override

from join import Join
from join.collectives._torch_private import pytree
from join.transfer import Exchange
from joinables._torch.objects import broadcast_shards, overlaps_with_ddp, zero_redundancy_optimizer
from joinables.adapter import Announcing
from joinables.state import group_values

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer
else:
    ZeroRedundancyOptimizer = zero_redundancy_optimizer()


class ZeroStep(Announcing):
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

    breaks_in_time = True  # by the time limit of the group
    tracks_leader = True  # whose hyperparameters joined ranks take over

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
        self._zero, self._shadowing = optimizer, False
        self._transform_gradients = transform_gradients

    @property
    @override
    def join_name(self) -> str:
        return f"the step of {type(self._zero).__name__}"

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        local = cast("torch.optim.Optimizer", cast("Any", self._zero).optim)  # whose step changes this rank's shard
        self._handles = [
            self._zero.register_step_pre_hook(self._before_step),
            local.register_step_post_hook(self._after_local_step),
        ]

    @override
    def exchange(self, source: int) -> Exchange:
        """Take over what schedulers have changed; the shards are up to date on all ranks."""
        own = self._hyperparameters()
        inbox = yield own
        received = inbox.fill(inbox.skeleton, own)
        yield ""
        self._take_over(received)

    # -- the active side ----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A closure runs bursts of its own inside the local step; then the announcement comes after it.
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        if self._channel.is_in_loop_body:
            self._channel.scaling.check_step(self, self._channel.step)
        if not self._shadowing and not has_closure:
            self._announce()

    def _after_local_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._shadowing:
            return
        if not self.is_pending:
            self._announce()
        self.is_pending = False
        self._share_hyperparameters(active=True)

    def _announce(self) -> None:
        self._channel.announce(self)
        self.is_pending = True

    @override
    def fulfil(self) -> None:
        self.is_pending = False
        self._share_hyperparameters(active=True)
        broadcast_shards(self._zero)

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        self._share_hyperparameters(active=False)
        self._shadowing = True
        try:
            if self._transform_gradients is not None:
                self._transform_gradients()
            self._zero.step()
        finally:
            self._shadowing = False

    # -- hyperparameters ----------------------------------------------------------------------------------------------

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Everything in the optimizer's groups but the parameters, in an order that is the same on all ranks."""
        groups: list[dict[str, Any]] = self._zero.param_groups  # load_state_dict makes new ones
        return [{name: group[name] for name in sorted(group.keys() - {"params"})} for group in groups]

    def _take_over(self, received: list[dict[str, Any]]) -> None:
        for group, values in zip(self._zero.param_groups, received, strict=True):
            group.update(values)

    def _share_hyperparameters(self, *, active: bool) -> None:
        """Send the leader's numbers to joined ranks, if there are any, in the burst of the last header."""
        if self._channel.headers.active_for(self) < self._collective.world_size:
            self._send_hyperparameters(active=active)
        self._stepped_by = [dict(group) for group in self._zero.param_groups]

    def _send_hyperparameters(self, *, active: bool) -> None:
        is_leader = self._channel.leader_for(self) == self._collective.rank
        values, structure = pytree.tree_flatten(self._hyperparameters())
        numbers = [float(value) if is_leader else 0.0 for value in values if _is_number(value)]
        self._sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")  # kept while it is under way
        work = self._collective.all_reduce(self._sums)
        if not active:
            work.wait()
            sums = iter(cast("list[float]", self._sums.tolist()))
            received = [_like(value, next(sums)) if _is_number(value) else value for value in values]
            self._take_over(pytree.tree_unflatten(received, structure))

    @override
    def check_leavers(self) -> None:
        # One that has left between the backward and this step was not sent the learning rate of the others.
        self._channel.check_equal([(self.join_name, group_values(self._stepped_by))])


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _like(value: Any, number: float) -> Any:
    """The number in the type of ``value``; a tensor is changed in place."""
    if isinstance(value, torch.Tensor):
        return value.fill_(number)
    return int(number) if isinstance(value, int) and number.is_integer() else number
