"""Torchmetrics that a ``LightningModule`` has: :func:`metrics_of`, merged over all ranks when a block ends.

So no metric communicates by itself, a rank without updates takes part, and states may be lists of any length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from typing_extensions import override

from join.collectives._torch_private import pytree
from joinables.metrics import is_mergeable
from joinables.metrics.at_end import MetricAtEnd, metrics_in


class LoggedMetric(MetricAtEnd):
    """A metric that is merged when the block ends; for a dummy, ``forward`` returns a value that may be logged."""

    @override
    def _see(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._join.shadowing or method.__name__ == "update":
            return super()._see(method, *args, **kwargs)
        try:  # of the same keys as the other ranks', if it has any
            return _twin_of(self._target)(*args, **kwargs)
        except Exception:  # not all metrics can say something of no samples
            return torch.tensor(float("nan"))


def metrics_of(module: torch.nn.Module) -> Iterator[LoggedMetric]:
    """What stands for the metrics in ``module`` in a block; those inside of others come with these."""
    for child in module.children():
        if is_mergeable(child):
            yield LoggedMetric(child)
        else:
            yield from metrics_of(child)


def _twin_of(metric: Any) -> Any:
    """A copy of the metric after ``reset``; tensors that this does not replace, such as a network's, are shared."""
    states = [each.metric_state for each in metrics_in(metric).values()]
    tensors = [*metric.parameters(), *metric.buffers(), *pytree.tree_leaves(states)]
    twin = copy.deepcopy(metric, {id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)})
    twin.reset()
    return twin
