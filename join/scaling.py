"""Weights of batches, applied to the loss: :class:`Scaling`, behind ``Join.scale``.

A loss that is multiplied by a number has gradients that are multiplied by it, whatever engine reduces them. W is the
number of ranks, and w the weight of a batch (0 for a dummy batch). S is the sum of the weights over all ranks and all
steps of an accumulation window. The factors are::

    in a loop over Join.iterate    loss * w * D / S, for an engine that divides by D. S is known before the forward
    in a plain block               loss * w / u, and the reduced gradients are multiplied by u * W / S. S is summed
                                   beside the buckets. u is a power of two near the last S / W: it keeps gradients at
                                   the size that they have without weights

The sum over ranks and micro-batches is then the weighted mean.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch

from join.batch import Step
from join.collectives._torch_private import after_backward, on_gradient
from join.errors import JoinError
from join.joinable import Joinable

L = TypeVar("L", bound="torch.Tensor | float")


def scaled(loss: L, factor: float) -> L:
    """Return ``loss * factor``. For a factor of 0, return 0 with the graph of ``loss``, even if ``loss`` is NaN."""
    if factor:
        return cast("L", loss * factor)
    return cast("L", torch.nan_to_num(loss) * 0.0) if isinstance(loss, torch.Tensor) else cast("L", 0.0)


def factor_in_loop(step: Step, divided_over: float) -> float:
    """Return the factor for a loss in a step of a loop, for an engine that divides by ``divided_over``."""
    return step.weight * divided_over / step.total if step.weight else 0.0


class Scaling:
    """State of the scaled losses in all blocks of one process group."""

    def __init__(self) -> None:
        self.flows = False
        """Whether the current backward began at a scaled loss."""
        self._required = ""  # why the current loop must scale its losses, as a clause; or ""
        self.in_use: bool | None = None
        """Whether the current loop scales its losses; ``None`` before its first backward."""
        self.window_number = 0
        """Number of the current accumulation window, counted over all loops."""
        self.is_due = False
        """Whether the current loop must scale its losses and has scaled none."""
        self.unit = 1.0
        """Divisor of losses in a plain block: a power of two, the same on all ranks."""

    # -- losses -------------------------------------------------------------------------------------------------------

    def scale(self, loss: L, factor: float, unit: float | None = None) -> L:
        """Scale a loss, and notice when a backward begins at it.

        Args:
            loss: The loss of this rank's batch.
            factor: The number by which the loss is multiplied.
            unit: In a plain block, the current unit, by which the loss is divided because the sum of the weights is not
                known yet.
        """
        result = scaled(loss, factor if unit is None else factor / unit)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            on_gradient(result, self._begin_backward if unit is None else partial(self._begin_backward, unit=unit))
        return result

    def _begin_backward(self, gradient: torch.Tensor, unit: float | None = None) -> torch.Tensor | None:
        if not self.flows:
            if unit is None and self.in_use is False:
                raise JoinError(
                    "A loss went through join.scale, but the first backward in this loop over join.iterate reached a"
                    " listed module without it. Call join.scale(loss) for every backward of the loop, or for none. If"
                    " a listed module takes the loss (LossGate), scale its result: join.scale(module(loss)). [J526]"
                )
            self.flows, self.is_due = True, False
            after_backward(partial(setattr, self, "flows", False))
        return None if unit is None or unit == self.unit else gradient * (unit / self.unit)

    # -- in a loop ----------------------------------------------------------------------------------------------------

    def begin_loop(self, required: str) -> None:
        """Begin a loop; ``required`` is the reason for which it must scale its losses, as a clause, or ``""``."""
        self._required, self.in_use, self.is_due = required, None, bool(required)

    def check_backward(self, burst: Joinable) -> None:
        """Check that a loop scales its losses if it must, and all of them or none.

        It is called when a backward reaches a listed module, unless ``in_use`` already is what ``flows`` is. A loop
        that begins to scale is found before, in :meth:`_begin_backward`.

        Args:
            burst: The backward of the module.

        Raises:
            JoinError: If the loop does not.
        """
        if self.in_use is None:
            if self._required and not self.flows:
                raise JoinError(f"The loss of {burst.join_name} is not scaled, but {self._required}. {_CALL} [J460]")
            self.in_use = self.flows
            return
        raise JoinError(
            f"The loss of {burst.join_name} is not scaled, but the loss of the first backward in this loop over"
            " join.iterate was. Call join.scale(loss) for every backward of the loop, or for none. [J461]"
        )

    def refuse_step(self, joinable: Joinable, step: Step) -> NoReturn:
        """Raise an error because a listed optimizer steps while a window has not ended or scaling is due, in a loop.

        Args:
            joinable: The joinable of the optimizer.
            step: The current step of the loop.

        Raises:
            JoinError: In any case.
        """
        if not step.ends_window:
            raise JoinError(
                f"{joinable.join_name} stepped in step {step.number} of join.iterate, inside an accumulation window"
                " whose gradients are not complete. Step the optimizer only if join.ends_window is True. [J462]"
            )
        raise JoinError(
            f"{joinable.join_name} stepped, but no loss was scaled, although {self._required}. {_CALL} [J463]"
        )

    # -- in a plain block ---------------------------------------------------------------------------------------------

    def learn(self, mean_weight: float, modules: int) -> None:
        """Choose a new unit from the mean weight of a rank in the last reduction, if ``modules``, their number, is 1.

        With several modules the unit stays. A rank without data shadows their reductions one after the other, while on
        other ranks they overlap and begin with the same unit; a change in between would make the units differ.
        """
        if modules == 1 and mean_weight:
            self.unit = 2.0 ** round(math.log2(mean_weight))


_CALL = (
    "Call join.scale(loss).backward() for every backward, with a mean over the rank's own batch as the loss. If losses"
    " are divided by the samples of all ranks already, list nothing: Join([], process_group=None)."
)


def checked_divided_over(divided_over: Any) -> float:
    """Return ``divided_over`` as a float.

    Raises:
        ValueError: If it is not a positive number.
    """
    if isinstance(divided_over, bool) or not isinstance(divided_over, (int, float)) or not divided_over > 0:
        raise ValueError(
            f"divided_over={divided_over!r} is not a positive number. Pass the number by which the engine divides the"
            " sum over ranks: the world size if it averages, or 1 if it does not divide. [J464]"
        )
    return float(divided_over)
