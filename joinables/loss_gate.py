"""DDP for training steps that are more than one call of the module: :class:`LossGate`."""

from __future__ import annotations

from typing import ClassVar

import torch
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

    DDP finds the parameters behind the loss. It needs ``find_unused_parameters=True`` if a loss may reach only some.

    Args:
        trained: the module; its parameters and buffers are those that DDP sees, with ``trained.`` before their names.
    """

    forward_is_over: ClassVar[bool] = True
    """Tells ``Join`` that the trained module has run before this forward, which has changed its buffers: those of a
    rank that has data in this step are broadcast."""

    def __init__(self, trained: torch.nn.Module) -> None:
        super().__init__()
        self.trained = trained

    @override
    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss
