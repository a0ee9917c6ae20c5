"""Adapter for optimizers whose state every rank holds as a whole: :class:`OptimizerState`.

Nothing is sent in the loop. At the end of a block in which some ranks have shadowed others, theirs is stale::

    last joiner                                          other ranks
    -----------                                          -----------
    description of its state (``join.transfer``)         the same
    all-reduce: can all take it over?                    all-reduce
    one does not: an all-gather of reasons; all raise    the same
    tensors, by dtype and device                         into their own tensors, where these fit

Ranks that were last themselves take part, and keep theirs. In a block in which nothing was shadowed, values of
parameter groups and step counts are compared (``join.agreement``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join.agreement import differences
from join.joinable import Block
from join.transfer import Inbox, broadcast_skeleton, broadcast_tensors
from joinables._torch.optimizers import has_stepped, mark_stepped
from joinables._torch.reducer import parameters_of_each_rank
from joinables.adapter import Silent
from joinables.state import plain_values, raise_not_copied, unlike_others


class OptimizerState(Silent):
    """Brings an optimizer's state up to date, in place, when the block ends, on ranks that ran out early.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._optimizer = optimizer
        self._steps = [0, 0]  # how many this rank made in the block, outside of loops over join.iterate and in them

    @property
    @override
    def own_steps(self) -> int:
        return self._steps[False]

    @override
    def attach(self, join: Block) -> None:
        super().attach(join)
        self._steps = [0, 0]
        modules = [target for target in self._channel.targets if isinstance(target, DistributedDataParallel)]
        self._ignored = {id(each) for module in modules for each in parameters_of_each_rank(module)}
        self._handles = [
            self._optimizer.register_step_pre_hook(self._check_step),
            self._optimizer.register_step_post_hook(self._count_step),
        ]

    @override
    def detach(self) -> None:
        super().detach()
        del self._ignored

    def _count_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        shared = (parameter for parameter in self._parameters if id(parameter) not in self._ignored)
        if not self._channel.all_ranks_run_bursts:
            self._steps[False] += 1
        elif any(parameter.grad is not None for parameter in shared):  # else nothing has changed
            self._steps[True] += 1

    # -- comparing ----------------------------------------------------------------------------------------------------

    @override
    def equal_values(self) -> Mapping[str, Any]:
        values = group_values(self._optimizer)
        values["number of steps made on gradients in loops over join.iterate"] = self._steps[True]
        counts: dict[torch.device, dict[int, torch.Tensor]] = {}  # by the index of their parameter
        for index, state in self._states().items():
            count: Any = state.get("step") if hasattr(state, "get") else None
            if isinstance(count, torch.Tensor) and count.numel() == 1:
                counts.setdefault(count.device, {})[index] = count.detach().reshape(())
            elif isinstance(count, (int, float)):
                values[f"step count of parameter {index}"] = float(count)
        for found in counts.values():  # one host synchronisation for each device
            steps = cast("list[float]", torch.stack([count.double() for count in found.values()]).tolist())
            values |= {f"step count of parameter {index}": step for index, step in zip(found, steps, strict=True)}
        return values

    # -- copying ------------------------------------------------------------------------------------------------------

    @override
    def synchronise(self, source: int) -> None:
        collective, optimizer = self._collective, self._optimizer
        groups, states, parameters = self._groups(), self._states(), self._parameters
        shapes = [[tuple(each.shape) for each in group["params"]] for group in optimizer.param_groups]
        why_not = unlike_others((groups, states, parameters))
        sent: Any = ([], {}) if why_not else (groups, states)
        mine = sent, (shapes, has_stepped(optimizer), self.equal_values(), bool(why_not))
        received, tensors = broadcast_skeleton(collective, mine, source)
        their_groups: list[dict[str, Any]] = received[0][0]
        their_states: dict[Any, Any] = received[0][1]
        their_shapes, stepped, equal, refused = received[1]
        if not (why_not or refused):
            why_not = self._why_not(states, their_states, shapes, their_shapes)
        if not why_not and self._channel.ran_out_last:
            why_not = differences([[(self.join_name, values)] for values in (equal, self.equal_values())])
        self._raise_if_any_cannot(why_not)
        if collective.rank == source:
            broadcast_tensors(collective, tensors, source)
            return
        inbox, first = Inbox(keeps=self._channel.ran_out_last), next(iter(parameters), None)
        likes = [next(iter(group["params"]), first) for group in optimizer.param_groups]
        groups = [inbox.fill(*each) for each in zip(their_groups, groups, likes, strict=True)]
        states = {
            key: inbox.fill(state, states.get(key), parameters[key] if isinstance(key, int) else first)
            for key, state in their_states.items()
        }
        inbox.receive(collective, source)
        if not inbox.keeps:
            self._take_over(groups, states)
            if stepped:
                mark_stepped(optimizer)

    def _take_over(self, groups: list[dict[str, Any]], states: dict[Any, Any]) -> None:
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            for name in group.keys() - values.keys() - {"params"}:
                del group[name]
            group.update(values)
        parameters = self._parameters
        for key, state in states.items():
            self._optimizer.state[parameters[key] if isinstance(key, int) else key] = state

    def _why_not(self, mine: dict[Any, Any], theirs: dict[Any, Any], my_shapes: Any, their_shapes: Any) -> str:
        """Why this rank cannot take over the state of the last joiner; "" if it can."""
        if my_shapes != their_shapes:
            return f"it has parameter groups of shapes {my_shapes}, and the last rank with data {their_shapes}"
        extra = sorted(mine.keys() - theirs.keys(), key=str)
        if extra:
            return f"it has state for parameters {extra} (by index), for which the last rank with data has none"
        return ""

    def _raise_if_any_cannot(self, why_not: str) -> None:
        if self._collective.reduce_boolean_decision(bool(why_not), all=False):
            reasons: list[str] = self._collective.all_gather_object(why_not)
            told = "; ".join(f"on rank {rank}, {reason}" for rank, reason in enumerate(reasons) if reason)
            raise_not_copied(self.join_name, told)

    # -- the parts ----------------------------------------------------------------------------------------------------

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all groups, to some of which others may have been added."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def _states(self) -> dict[Any, Any]:
        """What the optimizer holds for each parameter, by its index over all groups, and under other keys.

        Parameters that a listed DDP module ignores are each rank's own, and so is their state.
        """
        index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        found: dict[Any, Any] = {}
        held = cast("dict[Any, Any]", self._optimizer.state)
        for key, state in held.items():
            if not isinstance(key, torch.Tensor):
                found[key] = state
            elif id(key) in index_of and id(key) not in self._ignored:
                found[index_of[id(key)]] = state
        return found


def group_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The plain values in an optimizer's parameter groups, and how many groups there are."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    values: dict[str, Any] = {"number of parameter groups": len(groups)}
    for index, group in enumerate(groups):
        plain = plain_values({name: value for name, value in group.items() if name != "params"})
        values |= {f"value {path} of parameter group {index}": value for path, value in plain.items()}
    return values
