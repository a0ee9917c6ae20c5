"""DDP for training steps that are more than one call of the module: :class:`LossGate`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch.autograd.function import BackwardCFunction
from typing_extensions import override

from joinables._torch.autograd import nodes_of
from joinables.modules import zero_of


class LossGate(torch.nn.Module):
    """Module that contains another module, and whose forward returns its argument, the loss.

    ``DistributedDataParallel`` expects one forward, followed by a backward. Some steps call other methods of the
    module, or call it several times, such as the steps of a GAN. Compute the loss of such a step on the module itself,
    and pass it through the gate once for each backward::

        ddp = DistributedDataParallel(LossGate(module), find_unused_parameters=True)
        with Join([ddp, optimizer], divide_by_initial_world_size=False):
            for batch in loader:
                optimizer.zero_grad()
                ddp(module.loss(batch)).backward()
                optimizer.step()

    DDP finds the parameters behind the loss. It needs ``find_unused_parameters=True`` if a loss may reach only some. A
    loss that reaches none, such as ``torch.tensor(0.0, requires_grad=True)``, gives gradients of 0.

    DDP reduces the gradients of the parameters that require grad when it is built. Others raise an error when they
    require grad later.

    Args:
        trained: The module. DDP sees its parameters and buffers, with ``trained.`` before their names.
    """

    forward_is_over: ClassVar[bool] = True
    """Whether the trained module has run, and changed its buffers, before this forward. ``Join`` then broadcasts the
    buffers of a rank that has data in this step."""

    def __init__(self, trained: torch.nn.Module) -> None:
        super().__init__()
        self.trained = trained
        self._trained_ids = {id(parameter) for parameter in trained.parameters()}
        self._frozen = {name: each for name, each in trained.named_parameters() if not each.requires_grad}

    @override
    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.refuse(name for name, parameter in self._frozen.items() if parameter.requires_grad)
        if not loss.requires_grad or self._is_reached_from(loss):
            return loss
        return loss + sum(zero_of(parameter, loss) for parameter in self.trained.parameters())

    @staticmethod
    def refuse(names: Iterable[str]) -> None:
        """Raise a ``RuntimeError`` that names the first of these parameters, whose gradients DDP does not reduce."""
        for name in names:
            #: To unfreeze a parameter within an epoch of a `Trainer`, pass it to an optimizer from the start, and pass
            #: `strategy="ddp_find_unused_parameters_true"` to the `Trainer`.
            raise RuntimeError(
                f"The parameter {name!r} requires grad, but was frozen or missing when the module was wrapped, so its"
                " gradient would not be averaged over the ranks. Unfreeze or add parameters before that, or wrap the"
                " plain module again. A Trainer wraps the module after on_train_epoch_start. [J560]"
            )

    def _is_reached_from(self, loss: torch.Tensor) -> bool:
        """Return whether a backward of the loss reaches a parameter, or may reach one; the nearest is often close."""
        # A function in Python may run a backward itself, as a reentrant checkpoint does.
        return any(
            isinstance(node, BackwardCFunction) or id(getattr(node, "variable", None)) in self._trained_ids
            for node in nodes_of([loss])
        )


def leaves_of(loss: torch.Tensor) -> set[torch.Tensor]:
    """Return the tensors whose gradients a backward of the loss computes."""
    return {node.variable for node in nodes_of([loss]) if hasattr(node, "variable")}
