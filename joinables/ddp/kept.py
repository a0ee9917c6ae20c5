"""The last result under new gradients: :class:`Kept`.

DDP reduces the contents of ``grad``. Without ``zero_grad``, these include the result of the last reduction, on every
rank that had data in it. The new mean must contain that result once. The result goes through the reduction, so ranks
end alike even if only some of them have called ``zero_grad``, and joined ranks receive it. Each mean says how many
times a rank has to count it (``Mean.times``). If this is not once, the gradients of the rank are changed before the
reduction. That takes a copy of the last result from before the first backward of the window::

    micro-batch    copy of the last result, if the mean may count it otherwise than once
                   grad = last result + own gradients, as without Join
    reduction      grad += (times - 1) * copy, then DDP's all-reduce
    afterwards     a parameter that no rank used: grad = copy
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from joinables._torch import reducer


class Kept:
    """The last result of one module, as far as its gradients still contain it."""

    def __init__(self) -> None:
        self.may_remain = True
        """Whether the gradients may contain the last result."""
        self.copies: dict[int, torch.Tensor] = {}
        """The last result, by index of the parameter, if it was copied in the current window or reduction."""

    def look(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Notice that ``zero_grad`` has set all gradients to ``None``."""
        for parameter in parameters:
            if parameter.grad is not None:
                return
        self.may_remain = False

    @torch.no_grad()
    def copy(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Copy the gradients, which no new gradient has been added to."""
        gradients = {index: p.grad for index, p in enumerate(parameters) if p.grad is not None}
        self.copies = dict(zip(gradients, reducer.copies_of(list(gradients.values())), strict=True))

    @torch.no_grad()
    def add(self, parameters: Sequence[torch.nn.Parameter], times: float) -> None:
        """Add the last result to the gradients.

        Args:
            parameters: The parameters, in the reducer's order.
            times: The factor of the last result.
        """
        gradients = {index: gradient for index in self.copies if (gradient := parameters[index].grad) is not None}
        reducer.add_to(list(gradients.values()), [self.copies[index] for index in gradients], times)

    @torch.no_grad()
    def restore(self, parameters: Sequence[torch.nn.Parameter], used: torch.Tensor | None) -> None:
        """Set the gradients that a reduction did not write to the last result, and discard the copies.

        Args:
            parameters: The parameters, in the reducer's order.
            used: Whether any rank used each parameter, of shape ``(number of parameters,)``. The reduction writes only
                the gradients of these. ``None`` means that it wrote all gradients.
        """
        for index, result in self.copies.items():
            gradient = parameters[index].grad
            if gradient is not None and used is not None:
                gradient.copy_(torch.where(used[index].to(result.device), gradient, result))
        self.copies = {}
