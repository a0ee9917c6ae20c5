"""Gradients that weigh as much as their batch: :class:`Weights`, behind ``join.weight``.

A gradient is multiplied by the weight where it reaches its parameter, not at the module's outputs: these may be
computed from one another, and would be weighed twice. So a sum over ranks and micro-batches, divided by the sum of
their weights, is the weighted mean. A comm hook, which may round gradients or carry errors over to the next step, is
given parts of that mean itself: there the sum of weights is awaited before the backward.

Where weights do not fit, on this rank or with those of others, a DDP module's reduction still runs as on the other
ranks, and raises when it is over (``refused``). A replayed module's raises before its own collectives: on all ranks,
or, where this rank has changed its mind inside a loop, on this one alone, of which the others learn as of any failure.

In a loop over ``Join.iterate`` no header tells of weights. There the first reduction begins with one more all-reduce::

    rank with data                                 rank without data
    --------------                                 -----------------
    votes: uses weights, or does not               votes: neither
           brings gradients of before the loop            the same
    the reduction                                  the reduction
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from join.joinable import Block, Burst
from joinables.mean import Window


class Weights:
    """Applies ``join.weight`` to one module's gradients, and finds out whether all ranks use weights.

    Args:
        parameters: the module's parameters.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._handles: dict[int, Any] = {}  # by the parameter's number
        self._unit = 1.0  # what the weights of the backward under way are multiplied by
        self.in_headers = False
        """In a plain block: whether all active ranks used weights in the last burst in which they did alike."""
        self.agreed = False
        """In a loop over ``Join.iterate``: whether weights are in use, in the loop of the number ``agreed_in``."""
        self.agreed_in = 0
        self.brought = False
        """Whether a rank brought gradients of a time before that loop, which it alone can see zeroed."""
        self.refused: ValueError | None = None
        """What the reduction under way is to raise when it is over, on this rank: weights that ranks do not share."""
        self.silent = False
        """Whether gradients are replaced by zeros: this rank has no data, and runs backward for its collectives only.
        Needs ``watch(always=True)``."""

    def attach(self, join: Block) -> None:
        """Begin with no weights refused; called when a block is entered."""
        self._join, self._channel, self.refused = join, join.channel, None
        self._unit = join.loss_divided_by

    def detach(self) -> None:
        """Remove the hooks; called when the block is left."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
        del self._join, self._channel

    @property
    def in_use(self) -> bool:
        """Whether this rank has set a weight, and its batch is no dummy."""
        return self._join.weight is not None and not self._channel.step.shadowing

    # -- whether all ranks use weights --------------------------------------------------------------------------------

    def agree_in_header(self, burst: Burst, flag: int) -> ValueError | None:
        """In a plain block, as a reduction begins: set ``in_headers`` to what active ranks say by a flag of ``burst``.

        If they did not announce the same, it stays what it was in the last burst, on all ranks, so that their
        collectives match, and what is wrong is returned.
        """
        using, announced = self._channel.flags(burst)[flag], self._channel.announced(burst)
        if using in (0, announced):
            self.in_headers = using > 0
            return None
        return weighs_on_some(using, announced - using)

    def agree(self, window: Window) -> None:
        """In a loop over ``Join.iterate``, as a reduction begins: find out what ranks cannot know of each other.

        The first reduction of a loop sends it (one all-reduce, awaited); it holds for the others. If some ranks use
        weights and others do not, weights are in use for now, and ``refused`` is set on all ranks.

        Args:
            window: of this reduction; it is told which ranks bring gradients of a time before the loop.
        """
        collective, channel, in_use = self._join.collective, self._channel, self.in_use
        if self.agreed_in == channel.loop:
            return
        self.agreed_in = channel.loop
        brings = [window.unreduced and rank == collective.rank for rank in range(collective.world_size)]
        votes = torch.tensor([in_use, not (in_use or channel.step.shadowing), *brings], dtype=torch.int64)
        collective.all_reduce(votes).wait()
        using, not_using, *bringing = cast("list[int]", votes.tolist())
        self.agreed, self.brought = using > 0, any(bringing)
        if using and not_using:
            self.refused = weighs_on_some(using, not_using)
        window.with_data |= sum(1 << rank for rank, each in enumerate(bringing) if each)

    def change(self) -> ValueError | None:
        """What is wrong if this rank sets a weight and ranks agreed on none in this loop, or the other way round."""
        agreed = self._channel.all_ranks_run_bursts and self.agreed_in == self._channel.loop
        if agreed and self.agreed != (self._join.weight is not None) and not self._channel.step.shadowing:
            return ValueError("join.weight was set or unset inside the loop; set it at every step or at none [J276]")
        return None

    def end_refused(self) -> None:
        """Raise ``refused``: the reduction is over, and this rank's collectives were those of the others."""
        refused, self.refused = self.refused, None
        if refused is not None:
            raise refused

    # -- how they are applied -----------------------------------------------------------------------------------------

    def watch(self, *, always: bool = False) -> None:
        """See to it that gradients of the next forward are weighed, if weights are in use, or ``always``."""
        if (always or self._join.weight is not None) and len(self._handles) < len(self._parameters):
            for index, parameter in enumerate(self._parameters):
                if parameter.requires_grad and index not in self._handles:  # some are frozen for some backwards
                    self._handles[index] = parameter.register_hook(partial(self._weigh, parameter))

    def begin_backward(self) -> float:
        """Return how much a backward weighs that begins, where weights are in use."""
        self._unit = self._join.loss_divided_by
        self.watch()  # unless the forward did
        return self._join.weight or 0.0

    @torch.no_grad()
    def normalise(self, unit: float) -> None:
        """Let weights count in units of their mean: in what was accumulated, and in the backward that begins."""
        self._unit = unit * self._join.loss_divided_by
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(unit)

    def _weigh(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        weight = 0.0 if self.silent else self._join.weight
        if weight is None or weight * self._unit == 1.0:
            return None
        if gradient is None:
            # SyncBatchNorm says so for the zeros of an empty batch, and FSDP would not reduce them, as other ranks do.
            if weight == 0 and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return None
        if not weight:
            return torch.zeros_like(gradient)  # also of what is NaN: an empty batch's mean
        return gradient * (weight * self._unit)


def weighs_on_some(using: int, not_using: int) -> ValueError:
    """The error for weights that are in use on so many ranks and not on others."""
    return ValueError(
        f"join.weight is set on {using} ranks and not on {not_using}; set it on all ranks or on none [J277]"
    )
