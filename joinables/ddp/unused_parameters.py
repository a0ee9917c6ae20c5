"""Which parameters batches used, where dummies run through the module too: :class:`UsedParameters`.

With ``find_unused_parameters`` a parameter that nobody used keeps its ``grad`` as it was: mostly ``None``, and the
optimizer passes it by. In a loop over ``Join.iterate`` the ranks without data run the module on dummies, and the
reducer counts that as use. So what batches used is counted here, and the rest is put back. In a synchronised backward::

    rank with data                                 rank without data
    the reducer's all-reduces                      the same
    all-reduce (max) of the parameters it used     the same, of those it used while it had data
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from join.joinable import Block
from joinables._torch import autograd


class UsedParameters:
    """Counts which of a module's ``parameters``, in the reducer's order, batches used since the last reduction."""

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ddp, self._parameters = ddp, parameters
        self._handles: dict[int, Any] = {}  # by the parameter's number
        self.counts = False
        """Whether there is anything to count: not without ``find_unused_parameters``."""
        self._used = torch.zeros(len(parameters), dtype=torch.int64)
        self._absent: list[bool] = []

    def attach(self, join: Block) -> None:
        """Find out whether there is anything to count; called when a block is entered."""
        self._join = join
        self.counts = self._ddp.find_unused_parameters and not self._ddp.static_graph

    def detach(self) -> None:
        """Remove the hooks; called when the block is left."""
        autograd.remove_hooks(self._handles)
        del self._join

    def watch(self) -> None:
        """Hook into parameters before a forward, in a loop over ``Join.iterate``."""
        if self.counts:
            autograd.hook_gradients(self._parameters, self._handles, lambda index: partial(self._see, index))

    def _see(self, index: int, gradient: torch.Tensor) -> None:
        if self._handles and not self._join.channel.step.shadowing:
            self._used[index] = 1

    def begin_window(self) -> None:
        """Begin to count anew; called before the first backward since the last reduction, or since ``zero_grad``."""
        if self.counts:
            self._absent = [parameter.grad is None for parameter in self._parameters]
            self._used = torch.zeros(len(self._absent), dtype=torch.int64)

    def end_reduction(self) -> None:
        """Drop the gradients of parameters that only dummies used; called after a reduction."""
        self._join.collective.all_reduce(self._used, "max").wait()
        used = cast("list[int]", self._used.tolist())
        for parameter, is_used, absent in zip(self._parameters, used, self._absent, strict=True):
            if absent and not is_used:
                parameter.grad = None
