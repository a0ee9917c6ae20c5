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

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from joinables.integrations.lightning.blocks import Blocks
from joinables.integrations.lightning.names import ResultCollection


class StepMeans:
    """Means over ranks of what is logged in a step."""

    def __init__(self) -> None:
        self._weight: float | None = None  # while a value of a step is logged

    @contextmanager
    def weighed(self, weight: float) -> Generator[None]:
        """What is reduced inside is logged in a step, where this rank's batch counts as much."""
        self._weight = weight
        try:
            yield
        finally:
            self._weight = None

    def reduce(self, tensor: torch.Tensor, group: Any) -> torch.Tensor | None:
        """The mean over ranks; ``None`` outside of a step, where no rank weighs more than another."""
        weight = self._weight
        if weight is None:
            return None
        sums = torch.stack([tensor * weight, torch.full_like(tensor, weight)])
        dist.all_reduce(sums, group=group)
        return sums[0] / sums[1]


class LoggedValues(ResultCollection):
    """Takes the place of Lightning's collection of what one loop has logged.

    Args:
        training: whether the loop trains.
        blocks: the trainer's.
        means: those of the strategy that reduces.
    """

    def __init__(self, training: bool, blocks: Blocks, means: StepMeans) -> None:
        super().__init__(training)
        self._blocks, self._means = blocks, means

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        step, logged = self._blocks.step, self[key]
        with self._means.weighed(step.weight):
            if not (step.is_dummy and logged.is_tensor):
                super().update_metrics(key, value, batch_size)
            elif logged.meta.sync.should:
                super().update_metrics(key, _nothing(value, logged.meta), 0)
            elif not logged.update_called:
                logged.has_reset = True  # there is no value


def _nothing(value: torch.Tensor, meta: Any) -> torch.Tensor:
    """What changes no reduction."""
    if meta.is_max_reduction or meta.is_min_reduction:
        value = value if value.is_floating_point() else value.float()
        return torch.full_like(value, float("-inf" if meta.is_max_reduction else "inf"))
    return torch.zeros_like(value)
