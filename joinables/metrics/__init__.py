"""Metrics of torchmetrics over uneven ranks: :class:`Metric`.

A block may list them as they are, and merges them when it ends (``joinables.metrics.at_end``). ``Metric`` says more of
them: that the value of every step is wanted over all ranks, too (``joinables.metrics.every_step``).
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

from join import Joinable
from joinables.metrics.at_end import MetricAtEnd
from joinables.metrics.every_step import MetricAtEveryStep


def is_metric(module: torch.nn.Module) -> bool:
    """Whether ``module`` is one of torchmetrics; that is never imported for it."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(module, (library.Metric, library.MetricCollection, library.MetricTracker))


class Metric:
    """Says how a metric is synchronised: when the block ends, as any that is listed, and maybe at every step.

    States are merged by their ``dist_reduce_fx``, without those of ranks that have seen nothing; ``"mean"`` weighs each
    rank by its number of updates, as torchmetrics does from one update to the next. A block that raises merges nothing.

    Args:
        metric: a ``torchmetrics.Metric`` or ``MetricCollection``.
        every_step: whether calling the metric in the block returns the value of the batches of all ranks that call it
            in the same step, and not of this rank's alone. Then all ranks with data call it at the same places. In a
            block with ``enable=False``, and outside, it is this rank's.

    Raises:
        TypeError: if it is none.
    """

    def __init__(self, metric: Any, *, every_step: bool = False) -> None:
        library = cast("Any", sys.modules.get("torchmetrics"))
        if library is None or not isinstance(metric, (library.Metric, library.MetricCollection)):
            raise TypeError(
                f"metric is a {type(metric).__name__}; give a torchmetrics.Metric or MetricCollection, and of a"
                " MetricTracker the metrics in it"
            )
        self.metric, self.every_step = metric, every_step

    def joinable(self) -> Joinable:
        """What takes part in the block."""
        return MetricAtEveryStep(self.metric) if self.every_step else MetricAtEnd(self.metric)
