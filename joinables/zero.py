"""Adapter for ``ZeroRedundancyOptimizer``: :class:`ZeroStep`.

Every rank owns a shard of the parameters. It steps its shard and broadcasts it. A joined rank has to keep stepping its
shard on the true gradients; otherwise the parameters in it would stay unchanged. The order of collectives in one step::

    active rank                              joined rank
    -----------                              -----------
    header   (before the local step)         header
    local step on the own shard              .
    header is read                           .
    rows that name a leader, if the old one  the same
    left (*)
    all-reduce of the hyperparameters (*)    the same:
        and of a sample of gradients and         zeros; loads the hyperparameters, and compares the
        parameters: the leader's, zeros on       sample with its own (``joinables.sample``)
        others; not awaited                      .
    .                                        change gradients as the user does; step on the own shard
    broadcast of each rank's shard           broadcast of each rank's shard

(*) only if a rank is joined. Learning rate, momentum and the like may change after a rank has joined, because
schedulers run on active ranks only.

If the loop changes gradients between ``backward`` and ``step``, for example by clipping, ``transform_gradients`` makes
the same change on a joined rank. It cannot do the unscaling of a GradScaler, because a joined rank does not have the
scale. So a step is an error if the block lists a GradScaler, except in a loop over ``Join.iterate``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join, JoinError
from join.collectives._torch_private import pytree
from join.transfer import Exchange
from joinables._torch import reducer
from joinables._torch.objects import broadcast_shards, overlaps_with_ddp, zero_redundancy_optimizer
from joinables.adapter import Announcing
from joinables.sample import Sample
from joinables.state import Steps, group_values, parameters_of, without_params

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer
else:
    ZeroRedundancyOptimizer = zero_redundancy_optimizer()


class ZeroStep(Steps, Announcing):
    """Adapter that shadows the steps of a ``ZeroRedundancyOptimizer``.

    ``Join`` makes one if you list such an optimizer.

    Args:
        optimizer: The sharded optimizer.
        transform_gradients: The change that the loop makes to gradients between backward and step, such as clipping or
            adding noise. It is called without arguments on a joined rank, where ``param.grad`` holds the reduced
            gradients of all parameters. By default, gradients stay unchanged.

    Raises:
        ValueError: If ``optimizer`` has ``overlap_with_ddp=True``. Its step runs inside DDP's communication hook, where
            it cannot be shadowed.
    """

    breaks_in_time = True  # its broadcasts fail at the time limit of the process group
    tracks_leader = True  # joined ranks load the hyperparameters of the leader

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, transform_gradients: Callable[[], object] | None = None
    ) -> None:
        super().__init__(optimizer, f"the step of {type(optimizer).__name__}")
        if overlaps_with_ddp(optimizer):
            raise ValueError(
                "The ZeroRedundancyOptimizer has overlap_with_ddp=True. Its step runs inside DDP's communication hook"
                " and cannot be shadowed. Build it with overlap_with_ddp=False. [J279]"
            )
        self._zero, self._shadowing = optimizer, False
        self._transform_gradients = transform_gradients

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self.is_pending = False
        self._stepped_by: list[dict[str, Any]] = []  # the groups of the last step in this block
        self._group_count = len(self._zero.param_groups)
        listed = [joinable.join_target for joinable in join.channel.roster.listed]
        self._is_scaled = any(isinstance(target, torch.amp.GradScaler) and target.is_enabled() for target in listed)
        local = cast("torch.optim.Optimizer", cast("Any", self._zero).optim)  # steps this rank's shard
        self._own_shard = set(map(id, parameters_of(local)))
        modules = [target for target in listed if isinstance(target, DistributedDataParallel)]
        compares = [] if self._transform_gradients is not None else modules  # a change may be random, such as noise
        reduced = {id(parameter) for ddp in compares for parameter in reducer.parameters(ddp)}
        self._sample = Sample(parameters_of(self._zero), reduced)
        self._handles.append(local.register_step_post_hook(self._after_local_step))

    @override
    def exchange(self, source: int) -> Exchange:
        """Load the hyperparameters that schedulers have changed. The shards are up to date on all ranks."""
        own = without_params(self._zero.param_groups)
        inbox = yield own
        received = inbox.fill(inbox.skeleton, own)
        yield ""
        self._load_hyperparameters(received)

    # -- the active side ----------------------------------------------------------------------------------------------

    @override
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._shadowing:
            super()._before_step(optimizer, args, kwargs)

    @override
    def _announce_step(self, args: Any, kwargs: Any) -> None:
        # A closure announces bursts inside the local step, so the announcement of the step follows afterwards.
        if not (len(args) > 1 or kwargs.get("closure") is not None):
            self._announce()

    def _after_local_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._shadowing:
            return
        if not self.is_pending:
            self._announce()
        self.is_pending = False
        self._share_hyperparameters(active=True)

    def _announce(self) -> None:
        if self._is_scaled and not self._channel.place.step.in_loop and self._collective.world_size > 1:
            self._refuse(
                f"The block lists a GradScaler and {self.join_name}. A rank that is out of data does not know the"
                " scale, so it would step its shard on scaled gradients. Loop over join.iterate, or train without"
                " a GradScaler, as with bfloat16. [J525]"
            )
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

    def _refuse(self, reason: str) -> NoReturn:
        """Raise an error, and send it to the other ranks."""
        self._channel.guard.post_and_raise(JoinError(reason))

    # -- hyperparameters ----------------------------------------------------------------------------------------------

    def _load_hyperparameters(self, received: list[dict[str, Any]]) -> None:
        for group, values in zip(self._zero.param_groups, received, strict=True):
            group.update(values)

    def _share_hyperparameters(self, *, active: bool) -> None:
        """Send the leader's hyperparameters to joined ranks, if there are any, in the burst of the last header."""
        if self._channel.headers.active_for(self) < self._collective.world_size:
            self._send_hyperparameters(active=active)
        self._stepped_by = [dict(group) for group in self._zero.param_groups]

    def _send_hyperparameters(self, *, active: bool) -> None:
        is_leader = self._channel.headers.leader_for(self) == self._collective.rank
        if len(self._zero.param_groups) != self._group_count and not self._channel.place.step.in_loop:
            self._refuse(
                f"The loop added a parameter group to {self.join_name}, which ranks without data do not have. Add"
                " it before the block, or loop over join.iterate. [J777]"
            )
        values, structure = pytree.tree_flatten(without_params(self._zero.param_groups))
        numbers = [float(value) for value in values if _is_number(value)]
        norms = self._sample.take(self._own_shard if active else set())
        sent = [*numbers, *norms] if is_leader else [0.0] * len([*numbers, *norms])
        self._sums = torch.tensor(sent, dtype=torch.float64, device="cpu")  # kept while their all-reduce runs
        work = self._collective.all_reduce(self._sums)
        if not active:
            work.wait()
            sums = iter(cast("list[float]", self._sums.tolist()))
            received = [_like(value, next(sums)) if _is_number(value) else value for value in values]
            self._load_hyperparameters(pytree.tree_unflatten(received, structure))
            self._compare(norms, list(sums))

    def _compare(self, own: list[float], theirs: list[float]) -> None:
        """Raise an error if the leader has changed gradients or parameters, because this rank has not."""
        changed = self._sample.differs(own, theirs)
        if changed == "gradients":
            self._refuse(
                f"The loop changes gradients before {self.join_name}, for example by clipping. A rank without data"
                " steps its shard without this change. List ZeroStep(optimizer, transform_gradients=function) with"
                " a function that makes the change, or loop over join.iterate. [J598]"
            )
        if changed == "parameters":
            self._refuse(
                f"The loop changes parameters after {self.join_name}, for example by a clamp. A rank without data"
                " does not, and its shard would become wrong. Loop over join.iterate, so that all ranks make the"
                " change. [J599]"
            )

    @override
    def check_leavers(self) -> None:
        # A rank that left between the backward and this step was not sent the learning rate of the other ranks.
        self._channel.check_same("compares its state", values=[(self.join_name, group_values(self._stepped_by))])


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _like(value: Any, number: float) -> Any:
    """Return the number in the type of ``value``. A tensor is changed in place."""
    if isinstance(value, torch.Tensor):
        return value.fill_(number)
    return int(number) if isinstance(value, int) and number.is_integer() else number
