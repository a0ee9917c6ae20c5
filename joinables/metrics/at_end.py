"""Metrics of torchmetrics that are merged when the block ends: :class:`MetricAtEnd`.

Inside the block such a metric is local: ``update``, ``forward`` and ``compute`` communicate nothing, so ranks may call
them as often as they like. When the block ends, all ranks, active or joined, do the same::

    all-gathers of all ranks' states and numbers of updates
    locally: merge these, compute the value and keep it, then restore this rank's own state

The value over all samples of all ranks is kept in torchmetrics' cache of computed values: ``compute()`` after the block
returns it, without communication, until the next ``update`` or ``reset``. The state is the rank's own again, as after
torchmetrics' own synchronisation. So no sample counts twice: not in a second block without ``reset``, nor in an
``update`` between two blocks. On a rank that had no data, torchmetrics warns of a ``compute()`` before any
``update``, as without a block; the value is right.

A dummy of ``Join.iterate`` is skipped, and so is a batch without samples (the first tensor given has length 0);
``forward`` returns ``None`` for it, and otherwise the value of the rank's own batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from typing_extensions import override

from join.transfer import gather_trees
from joinables.adapter import Silent
from joinables.metrics.states import contributions, merged, put
from joinables.modules import CallInstead, replaced


class MetricAtEnd(Silent):
    """Merges a metric's states over all ranks once, when the block ends.

    Args:
        metric: a ``torchmetrics.Metric`` or ``MetricCollection``.
    """

    @override
    def attach(self, join: Any) -> None:
        super().attach(join)
        self._join = join
        metrics = metrics_in(self._target)
        # Wrappers are no parts: they return what the metrics inside them compute.
        self._parts = {name: each for name, each in metrics.items() if _keeps_value(each)}
        for each in metrics.values():
            self._check(each)
        self._replaced = ExitStack()
        for part in self._parts.values():
            part._computed = None  # the last block's value is not this rank's
            stand_in = CallInstead(part.distributed_available_fn, not_distributed)
            self._replaced.enter_context(replaced(part, "distributed_available_fn", stand_in))
        for name in ("update", "forward"):
            method = getattr(self._target, name)
            stand_in = CallInstead(method, partial(self._see, method))
            self._replaced.enter_context(replaced(self._target, name, stand_in))

    @override
    def detach(self) -> None:
        self._replaced.close()
        del self._join
        super().detach()

    def _check(self, metric: Any) -> None:
        name = type(metric).__name__
        if metric.dist_sync_on_step:
            raise ValueError(
                f"dist_sync_on_step=True of {name} communicates in every forward, where ranks without data never come;"
                " leave it out: compute() after the block is over all ranks. Where each step needs the value over all"
                " ranks, loop over join.iterate and leave the metric out of the list [J142]"
            )
        if not metric.compute_with_cache:
            raise ValueError(
                f"compute_with_cache=False of {name}: this cache is where the value over all ranks is kept after the"
                " block; leave it out [J143]"
            )
        if metric._is_synced:
            raise ValueError(
                f"{name} holds the states of all ranks after sync(); call its unsync() before the block [J144]"
            )
        if metric._defaults and not any(metric._defaults is each._defaults for each in self._parts.values()):
            raise TypeError(f"{name} has states that cannot be merged over ranks; list the metric that it wraps [J145]")

    # -- inside the block ---------------------------------------------------------------------------------------------

    def _see(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``update`` or ``forward``, unless the batch has no samples."""
        return method(*args, **kwargs) if self._has_samples(*args, **kwargs) else None

    def _has_samples(self, *args: Any, **kwargs: Any) -> bool:
        if self._join.shadowing:
            return False
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        first = next(tensors, None)
        return first is None or not first.ndim or len(first) > 0

    # -- the end of the block -----------------------------------------------------------------------------------------

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        ranks = gather_trees(self._collective, contributions(self._parts))
        found = {name: each for name, each in merged(self._parts, ranks, self.join_name).items() if each is not None}
        with ExitStack() as own:
            for name, contribution in found.items():
                part = self._parts[name]
                own.callback(put, part, part.update_count, part.metric_state)
                put(part, *contribution)
                part._computed = None
            for name in found:
                self._parts[name].compute()


def metrics_in(module: torch.nn.Module) -> dict[str, Any]:
    """The metrics in ``module``, itself included, by their names."""
    library = importlib.import_module("torchmetrics")
    modules = cast("Iterator[tuple[str, Any]]", module.named_modules())
    return {name: each for name, each in modules if isinstance(each, library.Metric)}


def _keeps_value(metric: Any) -> bool:
    """Whether ``compute`` of ``metric`` caches its value; that of some wrappers does not."""
    return type(metric)._wrap_compute is importlib.import_module("torchmetrics").Metric._wrap_compute


def not_distributed() -> bool:
    """The ``distributed_available_fn`` of a metric that does not communicate by itself."""
    return False
