"""Metrics of torchmetrics over uneven ranks: a ``Join`` block lists them as they are.

They are merged over the ranks when the block ends (``joinables.metrics.at_end``).
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

from join import Joinable
from joinables.metrics.at_end import MetricAtEnd


def is_metric(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a metric of torchmetrics, which is not imported to find out."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(module, (library.Metric, library.MetricCollection, library.MetricTracker))


def is_mergeable(obj: Any) -> bool:
    """Whether ``obj`` is a metric of torchmetrics or a collection of them, whose states can be merged."""
    library = cast("Any", sys.modules.get("torchmetrics"))
    return library is not None and isinstance(obj, (library.Metric, library.MetricCollection))


def joinable_of_metric(metric: Any) -> Joinable:
    """Return the joinable that merges a metric when the block ends.

    Raises:
        TypeError: if it is a ``MetricTracker``, whose metrics are those of many epochs.
    """
    if not is_mergeable(metric):
        raise TypeError(
            f"{type(metric).__name__} keeps the metrics of many epochs, which are not merged; list the metric that it"
            " tracks [J420]"
        )
    return MetricAtEnd(metric)
