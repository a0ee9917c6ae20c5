"""Adapter for ``ZeroRedundancyOptimizer``: :class:`ZeroStep`.

Every rank owns a shard of the parameters: it steps its shard and broadcasts it. A joined rank must go on stepping its
own, on the true gradients, or the shard stands still. The order of collectives of one step::

    active rank                              joined rank
    -----------                              -----------
    header   (before the local step)         header
    local step on the own shard              take over the active ranks' hyperparameters (from the header)
    header is read                           change gradients as the user does, local step on the own shard
    broadcast of each rank's shard           broadcast of each rank's shard

Hyperparameters (learning rate, momentum, ...) may change while a rank is joined, because schedulers run on active
ranks only. They travel in the header as numbers, summed over active ranks.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from typing_extensions import override

from join import Burst, Join, JoinHook
from join.transfer import broadcast_tree
from joinables._torch_reducer import broadcast_shards, overlaps_with_ddp, zero_redundancy_optimizer

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer
else:
    ZeroRedundancyOptimizer = zero_redundancy_optimizer()


class ZeroStep(Burst, JoinHook):
    """Shadows the steps of a ``ZeroRedundancyOptimizer``; ``Join`` makes one for a stock optimizer by itself.

    Args:
        optimizer: the sharded optimizer.
        transform_gradients: what the loop does to the gradients between backward and step (clipping, adding noise);
            called without arguments on a joined rank, where ``param.grad`` holds the reduced gradients of all
            parameters.

    Raises:
        ValueError: for an optimizer with ``overlap_with_ddp=True``: its step happens inside DDP's communication hook,
            where it cannot be shadowed.
    """

    join_keywords: ClassVar[frozenset[str] | None] = frozenset()

    def __init__(
        self, optimizer: ZeroRedundancyOptimizer, transform_gradients: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        if overlaps_with_ddp(optimizer):
            raise ValueError(
                "optimizer has overlap_with_ddp=True: its step runs inside DDP's communication hook and cannot be"
                " shadowed; build it with overlap_with_ddp=False"
            )
        self._optimizer = optimizer
        self._transform_gradients = transform_gradients
        self._numbers: list[_Number] = []
        self._owes = self._announced = self._shadowing = False
        self._handles: list[Any] = []

    # -- Joinable -----------------------------------------------------------------------------------------------------

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._numbers = _Number.all_in(self._groups)
        self.payload_width = 1 + len(self._numbers)
        return self

    @property
    @override
    def join_device(self) -> torch.device:
        return self._optimizer.join_device

    @property
    @override
    def join_process_group(self) -> Any:
        return self._optimizer.join_process_group

    @property
    @override
    def join_name(self) -> str:
        return f"the step of {type(self._optimizer).__name__}"

    @property
    @override
    def join_target(self) -> Any:
        return self._optimizer

    @override
    def attach(self, join: Join) -> None:
        self._join = join
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
        own = [{name: value for name, value in group.items() if name != "params"} for group in self._groups]
        received = broadcast_tree(self._join.collective, own, source)
        for group, values in zip(self._groups, received, strict=True):
            group.update(values)

    # -- the active side ----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A closure runs bursts of its own inside the local step; then the announcement comes after it.
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        if not self._shadowing and not has_closure:
            self._announce(confirm=False)

    def _after_local_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._shadowing:
            return
        if not self._announced:
            self._announce(confirm=True)
        elif self._join.channel.has_several_bursts:
            self._join.channel.confirm()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._owes = self._announced = False

    def _announce(self, *, confirm: bool) -> None:
        self._join.channel.announce(self, confirm=confirm)
        self._owes = self._announced = True

    @property
    @override
    def owes(self) -> bool:
        return self._owes

    @override
    def fulfil(self) -> None:
        self._owes = self._announced = False
        broadcast_shards(self._optimizer)

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        self._take_numbers()
        if self._transform_gradients is not None:
            self._transform_gradients()
        self._shadowing = True
        try:
            self._optimizer.step()
        finally:
            self._shadowing = False

    # -- hyperparameters ----------------------------------------------------------------------------------------------

    @override
    def payload(self, active: bool) -> Sequence[float]:
        if not active:
            return (0.0,) * self.payload_width
        return (1.0, *(number.read() for number in self._numbers))

    def _take_numbers(self) -> None:
        count, *sums = self._join.channel.received(self)
        for number, total in zip(self._numbers, sums, strict=True):
            number.write(total / count)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups


@dataclass(frozen=True)
class _Number:
    """One numeric hyperparameter: a value in a parameter group, or an item of a tuple there (``betas``)."""

    group: dict[str, Any]
    name: str
    position: int | None = None

    @staticmethod
    def all_in(groups: Sequence[dict[str, Any]]) -> list[_Number]:
        """Every number in the groups, in an order that is the same on all ranks."""
        found: list[_Number] = []
        for group in groups:
            for name in sorted(group.keys() - {"params"}):
                value = group[name]
                if _is_number(value):
                    found.append(_Number(group, name))
                elif isinstance(value, tuple):
                    items = enumerate(cast("tuple[Any, ...]", value))
                    found += [_Number(group, name, position) for position, item in items if _is_number(item)]
        return found

    def read(self) -> float:
        value = self.group[self.name]
        return float(value if self.position is None else value[self.position])

    def write(self, value: float) -> None:
        old = self.group[self.name]
        if self.position is None:
            self.group[self.name] = type(old)(value)
        else:
            self.group[self.name] = (*old[: self.position], value, *old[self.position + 1 :])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
