"""Torchmetrics that a ``LightningModule`` has: :func:`metrics_of`, merged over all ranks when a block ends.

So no metric communicates by itself, a rank without updates takes part, and states may be lists of any length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from typing_extensions import override

from joinables.metrics import is_metric
from joinables.metrics.at_end import MetricAtEnd


class LoggedMetric(MetricAtEnd):
    """A metric that is merged when the block ends; for a dummy, ``forward`` returns a value that may be logged."""

    @override
    def _see(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._join.shadowing or method.__name__ == "update":
            return super()._see(method, *args, **kwargs)
        return _on_a_copy(self._target, *args, **kwargs)


def _on_a_copy(metric: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``forward`` of the metric returns for a batch that is not to count; it has keys as that of any other."""
    twin = copy.deepcopy(metric)
    try:
        return twin(*args, **kwargs)
    except Exception:  # not all can say something of no samples
        return torch.tensor(float("nan"))


def metrics_of(module: torch.nn.Module) -> Iterator[LoggedMetric]:
    """What stands for the metrics in ``module`` in a block; those inside of others come with these."""
    for child in module.children():
        if is_metric(child) and hasattr(child, "update_count" if hasattr(child, "metric_state") else "items"):
            yield LoggedMetric(child)
        else:
            yield from metrics_of(child)
