"""Gradients that weigh as much as their batch: :class:`Weights`, behind ``join.weight``.

The weight is applied where a gradient reaches its parameter, not at the module's outputs: these may be computed from
one another, and would be weighed twice. So a sum over ranks and micro-batches, divided by the sum of their weights, is
the weighted mean. A comm hook, which may round or carry errors over to the next step, is given parts of that mean
itself: there the sum of weights is awaited before the backward. What is in ``grad`` already, the last reduction's
result, is no part of it, and is set aside.

Where weights do not fit, on this rank or with those of others, a DDP module's reduction still runs as on the other
ranks, and raises when it is over (``refused``). A replayed module's raises before its own collectives, on all ranks.

In a loop in lockstep, no header tells of weights. There the first reduction begins with one more all-reduce::

    rank with data                                 rank without data
    --------------                                 -----------------
    votes: uses weights, or does not               votes: neither
           brings gradients of before the loop            the same
    the reduction                                  the reduction
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from join.joinable import Block


class Weights:
    """The weights of one module's backwards on this rank.

    Args:
        parameters: the module's parameters.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        self.agreed = False
        """In lockstep: whether weights are in use, in the loop of the number ``agreed_in``."""
        self.agreed_in = 0
        self.brought = False
        """There: whether a rank brought gradients of a time before the loop. Only it can see them zeroed."""
        self.aside: dict[int, torch.Tensor] = {}
        """The last reduction's results that were set aside, by position among the parameters."""
        self.window = 0.0
        """The sum of the weights of all backwards since the last reduction."""
        self._unit = 1.0  # what the weights of the backward under way are multiplied by
        self.refused: ValueError | None = None
        """What the reduction under way is to raise when it is over, on this rank: weights that ranks do not share."""
        self.silent = False
        """Whether gradients count for nothing: those of a batch that is not there. Needs ``watch(always=True)``."""

    def attach(self, join: Block) -> None:
        """A block is entered."""
        self._join, self._channel, self.refused = join, join.channel, None

    def detach(self) -> None:
        """The block is left."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        del self._join, self._channel

    @property
    def in_use(self) -> bool:
        """Whether this rank has set a weight."""
        return self._join.weight is not None and not self._channel.shadowing

    def agree(self, has_accumulated: bool) -> tuple[bool, int]:
        """In lockstep, as a reduction begins: what not all ranks can know by themselves. Once a loop, it is sent.

        Args:
            has_accumulated: whether this rank brings gradients that are still to be reduced.

        Returns:
            Whether weights are in use; who has only dummies cannot know. And, in the first reduction of a loop, the
            ranks that bring gradients, as a bit mask: those of a time before the loop. If weights are in use on some
            ranks only, they are for now, and ``refused`` is set on all ranks.
        """
        accumulated = 0
        if self.agreed_in != self._channel.loop:
            self.agreed_in = self._channel.loop
            accumulated = self._vote(has_accumulated)
        return self.agreed, accumulated

    def change(self) -> ValueError | None:
        """As this rank's own backward begins: what is wrong if it uses weights, and ranks agreed on none in this loop.

        Or the other way round.
        """
        agreed = self._channel.ranks_with_data is not None and self.agreed_in == self._channel.loop
        if agreed and self.agreed != (self._join.weight is not None) and not self._channel.shadowing:
            return ValueError("join.weight was set or unset inside the loop; set it at every step or at none")
        return None

    def end_refused(self) -> None:
        """A reduction is over, in which this rank's collectives were those of the others: raise what it refuses."""
        refused, self.refused = self.refused, None
        if refused is not None and not self._channel.leaving:
            raise refused

    def _vote(self, has_accumulated: bool) -> int:
        collective, in_use = self._join.collective, self.in_use
        brings = [has_accumulated and rank == collective.rank for rank in range(collective.world_size)]
        votes = torch.tensor([in_use, not (in_use or self._channel.shadowing), *brings], dtype=torch.int64)
        collective.all_reduce(votes).wait()
        using, not_using, *bringing = cast("list[int]", votes.tolist())
        self.agreed, self.brought = using > 0, any(bringing)
        if using and not_using:
            self.refused = weighs_on_some(using, not_using)
        return sum(1 << rank for rank, brings in enumerate(bringing) if brings)

    def watch(self, *, always: bool = False) -> None:
        """A forward comes: see to it that its gradients are weighed, if weights are in use, or ``always``."""
        if (always or self._join.weight is not None) and not self._handles:
            parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
            self._handles = [parameter.register_hook(partial(self._weigh, parameter)) for parameter in parameters]

    def _weigh(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        weight = 0.0 if self.silent else self._join.weight
        if weight is None or weight * self._unit == 1.0:
            return None
        if gradient is None:
            # SyncBatchNorm says so for the zeros of an empty batch, and FSDP would not reduce them, as other ranks do.
            if weight == 0 and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return None
        if not weight:
            return torch.zeros_like(gradient)  # also of what is NaN: an empty batch's mean
        return gradient * (weight * self._unit)

    def begin_backward(self, *, holds_result: bool) -> None:
        """Where weights are in use, a backward begins.

        Args:
            holds_result: whether the gradients may hold the last reduction's result, and nothing but that.
        """
        if holds_result:
            with torch.no_grad():
                for index, parameter in enumerate(self._parameters):
                    if parameter.grad is not None:
                        self.aside[index] = parameter.grad.clone()
                        parameter.grad.zero_()
        self.window += self._join.weight or 0.0
        self._unit = 1.0
        self.watch()  # unless the forward did

    def take_back(self, share: float) -> None:
        """A reduction begins: add the last result as often as this rank contributes, so that the mean has it once."""
        with torch.no_grad():
            for index, result in self.aside.items():
                gradient = self._parameters[index].grad
                if gradient is not None:
                    gradient.add_(result, alpha=share)

    def normalise(self, unit: float) -> None:
        """A reduction begins: let weights count in units of their mean, in what was accumulated and what comes."""
        self._unit = unit
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(unit)

    def put_back(self, used: Callable[[], Sequence[int]] | None = None) -> None:
        """Let gradients be again what was set aside: all, or those that ``used`` says nobody used, so none reduced."""
        is_used = used() if used else None
        with torch.no_grad():
            for index, result in self.aside.items():
                gradient = self._parameters[index].grad
                if gradient is not None and not (is_used and is_used[index]):
                    gradient.copy_(result)
        self.aside.clear()

    def end_reduction(self, used: Callable[[], Sequence[int]]) -> None:
        """What was accumulated is reduced; ``used`` as for :meth:`put_back`."""
        if self.aside:
            self.put_back(used)
        self.window = 0.0

    def forget(self) -> None:
        """What was accumulated is reduced, or was zeroed."""
        self.window = 0.0
        self.aside.clear()


def weighs_on_some(using: int, not_using: int) -> ValueError:
    """The error for weights that are in use on so many ranks and not on others."""
    return ValueError(f"join.weight is set on {using} ranks and not on {not_using}; set it on all ranks or on none")
