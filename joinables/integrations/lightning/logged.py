"""Logged values and torchmetrics of a ``LightningModule``: :class:`LoggedValues`, :func:`metrics_of`.

All ranks log the same keys, so their reductions match. The values of dummies, often NaN, do not enter these::

    reduction     rank with data          dummy
    ---------     --------------          -----
    mean, step    value * weight, weight  0, 0
    mean, epoch   sum, samples            0, 0
    sum           value                   0
    max, min      value                   -inf, inf
    none          value                   the previous value; nothing, if there was none

The mean over ranks in a step has the weights of their gradients, so it equals the value of a single process.

Metrics are merged over all ranks when a block ends. So no metric communicates by itself, a rank without updates takes
part, and states may be lists of any length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from typing_extensions import override

from join.collectives._torch_private import pytree
from joinables.integrations.lightning.blocks import Blocks
from joinables.integrations.lightning.names import ResultCollection
from joinables.metrics import MetricAtEnd, is_mergeable, metrics_in
from joinables.modules import replaced


class LoggedValues(ResultCollection):
    """Collection of the values that one loop has logged; it replaces Lightning's own.

    Args:
        training: Whether the loop trains.
        blocks: The trainer's blocks.
    """

    def __init__(self, training: bool, blocks: Blocks) -> None:
        super().__init__(training)
        self._blocks = blocks

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        logged = cast("Any", self[key])
        with replaced(self._blocks, "in_step", True):
            if not (self._blocks.is_dummy and logged.is_tensor):
                super().update_metrics(key, value, batch_size)
            elif logged.meta.sync.should:
                super().update_metrics(key, _nothing(value, logged.meta), 0)
            elif not logged.update_called:
                logged.has_reset = True  # the metric has no value


def _nothing(value: torch.Tensor, meta: Any) -> torch.Tensor:
    """Return a value that changes no mean, sum, minimum or maximum."""
    if meta.is_max_reduction or meta.is_min_reduction:
        value = value if value.is_floating_point() else value.float()
        return torch.full_like(value, float("-inf" if meta.is_max_reduction else "inf"))
    return torch.zeros_like(value)


class LoggedMetric(MetricAtEnd):
    """Metric that is merged when the block ends; for a dummy, ``forward`` returns a value that can be logged."""

    @override
    def _call_on_batch(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._channel.step.shadowing or method.__name__ == "update":
            return super()._call_on_batch(method, *args, **kwargs)
        return _twin_of(self._target)(*args, **kwargs)  # it has the same keys as on the other ranks


def metrics_of(module: torch.nn.Module) -> Iterator[LoggedMetric]:
    """Yield a joinable for each metric in ``module``; it covers the metrics inside that metric."""
    for child in module.children():
        if is_mergeable(child):
            yield LoggedMetric(child)
        else:
            yield from metrics_of(child)


def _twin_of(metric: Any) -> Any:
    """Return a copy of the metric after ``reset``; tensors that ``reset`` keeps, such as a network's, are shared."""
    states = [part.metric_state for part in metrics_in(metric).values()]
    tensors = [*metric.parameters(), *metric.buffers(), *pytree.tree_leaves(states)]
    twin = copy.deepcopy(metric, {id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)})
    twin.reset()
    return twin
