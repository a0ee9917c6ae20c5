"""Metrics of torchmetrics whose batches are merged at every step, too: :class:`MetricAtEveryStep`.

Calling such a metric (``forward``) returns the value of the batches of all ranks that call it in the same step, on all
of them::

    active rank                                            joined rank
    -----------                                            -----------
    a twin of the metric is updated with this batch alone  .
    header                                                 header
    all-gathers of the states of the twins                 all-gathers, with nothing
    the metric itself is updated with this batch           .
    the twin merges the states and computes the value      .

The metric itself accumulates the samples of this rank only, each once, and is merged when the block ends
(``joinables.metrics.at_end``). ``update`` stays local. The all-gathers are awaited, and the value has no gradient.

A rank whose batch has no samples, or is a dummy of ``Join.iterate``, contributes nothing and gets the value of the
others; ``None`` if no rank has samples.

The call may come between the forward and the backward of a module, where its predictions are known. So no module of
the block announces its backward in its forward.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from typing_extensions import override

from join import Burst
from join.collectives._torch_private import pytree
from join.joinable import Block, BurstState
from join.transfer import gather_trees
from joinables.metrics.at_end import MetricAtEnd, metrics_of, not_distributed
from joinables.metrics.states import contributions, merged, put
from joinables.replacement import CallInstead


class MetricAtEveryStep(MetricAtEnd, Burst):
    """Merges the batches of every step over all ranks, and the metric's states when the block ends."""

    communicates: ClassVar[bool] = True
    has_own_group: ClassVar[bool] = False
    comes_between = True

    @override
    def attach(self, join: Block) -> None:
        twin = twin_of(self._target)
        super().attach(join)
        self._twin, self.state = twin, BurstState.IDLE
        twins = metrics_of(twin)
        self._twin_parts = {name: twins[name] for name in self._parts}
        for each in twins.values():
            each.distributed_available_fn = not_distributed
        self._replace(self._target, "forward", CallInstead(self._target.forward, self._forward))

    @override
    def detach(self) -> None:
        super().detach()
        del self._twin, self._twin_parts

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        has_samples = self._has_samples(*args, **kwargs)
        mine = self._seen(*args, **kwargs) if has_samples else None
        self._join.channel.announce(self)
        self.state = BurstState.RUNNING
        ranks = gather_trees(self._collective, mine)
        self.state = BurstState.IDLE
        if has_samples:
            with _ungrouped(self._target):
                self._target.update(*args, **kwargs)
        if all(each is None for each in ranks):
            return None
        found = merged(self._twin_parts, ranks, self.join_name)
        self._twin.reset()
        for name, contribution in found.items():
            if contribution is not None:
                put(self._twin_parts[name], *contribution)
        return self._twin.compute()

    def _seen(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """The twin's states after this batch alone."""
        self._twin.reset()
        with _ungrouped(self._twin):
            self._twin.update(*args, **kwargs)
        return contributions(self._twin_parts)

    @override
    def main_hook(self) -> None:
        gather_trees(self._collective, None)


def twin_of(metric: Any) -> Any:
    """A copy of the metric after ``reset``; tensors that this does not replace, such as a network's, are shared."""
    states = [each.metric_state for each in metrics_of(metric).values()]
    tensors = [*metric.parameters(), *metric.buffers(), *pytree.tree_leaves(states)]
    twin = copy.deepcopy(metric, {id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)})
    twin.reset()
    return twin


@contextmanager
def _ungrouped(metric: Any) -> Generator[None]:
    """Keep collections from forming compute groups of metrics whose states happen to agree after the first batch.

    ``forward`` forms none either. Groups that an ``update`` by the user has formed stay.
    """
    collections = [each for each in metric.modules() if getattr(each, "_enable_compute_groups", None)]
    enabled = [each._enable_compute_groups for each in collections]
    for each in collections:
        each._enable_compute_groups = False
    try:
        yield
    finally:
        for each, value in zip(collections, enabled, strict=True):
            each._enable_compute_groups = value
