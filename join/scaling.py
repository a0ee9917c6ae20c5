"""Weights go through the loss: :class:`Scaling`, behind ``Join.scale``.

A loss that is multiplied by a number gives gradients multiplied by it, whatever the engine that reduces them. With W
ranks, the weight w of a batch (0 for a dummy), and S, the sum of the weights over all ranks and all steps of a window::

    in a loop over Join.iterate    loss * w * D / S, where the engine divides by D: S is known before the forward
    in a plain block               loss * w / u, and the reduced gradients are multiplied by u * W / S: S is summed
                                   beside the buckets; u, a power of two near the last S / W, keeps gradients at the
                                   size that they have without weights

So the sum over ranks and micro-batches is the weighted mean.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, TypeVar, cast

import torch

from join.batch import Step
from join.collectives._torch_private import after_backward, on_gradient
from join.errors import JoinError
from join.joinable import Joinable

L = TypeVar("L", bound="torch.Tensor | float")


def scaled(loss: L, factor: float) -> L:
    """``loss * factor``; for a factor of 0, a loss of 0 with the graph of ``loss``, also where that is NaN."""
    if factor:
        return cast("L", loss * factor)
    return cast("L", torch.nan_to_num(loss) * 0.0) if isinstance(loss, torch.Tensor) else cast("L", 0.0)


def factor_in_loop(step: Step, divided_over: float) -> float:
    """What a loss is multiplied by in a step of a loop, for an engine that divides by ``divided_over``."""
    return step.weight * divided_over / step.total if step.weight else 0.0


class Scaling:
    """What the blocks of one group know of the losses that are scaled."""

    def __init__(self) -> None:
        self.flows = False
        """Whether the backward under way began at a scaled loss."""
        self.required = ""
        """Why the loop under way has to scale its losses, if it has to."""
        self.in_use: bool | None = None
        """Whether that loop scales its losses; ``None`` before its first backward."""
        self.window = 0
        """The number of the window under way, of all loops."""
        self._has_flowed = False  # whether a backward has begun at a scaled loss in that loop
        self.unit = 1.0
        """What losses in a plain block are divided by: a power of two, the same on all ranks."""
        self._modules = 0  # how many modules may change it

    # -- losses -------------------------------------------------------------------------------------------------------

    def scale(self, loss: L, factor: float, unit: float | None = None) -> L:
        """Scale a loss, and notice when a backward begins at it.

        Args:
            loss: of this rank's batch.
            factor: the number that it is multiplied by.
            unit: in a plain block, what it is divided by, since the sum of the weights is not known yet: that of now.
        """
        result = scaled(loss, factor if unit is None else factor / unit)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            on_gradient(result, self._begins if unit is None else partial(self._begins, unit=unit))
        return result

    def _begins(self, gradient: torch.Tensor, unit: float | None = None) -> torch.Tensor | None:
        if not self.flows:
            self.flows = self._has_flowed = True
            after_backward(self._ends)
        return None if unit is None or unit == self.unit else gradient * (unit / self.unit)

    def _ends(self) -> None:
        self.flows = False

    # -- in a loop ----------------------------------------------------------------------------------------------------

    def begin_loop(self, required: str) -> None:
        """Begin a loop, which has to scale its losses for the reason that is given, if any."""
        self.required, self.in_use, self._has_flowed = required, None, False

    def check_backward(self, burst: Joinable) -> None:
        """Check that a loop scales its losses if it has to, and all or none; called when one reaches a listed module.

        Args:
            burst: the backward of that module.

        Raises:
            JoinError: if it does not.
        """
        if self.in_use is None:
            if self.required and not self.flows:
                raise JoinError(f"the loss of {burst.join_name} is not scaled, and {self.required}; {_CALL} [J460]")
            self.in_use = self.flows
        if self.in_use != self.flows:
            now, first = ("is", "was not") if self.flows else ("is not", "was")
            raise JoinError(
                f"the loss of {burst.join_name} {now} scaled, and that of the first backward in this loop over"
                f" join.iterate {first}; call join.scale(loss) for each backward of it, or for none [J461]"
            )

    def check_step(self, joinable: Joinable, step: Step) -> None:
        """Check that a listed optimizer may step now, in a loop.

        Raises:
            JoinError: in the middle of a window, or if the loop has to scale its losses and does not.
        """
        if not step.ends_window:
            raise JoinError(
                f"{joinable.join_name} stepped inside a window of accumulation, in step {step.number} of join.iterate,"
                " where the gradients of its other steps are missing; step if join.ends_window [J462]"
            )
        if self.required and not self._has_flowed:
            raise JoinError(
                f"{joinable.join_name} stepped, and no loss was scaled, though {self.required}; {_CALL} [J463]"
            )

    # -- in a plain block ---------------------------------------------------------------------------------------------

    def attach_module(self) -> None:
        """A module joins whose reductions sum weights."""
        self._modules += 1

    def detach_module(self) -> None:
        """A module leaves."""
        self._modules -= 1
        if not self._modules:
            self.unit = 1.0

    def learn(self, mean_weight: float) -> None:
        """Take a new unit from the mean weight of a rank in a reduction that is over.

        Not with several modules: a rank without data shadows their reductions one after the other, where on others they
        overlap, and would change the unit between two that they begin with the same one.
        """
        if self._modules == 1 and mean_weight:
            self.unit = 2.0 ** round(math.log2(mean_weight))


_CALL = "call join.scale(loss).backward()"


def checked_engine(divided_over: Any) -> float:
    """Return ``divided_over`` if it is a number by which an engine may divide.

    Raises:
        ValueError: if it is not positive.
    """
    if isinstance(divided_over, bool) or not isinstance(divided_over, (int, float)) or not divided_over > 0:
        raise ValueError(
            f"divided_over={divided_over!r} must be the number by which the engine divides the sum over ranks: 1 if it"
            " does not divide, the world size if it averages [J464]"
        )
    return float(divided_over)
