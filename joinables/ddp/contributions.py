"""What each rank gives to a reduction of a DDP module's gradients, and the mean of it: :class:`Contributions`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from join import JoinError
from join.joinable import Block, Burst
from joinables._torch import autograd, reducer
from joinables.ddp.last_result import LastResult
from joinables.ddp.unused_parameters import UsedParameters

WITH_BUFFERS, CONTRIBUTES, WEIGHTED = range(3)
"""The flags in the header of a reduction: it covers the buffers too, this rank contributes, weights are summed."""


@dataclass(slots=True)
class Window:
    """The backwards since the last reduction (under ``no_sync``, say); replaced by a new one when that is over.

    Attributes:
        unreduced: whether this rank has gradients that no reduction has included yet.
        weight: in a plain block, the sum of the weights of this rank's backwards; ``None`` if these are not weighted.
        number: that of the loop's window in which they were made, over ``Join.iterate``; 0 in a plain block.
        with_dummies: in such a loop, whether a rank had no data in one of them.
    """

    unreduced: bool = False
    weight: float | None = None
    number: int = 0
    with_dummies: bool = False


# Between blocks: what a rank has accumulated and not reduced; and what was written to its gradients by then.
_left_over: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[Window, list[tuple[int, int]]]]
_left_over = weakref.WeakKeyDictionary()


class Factors:
    """Multiplies the gradients that arrive at ``parameters``, in the few cases in which that is needed.

    By 0 where a batch counts for nothing, also what is NaN there; and by what makes a part of the mean of what a comm
    hook is given.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._handles: dict[int, Any] = {}  # by the parameter's number
        self.factor = 1.0
        """What gradients are multiplied by."""

    def multiply_by(self, factor: float) -> None:
        """Multiply the gradients of the backwards that follow; by 1 no longer."""
        self.factor = factor
        if factor == 1.0:
            self.remove()
            return
        autograd.hook_gradients(self._parameters, self._handles, lambda _: self._multiply)

    def _multiply(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # SyncBatchNorm says so for the zeros of an empty batch
            return None
        return gradient * self.factor if self.factor else torch.zeros_like(gradient)

    def remove(self) -> None:
        """Remove the hooks."""
        autograd.remove_hooks(self._handles)


class Contributions:
    """What was accumulated since the last reduction, and how the next one makes a mean of it.

    DDP divides the sum over ranks by their number. The mean over contributors is that times ``world_size /
    contributors``; the weighted mean, of losses that ``Join.scale`` has multiplied by ``weight / unit``, is that times
    ``world_size * unit / sum of weights``. A comm hook, which may round gradients or carry errors over to the next
    step, is given parts of that mean itself: there the sum of weights is awaited before the backward.

    The module's ``parameters`` are in the reducer's order.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ddp, self._parameters = ddp, parameters
        self.window = Window()
        self.last_result = LastResult(ddp, parameters)
        self.used = UsedParameters(ddp, parameters)
        self.factors = Factors(parameters)
        self.over_all_ranks = True
        """Whether to divide by the number of ranks where there are no weights (``divide_by_initial_world_size``)."""
        self.weighted = False
        """In a plain block: whether the reduction under way, or to come, makes the weighted mean."""
        self._weighted_last = False  # what all active ranks said in the last header in which they did alike
        self.with_buffers = False
        """Whether the header covers the buffers too: sent in the forward, it cannot tell who will run a backward."""
        self._awaits: Callable[[], float] | None = None  # waits for the sum under way, of weights or contributors
        self._total: float | None = None  # that sum, once it is there
        self._unit = 1.0  # of the losses that the reduction under way is of
        self._are_parts = False  # whether gradients are parts of the mean already

    def attach(self, join: Block, burst: Burst) -> None:
        """Prepare for a block that is entered, in which the reduction is announced as ``burst``."""
        self._channel, self._collective, self._burst = join.channel, join.collective, burst
        self._has_comm_hook = reducer.has_comm_hook(self._ddp)
        self._channel.scaling.attach_module()
        self.used.attach(join)
        self.last_result.attach()
        self.window, self._weighted_last = Window(), False

    def detach(self) -> None:
        """Let go of the block that is left, and keep what is accumulated for the next one."""
        if self.window.unreduced and not self.last_result.aside:  # which is put back into the gradients
            _left_over[self._ddp] = self.window, autograd.gradient_writes(self._parameters)
        self.factors.remove()
        self._channel.scaling.detach_module()
        self.used.detach()
        self.last_result.detach()
        del self._channel, self._collective, self._burst  # which hold the module

    # -- what was accumulated, and by whom ----------------------------------------------------------------------------

    def note_step(self) -> None:
        """Note that a backward begins: in a window of the loop over ``Join.iterate``, or in a plain block.

        Raises:
            JoinError: if gradients of another window are left unreduced, or of before or in the loop.
        """
        window, contributors = self.window, self._channel.step.contributors
        number = 0 if contributors is None else self._channel.scaling.window
        if window.number != number:
            if window.unreduced:
                raise JoinError(
                    f"{self._burst.join_name} began, and gradients of an earlier step are left unreduced, where a"
                    " loop over join.iterate knows of no window; give join.iterate(loader, window=k), or call"
                    " zero_grad() between loops [J471]"
                )
            window = self.window = Window(number=number)
            self.used.begin_window()
        window.with_dummies |= contributors not in (None, self._collective.world_size)

    def forget_zeroed(self) -> None:
        """Drop the window if ``zero_grad`` was called since: what is gone must not count.

        Gradients that are 0 tell nothing: those of a batch may be.
        """
        if self.last_result.has_no_gradient:
            self.window = Window()
            self.last_result.aside.clear()

    def take_over(self) -> None:
        """Go on with the window that the last block has left open; called when the first backward begins.

        Unless ``zero_grad`` was called since: it sets gradients to ``None``, or writes 0 to them. A rank that only
        shadows does not come here: the loop would have called ``zero_grad``, or not, and it cannot know.
        """
        if self._ddp not in _left_over:
            return
        window, writes = _left_over.pop(self._ddp)
        was_zeroed = writes != autograd.gradient_writes(self._parameters) and self.last_result.is_zero
        if window.unreduced and not (was_zeroed or self.last_result.has_no_gradient):
            self.window = window

    @property
    def holds_unreduced(self) -> bool:
        """Whether the gradients are this rank's own, still to be reduced: of this block, or of the last one."""
        return self.window.unreduced or (self._ddp in _left_over and not self.last_result.has_no_gradient)

    def drop(self) -> None:
        """Contribute nothing to the reduction that comes: drop the gradients."""
        _left_over.pop(self._ddp, None)
        for parameter in self._parameters:
            parameter.grad = None
        reducer.forget_use(self._ddp)

    def add_last_result(self) -> None:
        """See to it that the mean has the last reduction's result once, where gradients still hold it."""
        window, result, step = self.window, self.last_result, self._channel.step
        if step.contributors is not None:
            times = float(step.has_data or not self._scales_in_loop)
        elif self.weighted:
            times = (window.weight or 0.0) / self._channel.scaling.unit
        elif self.over_all_ranks:
            times = self._collective.world_size / self._contributors()
        else:
            times = 1.0
        if times != 1 and not result.aside and (step.shadowing or not window.unreduced):
            result.set_aside()
        result.add(times)

    def has_result(self) -> bool:
        """Whether a reduction to which this rank gave nothing shows that others gave something."""
        may_be_older = self.last_result.kept and self.over_all_ranks
        # A rank that has joined may have given what it had accumulated.
        may_be_joined = self._channel.flags(self._burst)[CONTRIBUTES] > self._channel.announced(self._burst)
        if may_be_older or may_be_joined or reducer.hooks_remember(self._ddp):
            return False
        return not self.last_result.gradients_are_zero

    # -- whether weights are summed -----------------------------------------------------------------------------------

    def agree_on_weights(self) -> None:
        """In a plain block, as a reduction begins: find out whether active ranks sum weights in it.

        Only where this rank does another thing than all did last time, it waits for the header to tell.

        Raises:
            ValueError: if some do and others do not, on those that wait.
        """
        using, announced = self._channel.flags(self._burst)[WEIGHTED], self._channel.announced(self._burst)
        if using not in (0, announced):
            raise ValueError(
                f"join.weight is set on {using} ranks and not on {announced - using}; set it on all ranks or on none"
                " [J277]"
            )
        self.weighted = self._weighted_last = using > 0

    @property
    def weighs_as_last_time(self) -> bool:
        """Whether this rank does what all did in the last reduction."""
        return self.weighted == self._weighted_last

    # -- the mean -----------------------------------------------------------------------------------------------------

    @property
    def _scales_in_loop(self) -> bool:
        """In a loop over ``Join.iterate``: whether the result is scaled, since its losses are not."""
        return not (self.over_all_ranks or self._channel.scaling.in_use)

    @property
    def are_plain(self) -> bool:
        """In a loop: whether the reduction that comes is DDP's own, of this backward alone."""
        return not (self.window.unreduced or self.last_result.aside or self.scales) and self.factors.factor == 1.0

    @property
    def scales(self) -> bool:
        """Whether the mean may be another one than DDP's."""
        step = self._channel.step
        if step.contributors is not None:
            return self._scales_in_loop and 0 < step.contributors < self._collective.world_size
        return self.weighted or not self.over_all_ranks

    def _contributors(self) -> float:
        """How many ranks contribute, where all know it."""
        in_loop = self._channel.step.contributors
        return float(self._channel.flags(self._burst)[CONTRIBUTES] if in_loop is None else in_loop)

    @torch.no_grad()
    def begin(self, mine: float) -> None:
        """Begin a reduction: start to sum the contributors, or their weights, if they are wanted and not known.

        Args:
            mine: the sum of this rank's weights, or 1 if it contributes.
        """
        self._awaits = self._total = None
        self._unit, self._are_parts = self._channel.scaling.unit, self.weighted and self._has_comm_hook
        sums = self.weighted or (self.with_buffers and not self.over_all_ranks)
        if sums and self._channel.step.contributors is None:
            self._awaits = self._channel.sum(mine)
        if self._are_parts:
            factor = self._factor()
            if self.factors.factor:
                self.factors.multiply_by(factor)
            autograd.multiply([parameter.grad for parameter in self._parameters if parameter.grad is not None], factor)

    def wait(self) -> None:
        """Wait for the sum under way, if there is one: it must be over before the next one begins."""
        if self._awaits is not None:
            self._total, self._awaits = self._awaits(), None
            if self.weighted:
                self._channel.scaling.learn(self._total / self._collective.world_size)

    def _factor(self) -> float:
        """What makes the mean of what DDP makes; 1 if nobody has given anything."""
        self.wait()
        total = self._contributors() if self._total is None else self._total
        if not total:
            return 1.0
        return self._collective.world_size / total * (self._unit if self.weighted else 1.0)

    def end(self) -> None:
        """Turn the result of a reduction, the sum divided by the world size, into the mean that was asked for."""
        if self.last_result.aside:
            self.last_result.end_reduction(self._used_anywhere())
        if self._are_parts:
            self.factors.multiply_by(1.0)
        elif self.scales and (factor := self._factor()) != 1:
            used = zip(self._parameters, self._used_anywhere(), strict=True)
            autograd.multiply(
                [parameter.grad for parameter, is_used in used if is_used and parameter.grad is not None], factor
            )
        self.end_without_result()

    def end_without_result(self) -> None:
        """End a reduction of which this rank takes nothing: drop the gradients of parameters that only dummies used."""
        if self.used.counts and self.window.with_dummies:
            self.used.end_reduction()

    def _used_anywhere(self) -> Sequence[int]:
        return reducer.used_anywhere(self._ddp, len(self._parameters))
