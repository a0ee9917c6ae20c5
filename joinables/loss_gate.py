"""DDP for training steps that are more than one call of the module: :class:`LossGate`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override


class LossGate(torch.nn.Module):
    """Holds a module; its forward returns the loss that it is given.

    ``DistributedDataParallel`` looks at one forward and the backward after it. Where a step calls other methods of the
    module, or calls it several times, as generators and critics are, compute the loss on the module itself and let it
    pass the gate, once for each backward::

        ddp = DistributedDataParallel(LossGate(module), find_unused_parameters=True)
        with Join([ddp, optimizer]):
            for batch in loader:
                optimizer.zero_grad()
                ddp(module.loss(batch)).backward()
                optimizer.step()

    DDP finds the parameters behind the loss. It needs ``find_unused_parameters=True`` if a loss may reach only some. A
    loss that reaches none, such as ``torch.tensor(0.0, requires_grad=True)``, gives gradients of 0.

    Args:
        trained: the module; its parameters and buffers are those that DDP sees, with ``trained.`` before their names.
    """

    forward_is_over: ClassVar[bool] = True
    """Tells ``Join`` that the trained module has run before this forward, which has changed its buffers: those of a
    rank that has data in this step are broadcast."""

    def __init__(self, trained: torch.nn.Module) -> None:
        super().__init__()
        self.trained = trained
        self._trained_ids = {id(parameter) for parameter in trained.parameters() if parameter.requires_grad}

    @override
    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        if not loss.requires_grad or self._is_reached_from(loss):
            return loss
        return loss + sum(parameter.flatten()[:0].sum().to(loss) for parameter in self.trained.parameters())

    def _is_reached_from(self, loss: torch.Tensor) -> bool:
        """Whether a backward of the loss comes to a parameter, or may: the nearest is mostly some nodes away."""
        nodes: list[Any] = [get_gradient_edge(loss).node]
        seen = {None, *nodes}
        for node in nodes:  # to which those behind it are added
            # A function in Python may run a backward of its own, as a reentrant checkpoint does.
            if isinstance(node, BackwardCFunction) or id(getattr(node, "variable", None)) in self._trained_ids:
                return True
            behind = {each for each, _ in node.next_functions} - seen
            seen |= behind
            nodes += behind
        return False
