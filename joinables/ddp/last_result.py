"""The last reduction's result, where ``zero_grad`` was not called since: :class:`LastResult`.

DDP reduces all that is in ``grad``, also what the last reduction left there. The result is on every rank that had data
then, and has to be in the new mean once. So each contributor adds it as often as makes that: ``weight`` times under a
weighted mean, ``world_size / contributors`` times under a mean over all ranks, once under a mean over contributors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

# Over blocks: gradients that a rank has accumulated and not reduced are not the last result.
_kept: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()


class LastResult:
    """What the last reduction left in the gradients of a module's ``parameters``, which are in the reducer's order."""

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ddp, self._parameters = ddp, parameters
        self.kept = True
        """Whether the gradients may hold the last result."""
        self.aside: dict[int, torch.Tensor] = {}
        """What was taken out of the gradients, by position among the parameters."""

    def attach(self) -> None:
        """Recall what the last block has left; called when a block is entered."""
        self.kept = _kept.get(self._ddp, True)

    def detach(self) -> None:
        """Put back what is set aside; called when the block is left, maybe before a reduction."""
        self.add(1.0)
        self.aside.clear()
        _kept[self._ddp] = self.kept

    @property
    def has_no_gradient(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(parameter.grad is None for parameter in self._parameters)

    @property
    def is_zero(self) -> bool:
        """Whether all of the last result is 0; reads it all."""
        if self.aside:
            return not any(bool(result.any()) for result in self.aside.values())
        return self.gradients_are_zero

    @property
    def gradients_are_zero(self) -> bool:
        """Whether all that is in the gradients now is 0, or none is there; reads it all."""
        return not any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._parameters)

    def look(self) -> None:
        """Notice that ``zero_grad`` has set the gradients to ``None``."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                return
        self.kept = False

    @torch.no_grad()
    def set_aside(self) -> None:
        """Take the last result out of the gradients, before others are accumulated there."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self.aside[index] = parameter.grad.clone()
                parameter.grad.zero_()

    @torch.no_grad()
    def add(self, times: float) -> None:
        """Add what was set aside to the gradients, so many ``times``."""
        for index, result in self.aside.items():
            gradient = self._parameters[index].grad
            if gradient is not None:
                gradient.add_(result, alpha=times)

    @torch.no_grad()
    def end_reduction(self, used: Sequence[int]) -> None:
        """Restore what was set aside of the gradients that a reduction did not touch.

        Args:
            used: for each parameter, whether any rank used it; the reduction leaves other gradients alone.
        """
        for index, result in self.aside.items():
            gradient = self._parameters[index].grad
            if gradient is not None and not used[index]:
                gradient.copy_(result)
        self.aside.clear()
