"""The last result under new gradients: :class:`Kept`.

DDP reduces the contents of ``grad``. Without ``zero_grad``, these include the result of the last reduction, on every
rank that had data in it. The new mean must contain that result once. The result goes through the reduction, so ranks
end alike even if only some of them have called ``zero_grad``, and joined ranks receive it. Each mean says how many
times a rank has to count it (``Mean.times``). If this may not be once, the window begins with a copy of it::

    micro-batch    copy of the last result, before the first backward of the window
                   grad = last result + own gradients, as without Join
    reduction      grad += (times - 1) * copy, then DDP's all-reduce
    afterwards     a parameter that no rank used: grad = copy

If the first backward of a window reduces, the copy is made only if ``times`` is not 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from joinables._torch import reducer


class Kept(dict[int, torch.Tensor]):
    """Copy of the last result, by index of the parameter; empty if no gradient contained it, or if no copy is needed.

    The methods take the parameters in the reducer's order.
    """

    @classmethod
    @torch.no_grad()
    def copy_of(cls, parameters: Sequence[torch.nn.Parameter]) -> Kept:
        """Return a copy of the gradients, which no new gradient has been added to."""
        gradients = {index: p.grad for index, p in enumerate(parameters) if p.grad is not None}
        return cls(zip(gradients, reducer.copies_of(list(gradients.values())), strict=True))

    @torch.no_grad()
    def add(self, parameters: Sequence[torch.nn.Parameter], times: float) -> None:
        """Add the last result to the gradients, multiplied by ``times``."""
        gradients = {index: gradient for index in self if (gradient := parameters[index].grad) is not None}
        reducer.add_to(list(gradients.values()), [self[index] for index in gradients], times)

    @torch.no_grad()
    def restore(self, parameters: Sequence[torch.nn.Parameter], used: torch.Tensor) -> None:
        """Set the gradients that a reduction did not write to the last result.

        Args:
            parameters: The parameters.
            used: Whether any rank used each parameter, of shape ``(number of parameters,)``. The reduction writes only
                the gradients of these.
        """
        for index, result in self.items():
            if (gradient := parameters[index].grad) is not None:
                gradient.copy_(torch.where(used[index].to(result.device), gradient, result))
