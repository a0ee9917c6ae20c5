"""Sample of the values with which a sharded optimizer steps: :class:`Sample`.

A joined rank steps its shard on the reduced gradients, and on parameters as they were after the step before. If the
loop changes gradients before the step, by clipping, or parameters after it, by a clamp, the joined rank does not make
the change, and its shard becomes wrong. The rank that shares its hyperparameters with joined ranks therefore sends a
few norms along, and they compare these with their own.

If a block or a loop begins or ends and no rank has shadowed others, ranks compare samples of the parameters of DDP
modules. So they notice a checkpoint that one rank has loaded, or noise that differs between ranks.

A sample finds a change of all gradients, as clipping by the norm is, and a change of all parameters. A change of a few
elements can be missed. On a device, nothing is compared, because reading a value would make the step wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from join.agreement import NORM

_PARAMETERS = 4  # that have a norm


class Sample:
    """Norms of some rows of some parameters and gradients.

    Args:
        parameters: The parameters of the optimizer, in the same order on all ranks.
        reduced: The ids of the parameters whose gradients are reduced.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], reduced: set[int]) -> None:
        count = min(len(parameters), _PARAMETERS)
        self._parameters = [parameters[len(parameters) * place // count] for place in range(count)]
        self._reduced = [parameter for parameter in self._parameters if id(parameter) in reduced][-1:]

    @torch.no_grad()
    def take(self, stepped: set[int]) -> list[float]:
        """Return the norms; NaN where they are unknown, as on a device, for which a step must not wait.

        Args:
            stepped: The ids of the parameters that the current step has changed already.
        """
        known = [None if id(parameter) in stepped else parameter for parameter in self._parameters]
        return [_norm(each) for each in (*known, *(parameter.grad for parameter in self._reduced))]

    def differs(self, own: Sequence[float], theirs: Sequence[float]) -> str:
        """Return what another rank has changed: its gradients, its parameters, or ``""`` if neither."""
        apart = [a == a and b == b and not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(own, theirs, strict=True)]
        count = len(self._parameters)
        return "gradients" if any(apart[count:]) else "parameters" if any(apart[:count]) else ""


def sampled(tensors: Sequence[torch.Tensor], of: str = "parameters") -> dict[str, float]:
    """Return the sum of the norms of some rows, as a value to compare between ranks (``join.agreement``)."""
    return {f"{NORM} of the {of}": sum(Sample(tensors, set()).take(set()))}


def _norm(tensor: torch.Tensor | None) -> float:
    """Return the squared norm of the last row; NaN if it is unknown."""
    if tensor is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return math.nan  # a row of a DTensor would be a collective
    if not (tensor.is_cpu and tensor.numel()) or tensor.layout is not torch.strided or tensor.is_complex():
        return math.nan
    try:
        row = (tensor[-1] if tensor.dim() else tensor).flatten().float()  # not every type has a product
    except RuntimeError:  # types of several numbers in one element cannot be converted
        return math.nan
    return torch.dot(row, row).item()
