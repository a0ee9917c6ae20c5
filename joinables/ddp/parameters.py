"""Records for each parameter of a DDP module: :class:`UsedParameters`.

*Parameters that DDP does not know.* DDP reduces the gradients of the parameters that required grad when it was built.
A parameter that was thawed or added since then has its own gradient on each rank: :func:`refuse_unreduced_parameters`.

*Unused parameters.* With ``find_unused_parameters`` a parameter that no rank used keeps its ``grad`` as it was. That is
usually ``None``, so the optimizer skips it. In a loop over ``Join.iterate`` the ranks without data run the module on
dummies, which the reducer counts as use. So the use by batches with data is recorded here, and the gradients of the
other parameters are set back to ``None``, if they were ``None`` before the window::

    rank with data                                 rank without data
    --------------                                 -----------------
    the reducer's all-reduces                      the same
    if a rank had a dummy in the window:           the same, with the parameters that it used while it had
    all-reduce (max) of the parameters it used     data
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from join.collectives._torch_private import accumulators, thawed
from join.protocol.channel import Channel
from joinables._torch import reducer
from joinables.loss_gate import LossGate


class UsedParameters:
    """Record of the parameters that batches with data used since the last reduction.

    Args:
        ddp: The module.
        parameters: Its parameters, in the reducer's order.
        channel: The channel of the block.
    """

    def __init__(
        self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], channel: Channel
    ) -> None:
        self._parameters, self._channel = parameters, channel
        self._is_watched = False
        self.counts = ddp.find_unused_parameters and not ddp.static_graph
        """Whether use is counted, which needs ``find_unused_parameters``."""
        self._used = torch.zeros(len(parameters), dtype=torch.int64, device="cpu")
        self._absent: list[bool] = []

    def watch(self) -> list[Any]:
        """Register hooks on the parameters before the first forward in a loop, and return the handles of new ones."""
        if self._is_watched or not self.counts:
            return []
        self._is_watched = True
        nodes = enumerate(accumulators(self._parameters))
        return [node.register_prehook(partial(self._mark_used, index)) for index, node in nodes]

    def _mark_used(self, index: int, gradients: Any) -> None:
        if not self._channel.place.step.is_dummy:
            self._used[index] = 1

    def begin_window(self) -> None:
        """Reset the record; called before the first backward since the last reduction or since ``zero_grad``."""
        self._absent = [parameter.grad is None for parameter in self._parameters]
        self._used = torch.zeros(len(self._absent), dtype=torch.int64, device="cpu")

    def end_reduction(self) -> None:
        """Set gradients back to ``None`` if only dummies used their parameters; called after a reduction."""
        self._channel.collective.all_reduce(self._used, "max").wait()
        used = cast("list[int]", self._used.tolist())
        for parameter, is_used, absent in zip(self._parameters, used, self._absent, strict=True):
            if absent and not is_used:
                parameter.grad = None


def refuse_unreduced_parameters(ddp: DistributedDataParallel, reduced: Container[int]) -> list[Any]:
    """Raise a ``RuntimeError`` in each backward that reaches a parameter whose gradient DDP does not reduce.

    Parameters in ``ddp.parameters_to_ignore`` are excepted.

    Args:
        ddp: The module.
        reduced: The ids of the parameters whose gradients the listed objects reduce.

    Returns:
        The handles of the hooks that raise the error.
    """

    def refuse(parameter: torch.Tensor) -> None:
        named = cast("torch.nn.Module", ddp.module).named_parameters()
        LossGate.refuse(name.removeprefix("trained.") for name, each in named if each is parameter)

    unknown = reducer.parameters_beyond(ddp, reduced)
    with thawed(unknown):
        return [parameter.register_post_accumulate_grad_hook(refuse) for parameter in unknown]
