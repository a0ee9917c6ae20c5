"""Metrics of torchmetrics over uneven ranks: :class:`Metric`.

A ``Join`` block may list metrics as they are, and merges them over the ranks when it ends
(``joinables.metrics.at_end``). Listed as ``Metric(metric, every_step=True)``, they have the value over all ranks at
every step, too (``joinables.metrics.every_step``).
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

from join import Joinable
from joinables.metrics.at_end import MetricAtEnd
from joinables.metrics.every_step import MetricAtEveryStep


def is_metric(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a metric of torchmetrics, which is not imported to find out."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(module, (library.Metric, library.MetricCollection, library.MetricTracker))


def is_mergeable(obj: Any) -> bool:
    """Whether ``obj`` is a metric of torchmetrics or a collection of them, whose states can be merged."""
    library = cast("Any", sys.modules.get("torchmetrics"))
    return library is not None and isinstance(obj, (library.Metric, library.MetricCollection))


class Metric:
    """How a metric is synchronised in a block: when the block ends, and with ``every_step`` at every step, too.

    States are merged by their ``dist_reduce_fx``, without those of ranks that have no update; ``"mean"`` weighs each
    rank by its number of updates, as torchmetrics does from one update to the next. A block that raises merges nothing.

    Args:
        metric: a ``torchmetrics.Metric`` or ``MetricCollection``.
        every_step: whether calling the metric in the block returns the value of the batches of all ranks that call it
            in the same step, and not of this rank's alone. Then all ranks with data must call it at the same places. In
            a block with ``enable=False``, and outside, the value is this rank's.

    Raises:
        TypeError: if it is no metric, or a ``MetricTracker``.
    """

    def __init__(self, metric: Any, *, every_step: bool = False) -> None:
        if not is_mergeable(metric):
            raise TypeError(
                f"metric is a {type(metric).__name__}; give a torchmetrics.Metric or MetricCollection, and of a"
                " MetricTracker the metrics in it [J141]"
            )
        self.metric, self.every_step = metric, every_step

    def joinable(self) -> Joinable:
        """Return the joinable that stands for the metric in the block."""
        return MetricAtEveryStep(self.metric) if self.every_step else MetricAtEnd(self.metric)
