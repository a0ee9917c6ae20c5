"""Values that a ``LightningModule`` logs: :class:`LoggedValues`, in which those of dummies count nothing.

All ranks log the same keys, so their reductions match; what a dummy logs, often NaN, is left out of them::

    reduction     rank with data          dummy
    ---------     --------------          -----
    mean, step    value * weight, weight  0, 0
    mean, epoch   sum, samples            0, 0
    sum           value                   0
    max, min      value                   -inf, inf
    none          value                   what it was; nothing, if there was none

The mean over ranks of a step weighs their batches as their gradients, and so is the value of one process.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from typing_extensions import override

from joinables.integrations.lightning.blocks import Blocks
from joinables.integrations.lightning.names import ResultCollection


class LoggedValues(ResultCollection):
    """Takes the place of Lightning's collection of what one loop has logged.

    Args:
        training: whether the loop trains.
        blocks: the trainer's.
    """

    def __init__(self, training: bool, blocks: Blocks) -> None:
        super().__init__(training)
        self._blocks = blocks

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        blocks, logged = self._blocks, cast("Any", self[key])
        blocks.is_logging = True
        try:
            if not (blocks.is_dummy and logged.is_tensor):
                super().update_metrics(key, value, batch_size)
            elif logged.meta.sync.should:
                super().update_metrics(key, _nothing(value, logged.meta), 0)
            elif not logged.update_called:
                logged.has_reset = True  # there is no value
        finally:
            blocks.is_logging = False


def _nothing(value: torch.Tensor, meta: Any) -> torch.Tensor:
    """A value that changes no mean, sum, minimum or maximum."""
    if meta.is_max_reduction or meta.is_min_reduction:
        value = value if value.is_floating_point() else value.float()
        return torch.full_like(value, float("-inf" if meta.is_max_reduction else "inf"))
    return torch.zeros_like(value)
