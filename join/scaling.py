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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

import torch

from join.batch import Step
from join.collectives._torch_private import (
    Writes,
    accumulators,
    after_backward,
    are_zero,
    backward_under_way,
    on_gradient,
    once_behind,
    outer_node,
    uncompiled,
    will_run,
    writes_to,
)
from join.errors import JoinError
from join.joinable import Joinable
from join.step_hook import after_step

L = TypeVar("L", bound="torch.Tensor | float")


def scaled(loss: L, factor: float) -> L:
    """Return ``loss * factor``. For a factor of 0, return 0 with the graph of ``loss``, even if ``loss`` is NaN."""
    if factor:
        return cast("L", loss * factor)
    return cast("L", torch.nan_to_num(loss) * 0.0) if isinstance(loss, torch.Tensor) else cast("L", 0.0)


def factor_in_loop(step: Step, divided_over: float) -> float:
    """Return the factor for a loss in a step of a loop, for an engine that divides by ``divided_over``.

    Raises:
        JoinError: If this loss seems to belong to an earlier batch of the accumulation window.
    """
    step.losses += 1
    if step.skipped and step.losses > step.usual:  # a loop may have several losses in each step
        raise JoinError(
            f"{step.losses} losses were scaled in step {step.number} of join.iterate, but none in an earlier step of"
            " the same accumulation window. A loss weighs as much as the batch of the current step. Run forward and"
            " backward of each batch in its own step, or let the loader yield lists of batches. [J601]"
        )
    return step.weight * divided_over / step.total if step.weight else 0.0


@dataclass(slots=True, eq=False)
class Backward:
    """One call of ``backward()``, with the backwards of reentrant checkpoints that run inside it.

    It lives from the first gradient that reaches a scaled loss or a listed module to the end of the call.

    Attributes:
        task: The number of the call, or of the backward inside it in which it was noticed, until that has ended.
        scaled: Whether it began at a scaled loss.
        weight: The weight in the scaling of this loss; ``None`` in a loop.
        at_end: Functions that are called at the end, after the callbacks of reducers.
    """

    task: int
    scaled: bool = False
    weight: float | None = None
    at_end: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])


class Scaling:
    """State of the scaled losses in all blocks of one process group."""

    def __init__(self) -> None:
        self.backward: Backward | None = None
        """The current backward, once a gradient has reached a scaled loss or a listed module."""
        self._required = ""  # why the current loop must scale its losses, as a clause; or ""
        self.in_use: bool | None = None
        """Whether the current loop scales its losses; ``None`` before its first backward."""
        self.is_due = False
        """Whether the current loop must scale its losses and has scaled none."""
        self.unit = 1.0
        """Divisor of losses in a plain block: a power of two, the same on all ranks."""

    # -- losses -------------------------------------------------------------------------------------------------------

    def scale(self, loss: L, factor: float, unit: float | None = None, weight: float | None = None) -> L:
        """Scale a loss, and notice when a backward begins at it.

        Args:
            loss: The loss of this rank's batch.
            factor: The number by which the loss is multiplied.
            unit: In a plain block, the current unit, by which the loss is divided because the sum of the weights is not
                known yet.
            weight: In a plain block, the weight of the batch.
        """
        result = scaled(loss, factor if unit is None else factor / unit)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            begin = self._begin_backward
            on_gradient(result, begin if unit is None else partial(begin, unit=unit, weight=weight))
        return result

    @uncompiled
    def _begin_backward(
        self, gradient: torch.Tensor, unit: float | None = None, weight: float | None = None
    ) -> torch.Tensor | None:
        backward = self.enter_backward()
        if not backward.scaled:
            backward.scaled, self.is_due, backward.weight = True, False, weight
        elif unit is not None and weight != backward.weight:
            refuse_weight(weight, "another loss of the same backward")
        return None if unit is None or unit == self.unit else gradient * (unit / self.unit)

    def enter_backward(self, *, may_be_inside: bool = False) -> Backward:
        """Return the current backward, which begins if this is the first gradient that is noticed.

        Args:
            may_be_inside: Whether a checkpoint in the current backward may run this one.
        """
        task, backward = backward_under_way(), self.backward
        if backward is not None and backward.task == task:
            return backward
        outer = outer_node() if may_be_inside or backward is not None else None
        if backward is None or outer is None:  # a backward that raised has left its object
            backward = self.backward = Backward(task)
            end = partial(after_backward, partial(self._end_backward, backward))  # after the callbacks of reducers
            if outer is None:
                after_backward(end)
            else:
                once_behind(outer, partial(self._leave_inner, backward, end))
        return backward

    def _leave_inner(self, backward: Backward, end: Callable[[], object]) -> None:
        backward.task = backward_under_way()
        after_backward(end)

    def _end_backward(self, backward: Backward) -> None:
        self.backward = None
        for call in backward.at_end:
            call()

    # -- in a loop ----------------------------------------------------------------------------------------------------

    def begin_loop(self, required: str) -> None:
        """Begin a loop; ``required`` is the reason for which it must scale its losses, as a clause, or ``""``."""
        self._required, self.in_use, self.is_due = required, None, bool(required)

    def check_backward(self, burst: Joinable, *, scaled: bool) -> None:
        """Check that a loop scales its losses if it must, and all of them or none.

        It is called when a backward reaches a listed module, unless ``in_use`` already is whether it is scaled.

        Args:
            burst: The backward of the module.
            scaled: Whether it began at a scaled loss.

        Raises:
            JoinError: If the loop does not.
        """
        if self.in_use is None:
            if self._required and not scaled:
                raise self._not_scaled(burst, "ran")
            self.in_use = scaled
            return
        now, first = ("is", "was not") if scaled else ("is not", "was")
        raise JoinError(
            f"The loss of {burst.join_name} {now} scaled, but the loss of the first backward in this loop over"
            f" join.iterate {first}. Call join.scale(loss) for every backward of the loop, or for none. [J461]"
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
        raise self._not_scaled(joinable, "stepped")

    def _not_scaled(self, joinable: Joinable, did: str) -> JoinError:
        """Return the error for a loop that must scale its losses, in which a listed object did something without."""
        return JoinError(
            f"{joinable.join_name} {did}, but its loss was not scaled, although {self._required}. {_CALL} [J460]"
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


def refuse_weight(weight: float | None, place: str) -> NoReturn:
    """Raise an error because the loss of a backward was scaled with another weight.

    Args:
        weight: The weight.
        place: The backward, or another loss in it.
    """
    raise JoinError(
        f"join.weight is {weight}, which does not match the scaling of the loss in {place}. Set the weight before the"
        " forward, call join.scale(loss).backward(), and set the weight of the next batch after that. [J472]"
    )


def refuse_unreduced(name: str) -> NoReturn:
    """Raise an error because gradients of an earlier window are unreduced at the beginning of a forward or backward.

    Args:
        name: The name of the joinable.
    """
    raise JoinError(
        f"Gradients of an earlier step are still unreduced at the start of {name}. A loop over join.iterate has to know"
        " its accumulation windows. Pass join.iterate(loader, window=k), or call zero_grad() between loops. [J471]"
    )


# -- in a plain block that does nothing --------------------------------------------------------------------------------


class WindowAlone:
    """Accumulation window of a listed object in plain blocks that do nothing: ``enable=False``, or a single process.

    Before each backward, the gradients of earlier backwards are multiplied so that together they become the weighted
    mean. A window ends with a backward that DDP reduces, with a step, and with ``zero_grad``.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        """The sum of the weights of the backwards."""
        self.parameters: Sequence[torch.Tensor] = ()
        """The parameters, frozen or not, at the last backward."""
        self._kept: dict[torch.Tensor, torch.Tensor] = {}  # the gradients from before the window, by parameter
        self._writes: Writes = []  # the writes to each gradient by the end of the last backward

    @torch.no_grad()
    def add(self, weight: float, parameters: Sequence[torch.Tensor], *, is_reduced: bool) -> float:
        """Add a backward, and return the factor of its loss.

        Args:
            weight: The weight of the batch.
            parameters: The parameters, frozen or not.
            is_reduced: Whether DDP reduces the gradients at the end of the backward.
        """
        self.parameters = parameters
        after_step.add(_end_windows)
        held = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        if writes_to(held.values()) != self._writes and are_zero(held.values()):
            self.weight = 0.0
        if not self.weight:
            self._kept = {} if are_zero(held.values()) else {each: grad.clone() for each, grad in held.items()}
        before, self.weight = self.weight, self.weight + weight
        share = weight / self.weight if weight else 0.0
        for parameter, gradient in held.items() if before and weight else ():
            gradient.mul_(1 - share)
            if parameter in self._kept:
                gradient.add_(self._kept[parameter], alpha=share)
        after_backward(partial(self._end_backward, is_reduced=is_reduced))
        return share

    def _end_backward(self, *, is_reduced: bool) -> None:
        self._writes = writes_to(parameter.grad for parameter in self.parameters)
        if is_reduced:
            self.weight = 0.0


_alone: WeakKeyDictionary[Any, WindowAlone] = WeakKeyDictionary()  # by module or optimizer: windows outlast blocks
_shares: dict[int, float] = {}  # of the last backward, by its number: a backward may begin at several scaled losses


def _end_windows(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for window in _alone.values():
        if not stepped.isdisjoint(map(id, window.parameters)):
            window.weight = 0.0
    if not any(window.weight for window in _alone.values()):
        after_step.remove(_end_windows)


def _refuse_reentrant(parameters: Sequence[torch.Tensor], before: Writes) -> None:
    if writes_to(parameter.grad for parameter in parameters) != before:
        raise JoinError(
            "A scaled loss is behind a reentrant checkpoint, in a block with enable=False or in a single process. Pass"
            " use_reentrant=False to torch.utils.checkpoint. [J565]"
        )


def scale_alone(loss: L, weight: float, targets: Iterable[Any]) -> L:
    """Scale a loss in a plain block that does nothing, so that gradients become the weighted mean over a window.

    Args:
        loss: The loss of a batch.
        weight: The weight of the batch.
        targets: The listed objects.
    """

    @uncompiled
    def begin_backward(gradient: torch.Tensor) -> torch.Tensor:
        if (number := backward_under_way()) in _shares:
            return gradient * _shares[number]
        windows: list[tuple[WindowAlone, Sequence[torch.Tensor], bool]] = []
        seen: set[torch.Tensor] = set()  # an optimizer holds parameters of modules
        for target in targets:
            if isinstance(target, torch.nn.Module):
                parameters = list(target.parameters())
            else:
                parameters = [each for group in getattr(target, "param_groups", ()) for each in group["params"]]
            if own := [each for each in parameters if each.is_floating_point() and each not in seen]:
                seen.update(own)
                is_reduced = getattr(target, "require_backward_grad_sync", False)
                windows.append((_alone.setdefault(target, WindowAlone()), own, is_reduced))
        try:
            reached = [window for window in windows if any(map(will_run, accumulators(window[1])))]
        except RuntimeError:  # torch.autograd.grad computes the gradient of one of the parameters
            return gradient
        if not reached:  # this is torch.autograd.grad, too, or the parameters are behind reentrant checkpoints
            parameters = [each for _, own, _ in windows for each in own]
            after_backward(partial(_refuse_reentrant, parameters, writes_to(each.grad for each in parameters)))
            return gradient
        shares = {window.add(weight, own, is_reduced=reduced) for window, own, reduced in reached}
        if len(shares) > 1:
            raise JoinError(
                "A scaled loss reached several modules whose accumulation windows have different weights so far, in a"
                " block with enable=False or in a single process. Loop over join.iterate(loader, window=k), or call"
                " zero_grad() on each module at the beginning of its window. [J564]"
            )
        _shares.clear()
        _shares[number] = shares.pop()
        return gradient * _shares[number]

    result = scaled(loss, float(weight > 0))
    if isinstance(result, torch.Tensor) and result.requires_grad:
        on_gradient(result, begin_backward)
    return result
