"""The step of an optimizer that each rank makes on its own shard of the parameters: :class:`OptimizerStep`.

A joined rank must go on stepping its shard, on the gradients that the shadowed backward leaves there::

    active rank                                      joined rank
    -----------                                      -----------
    header   (before the local step)                 header
    local step                                       .
    header is read                                   .
    election of a leader, if the old one left (*)    the same
    all-reduce of the hyperparameters (*):           the same:
        the leader's, of others 0; not awaited           0, and takes over the sums
    .                                                local step

(*) only if a rank is joined. Learning rate, momentum and the like may change meanwhile, because schedulers run on
active ranks only.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from typing_extensions import override

from join.collectives._torch_private import pytree
from join.joinable import Block, BurstState
from join.transfer import broadcast_tree
from joinables.adapter import Announcing


class OptimizerStep(Announcing):
    """An optimizer's step that joined ranks make, too, each on its own shard.

    Args:
        optimizer: the optimizer whose step is announced.
    """

    tracks_leader = True  # whose hyperparameters joined ranks take over

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._optimizer = optimizer
        self._shadowing = False

    @property
    @override
    def join_name(self) -> str:
        return f"the step of {type(self._optimizer).__name__}"

    @property
    def _local_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose step changes this rank's shard."""
        return self._optimizer

    @override
    def attach(self, join: Block) -> None:
        super().attach(join)
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._local_optimizer.register_step_post_hook(self._after_local_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]

    @override
    def synchronise(self, source: int) -> None:
        """Take over what schedulers have changed; the shards are up to date on all ranks."""
        self._take_over(broadcast_tree(self._collective, self._hyperparameters(), source))

    # -- the active side ----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A closure runs bursts of its own inside the local step; then the announcement comes after it.
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        if self._channel.is_in_loop_body:
            self._channel.scaling.check_step(self.join_name, self._channel.step)
        if not self._shadowing and not has_closure:
            self._announce()

    def _after_local_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._shadowing:
            return
        if self.state is not BurstState.PENDING:
            self._announce()
        self._channel.confirm()
        self.state = BurstState.RUNNING
        self._share_hyperparameters(active=True)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.state = BurstState.IDLE

    def _announce(self) -> None:
        self._channel.announce(self, confirm=False)
        self.state = BurstState.PENDING

    @override
    def fulfil(self) -> None:
        self.state = BurstState.RUNNING
        self._share_hyperparameters(active=True)
        self._skip_step()
        self.state = BurstState.IDLE

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        self._share_hyperparameters(active=False)
        self._shadowing = True
        try:
            self._shadow_step()
        finally:
            self._shadowing = False

    def _shadow_step(self) -> None:
        self._optimizer.step()

    def _skip_step(self) -> None:
        """Issue the collectives of a step without making it."""

    # -- hyperparameters ----------------------------------------------------------------------------------------------

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Everything in the optimizer's groups but the parameters, in an order that is the same on all ranks."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups  # load_state_dict makes new ones
        return [{name: group[name] for name in sorted(group.keys() - {"params"})} for group in groups]

    def _take_over(self, received: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, received, strict=True):
            group.update(values)

    def _share_hyperparameters(self, *, active: bool) -> None:
        """Send the leader's numbers to joined ranks, if there are any, in the burst of the last header."""
        if self._channel.all_announced():
            return
        leads = self._channel.lead() == self._collective.rank
        values, structure = pytree.tree_flatten(self._hyperparameters())
        mine = [float(value) if leads else 0.0 for value in values if _is_number(value)]
        self._sums = torch.tensor(mine, dtype=torch.float64)  # kept while it is under way
        work = self._collective.all_reduce(self._sums)
        if not active:
            work.wait()
            sums = iter(cast("list[float]", self._sums.tolist()))
            received = [_like(value, next(sums)) if _is_number(value) else value for value in values]
            self._take_over(pytree.tree_unflatten(received, structure))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _like(value: Any, number: float) -> Any:
    """The number in the type of ``value``; a tensor is changed in place."""
    if isinstance(value, torch.Tensor):
        return value.fill_(number)
    return int(number) if isinstance(value, int) and number.is_integer() else number
