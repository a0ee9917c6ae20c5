"""Sending an optimizer's hyperparameters to joined ranks, which run no scheduler: :class:`Hyperparameters`.

Learning rate, momentum and the like may change while a rank is joined, because schedulers run on active ranks only. A
joined rank that goes on stepping its shard needs them::

    active rank                                      joined rank
    -----------                                      -----------
    election of a leader, if the old one left (*)    the same
    all-reduce: the leader's numbers, else 0 (*)     all-reduce: 0
    .                                                take over the sums, in the types that the numbers have here

(*) only if a rank is joined; the all-reduce is not awaited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from join.joinable import Block
from join.transfer import broadcast_tree


class Hyperparameters:
    """The hyperparameters of an optimizer: everything in its ``param_groups`` but the parameters.

    Args:
        optimizer: the optimizer.
        join: the block.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, join: Block) -> None:
        self._optimizer, self._channel, self._collective = optimizer, join.channel, join.collective

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def share(self, *, active: bool) -> None:
        """Send the leader's numbers to joined ranks, if there are any, in the burst of the last header."""
        if self._channel.all_announced():
            return
        leads = self._channel.lead() == self._collective.rank
        numbers = _Number.all_in(self._groups)  # load_state_dict makes new groups
        mine = [number.read() if leads else 0.0 for number in numbers]
        self._sums = torch.tensor(mine, dtype=torch.float64)  # kept while it is under way
        work = self._collective.all_reduce(self._sums)
        if not active:
            work.wait()
            for number, value in zip(numbers, cast("list[float]", self._sums.tolist()), strict=True):
                number.write(value)

    def broadcast(self, source: int) -> None:
        """Take over all hyperparameters from rank ``source``."""
        own = [{name: value for name, value in group.items() if name != "params"} for group in self._groups]
        received = broadcast_tree(self._collective, own, source)
        for group, values in zip(self._groups, received, strict=True):
            group.update(values)


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
        whole = self.group[self.name]
        if isinstance(whole, torch.Tensor):
            whole.fill_(value)
            return
        old = whole if self.position is None else whole[self.position]
        new = int(value) if isinstance(old, int) and value.is_integer() else value
        self.group[self.name] = (
            new if self.position is None else (*whole[: self.position], new, *whole[self.position + 1 :])
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)
