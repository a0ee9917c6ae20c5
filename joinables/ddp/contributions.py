"""What each rank gives to a reduction of a DDP module's gradients, and the mean of it: :class:`Contributions`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from join.joinable import Block, Burst
from joinables._torch import autograd, reducer
from joinables.ddp.last_result import LastResult
from joinables.ddp.unused_parameters import UsedParameters
from joinables.mean import Mean, Window
from joinables.weights import Weights

WITH_BUFFERS, CONTRIBUTES, WEIGHTED = range(3)
"""The flags in the header of a reduction: it covers the buffers too, this rank contributes, weights are summed."""

# Between blocks: what a rank has accumulated and not reduced; and, for each gradient, its id and how often it was
# written to by then.
_left_over: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[Window, list[tuple[int, int]]]]
_left_over = weakref.WeakKeyDictionary()


class Contributions:
    """What was accumulated since the last reduction, and how the next one makes a mean of it.

    The module's ``parameters`` are in the reducer's order.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ddp, self._parameters = ddp, parameters
        self.window = Window()
        self.last_result = LastResult(ddp, parameters)
        self.weights = Weights(parameters)
        self.used = UsedParameters(ddp, parameters)
        self.mean = Mean()
        self.with_buffers = False
        """Whether the header covers the buffers too: sent in the forward, it cannot tell who will run a backward."""

    def attach(self, join: Block, burst: Burst) -> None:
        """Prepare for a block that is entered, in which the reduction is announced as ``burst``."""
        self._channel, self._collective, self._burst = join.channel, join.collective, burst
        self._has_comm_hook = reducer.has_comm_hook(self._ddp)
        self.weights.attach(join)
        self.used.attach(join)
        self.last_result.attach()
        self.window = Window()

    def detach(self) -> None:
        """Let go of the block that is left, and keep what is accumulated for the next one."""
        if self.window.unreduced and not self.last_result.aside:  # which is put back into the gradients
            _left_over[self._ddp] = replace(self.window, with_data=0, with_dummies=False), self._writes
        self.weights.detach()
        self.used.detach()
        self.last_result.detach()
        del self._channel, self._collective, self._burst  # which hold the module

    # -- what was accumulated, and by whom ----------------------------------------------------------------------------

    def note_data(self, with_data: int) -> None:
        """Note which ranks have data (a bit mask) in a backward that begins, in a loop over ``Join.iterate``."""
        window = self.window
        if not window.with_data:
            self.used.begin_window(brought=window.unreduced)
        window.with_data |= with_data
        window.with_dummies |= not self._channel.step.all_have_data

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
        window, writes = _left_over.pop(self._ddp, (self.window, list[tuple[int, int]]()))
        was_zeroed = writes != self._writes and self.last_result.is_zero
        if window.unreduced and not (was_zeroed or self.last_result.has_no_gradient):
            self.window = window

    @property
    def _writes(self) -> list[tuple[int, int]]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [(id(each), autograd.writes(each)) for each in gradients if each is not None]

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
        mean, window, result = self.mean, self.window, self.last_result
        if mean.weighted:
            times = window.weight
        elif not mean.over_all_ranks:
            times = self.contributes
        elif self._channel.all_ranks_run_bursts:
            times = 1.0
        else:
            times = self._collective.world_size / self._contributors()
        if times != 1 and not (window.unreduced or result.aside):
            result.set_aside()
        result.add(times)

    def has_result(self) -> bool:
        """Whether a reduction to which this rank gave nothing shows that others gave something."""
        may_be_older = self.last_result.kept and self.mean.over_all_ranks
        # A rank that has joined may have given what it had accumulated.
        may_be_joined = self._channel.flags(self._burst)[CONTRIBUTES] > self._channel.announced(self._burst)
        if may_be_older or may_be_joined or reducer.hooks_remember(self._ddp):
            return False
        return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._parameters)

    # -- whether weights are summed -----------------------------------------------------------------------------------

    def check_weights(self) -> None:
        """In a plain block: make sure that all active ranks sum weights in this reduction, or none.

        Where something is wrong, the reduction still is as on the others, and what is wrong is raised after it.
        """
        mean, weights = self.mean, self.weights
        if mean.weighted != weights.in_use:
            weights.refused = ValueError(
                "join.weight was set or unset between forward and backward; set it before the forward [J106]"
            )
        if mean.weighted != weights.in_headers:
            weights.refused = self.weigh_as_all() or weights.refused

    def weigh_as_all(self) -> ValueError | None:
        """Sum weights in this reduction, or not, as all active ranks do; what is wrong if they do not do the same."""
        wrong = self.weights.agree_in_header(self._burst, WEIGHTED)
        self.mean.weighted = self.weights.in_headers
        return wrong

    def agree_on_weights(self) -> None:
        """In a loop over ``Join.iterate``: sum weights in this reduction, if ranks with data do."""
        if not self.window.with_data:
            self.used.begin_window(brought=self.window.unreduced)
        self.weights.agree(self.window)
        self.mean.weighted = self.weights.agreed

    # -- the mean -----------------------------------------------------------------------------------------------------

    @property
    def contributes(self) -> float:
        """1 if this rank contributes to its own backward, and 0 if it had nothing but dummies."""
        return float(self._channel.step.contributors is None or self.window.with_data >> self._collective.rank & 1)

    def _contributors(self) -> float:
        """How many ranks contribute, where all know it."""
        if self._channel.step.contributors is not None:
            return float(self.window.with_data.bit_count())
        return float(self._channel.flags(self._burst)[CONTRIBUTES])

    @property
    def _all_know_contributors(self) -> bool:
        return not (self.with_buffers if self._channel.step.contributors is None else self.weights.brought)

    def begin(self, mine: float) -> None:
        """Start to sum the contributors, or their weights, if they are wanted and not all ranks know them.

        Args:
            mine: the sum of this rank's weights, or 1 if it contributes.
        """
        mean = self.mean
        sums = mean.weighted or not (mean.over_all_ranks or self._all_know_contributors)
        mean.begin(self._channel.sum(mine) if sums else None)
        if self._normalises and (total := mean.divisor(self._contributors)):
            self.weights.normalise(self._collective.world_size / total)

    @property
    def _normalises(self) -> bool:
        """Whether gradients are parts of the mean before they are reduced, since a comm hook is given them."""
        return self.mean.weighted and self._has_comm_hook

    def end(self) -> None:
        """Turn the result of a reduction, the sum divided by the world size, into the mean that was asked for.

        Raises:
            ValueError: on all ranks, if their weights are all 0.
        """
        try:
            if self.last_result.aside:
                self.last_result.end_reduction(self._used_anywhere())
            if self.mean.scales:
                self._scale()
        finally:  # whatever that raises, maybe on this rank alone: the collectives must stay in step
            if self.used.counts:
                self.end_without_result()

    def end_without_result(self) -> None:
        """End a reduction of which this rank takes nothing: drop the gradients of parameters that only dummies used."""
        counts = self.used.counts and self._channel.all_ranks_run_bursts
        if counts and (self.window.with_dummies or self.weights.brought):
            self.used.end_reduction()

    def _scale(self) -> None:
        factor = self.mean.factor(self._collective.world_size, self._contributors)
        if factor == 1 or self._normalises:
            return
        with torch.no_grad():
            for parameter, used in zip(self._parameters, self._used_anywhere(), strict=True):
                if used and parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _used_anywhere(self) -> Sequence[int]:
        return reducer.used_anywhere(self._ddp, len(self._parameters))
