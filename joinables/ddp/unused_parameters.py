"""Which parameters batches used, where dummies run through the module too: :class:`Usage`.

With ``find_unused_parameters`` a parameter that nobody used keeps its ``grad`` as it was: mostly ``None``, and the
optimizer passes it by. In a loop in lockstep the ranks without data run the module on dummies, and the reducer counts
that as use. So what batches used is counted here, and the rest is put back. In a synchronised backward::

    rank with data                                 rank without data
    the reducer's all-reduces                      the same
    all-reduce (max) of the parameters it used     the same, of those it used while it had data
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from join.joinable import Block


class Usage:
    """The use of one module's parameters since the last reduction.

    Args:
        parameters: the module's parameters.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        self._used = torch.zeros(len(parameters), dtype=torch.int64)
        self._absent: list[bool] = []

    def attach(self, join: Block) -> None:
        """A block is entered."""
        self._join = join

    def detach(self) -> None:
        """The block is left."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        del self._join

    def watch(self) -> None:
        """A forward comes, in a loop in lockstep."""
        if not self._handles:
            self._handles = [
                parameter.register_hook(partial(self._see, index)) for index, parameter in enumerate(self._parameters)
            ]

    def _see(self, index: int, gradient: torch.Tensor) -> None:
        if self._handles and not self._join.channel.shadowing:
            self._used[index] = 1

    def begin_window(self, *, brought: bool) -> None:
        """The first backward since the last reduction, or since ``zero_grad``, begins.

        Args:
            brought: whether gradients are there that were accumulated before the loop: those were used.
        """
        self._absent = [parameter.grad is None for parameter in self._parameters]
        self._used = torch.tensor([brought and not absent for absent in self._absent], dtype=torch.int64)

    @property
    def window(self) -> tuple[torch.Tensor, list[bool]]:
        """What is known of it, to be kept over a backward that all ranks skip."""
        return self._used.clone(), self._absent

    @window.setter
    def window(self, window: tuple[torch.Tensor, list[bool]]) -> None:
        self._used, self._absent = window

    def end_reduction(self, *, with_dummies: bool) -> None:
        """A reduction is over.

        Args:
            with_dummies: whether dummies took part in it, so that what only they used must be put back.
        """
        if with_dummies:
            self._join.collective.all_reduce(self._used, "max").wait()
            used = cast("list[int]", self._used.tolist())
            for parameter, is_used, absent in zip(self._parameters, used, self._absent, strict=True):
                if absent and not is_used:
                    parameter.grad = None
        self._used.zero_()
