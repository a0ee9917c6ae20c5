"""Synchronisation of torchmetrics metrics that a ``Join`` block lists as they are: :class:`MetricAtEnd`.

Inside the block such a metric is local: ``update``, ``forward`` and ``compute`` do not communicate, so ranks may call
them any number of times. When the block ends, all ranks, active or joined, do the same::

    all-gathers of all ranks' states and numbers of updates
    locally: merge these, compute the value and keep it, then restore this rank's own state

The value over all samples of all ranks is kept in torchmetrics' cache of computed values: ``compute()`` after the block
returns it, without communication, until the next ``update`` or ``reset``. The state is then the rank's own again, as
after torchmetrics' synchronisation. So no sample counts twice, neither in a second block without ``reset``, nor in an
``update`` between two blocks. On a rank that had no data, torchmetrics warns of a ``compute()`` before any ``update``,
as it does without a block; the value is right.

A dummy of ``Join.iterate`` is skipped, and so is a batch without samples (its first tensor has length 0). ``forward``
returns ``None`` for these, and the value of the rank's own batch otherwise.

This file, and no other, uses private attributes of torchmetrics 1.9: ``_defaults``, ``_reductions``,
``_update_count``, ``_computed``, ``_is_synced`` and ``_wrap_compute``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias, cast

import torch
from typing_extensions import override

from join import Joinable
from join.collectives._torch_private import pytree
from join.transfer import gather_trees
from joinables.adapter import Silent
from joinables.modules import CallInstead, replaced

Contribution: TypeAlias = tuple[int, dict[str, Any]]
"""One rank's number of updates of a metric, and its states by name: a tensor or a list each."""

RankStates: TypeAlias = dict[str, Contribution | None]
"""One rank's contribution to each metric, by name; ``None`` if it has none."""


def is_mergeable(obj: Any) -> bool:
    """Return whether ``obj`` is a ``Metric`` or a ``MetricCollection``, without importing torchmetrics."""
    library = cast("Any", sys.modules.get("torchmetrics"))
    return library is not None and isinstance(obj, (library.Metric, library.MetricCollection))


def joinable_of_metric(metric: torch.nn.Module) -> Joinable | None:
    """Return the joinable that merges a metric when the block ends; ``None`` if the module is not a metric.

    Raises:
        TypeError: If it is a ``MetricTracker``, which keeps the metrics of many epochs.
    """
    library = cast("Any", sys.modules.get("torchmetrics"))
    if library is not None and isinstance(metric, library.MetricTracker):
        raise TypeError(
            f"{type(metric).__name__} keeps the metrics of many epochs, which Join does not merge. List the metric"
            " that it tracks. [J420]"
        )
    return MetricAtEnd(metric) if is_mergeable(metric) else None


def metrics_in(module: torch.nn.Module) -> dict[str, Any]:
    """Return the metrics in ``module``, including itself, by name."""
    library = importlib.import_module("torchmetrics")
    modules = cast("Iterator[tuple[str, Any]]", module.named_modules())
    return {name: part for name, part in modules if isinstance(part, library.Metric)}


class MetricAtEnd(Silent):
    """Joinable that merges a metric's states over all ranks once, when the block ends.

    Args:
        metric: A ``torchmetrics.Metric`` or ``MetricCollection``.
    """

    @override
    def attach(self, join: Any) -> None:
        super().attach(join)
        metrics, compute = metrics_in(self._target), importlib.import_module("torchmetrics").Metric._wrap_compute
        # A metric keeps its value in its cache. Wrappers have no cache: they return the values of the metrics in them.
        self._parts = {name: metric for name, metric in metrics.items() if type(metric)._wrap_compute is compute}
        for metric in metrics.values():
            self._check(metric)
        self._replaced = ExitStack()
        for part in self._parts.values():
            part._computed = None  # after an earlier block it has the value of all ranks
            stand_in = CallInstead(_is_never_available, part.distributed_available_fn)
            self._replaced.enter_context(replaced(part, "distributed_available_fn", stand_in))
        for name in ("update", "forward"):
            stand_in = CallInstead(self._call_on_batch, getattr(self._target, name))
            self._replaced.enter_context(replaced(self._target, name, stand_in))

    @override
    def detach(self) -> None:
        self._replaced.close()
        super().detach()

    def _check(self, metric: Any) -> None:
        name = type(metric).__name__
        if metric.dist_sync_on_step:
            raise ValueError(
                f"{name}(dist_sync_on_step=True) communicates in every forward, which ranks without data never call."
                " Remove that argument: compute() after the block returns the value over all ranks. If each step needs"
                " the value over all ranks, loop over join.iterate, and remove the metric from the list of the Join."
                " [J142]"
            )
        if not metric.compute_with_cache:
            raise ValueError(
                f"{name}(compute_with_cache=False) has no cache for the value over all ranks, which Join stores there."
                " Remove that argument. [J143]"
            )
        if metric._is_synced:
            raise ValueError(
                f"{name} contains the states of all ranks after a call of sync(). Call its unsync() before the block."
                " [J144]"
            )
        if metric._defaults and not any(metric._defaults is part._defaults for part in self._parts.values()):
            raise TypeError(
                f"{name} has states that Join cannot merge over ranks. List the metric that it wraps. [J145]"
            )

    def _call_on_batch(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``update`` or ``forward`` unless the batch is a dummy or has no samples."""
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        first = next(tensors, None)
        is_empty = first is not None and first.ndim > 0 and len(first) == 0
        return None if self._channel.place.step.is_dummy or is_empty else method(*args, **kwargs)

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        contributions = {name: contribution_of(part) for name, part in self._parts.items()}
        total = merged(self._parts, gather_trees(self._collective, contributions), self.join_name)
        with ExitStack() as own:
            for name, contribution in total.items():
                part = self._parts[name]
                own.callback(put, part, part.update_count, part.metric_state)
                put(part, *contribution)
                part._computed = None
            for name in total:
                self._parts[name].compute()
        self._merge_extremes()

    def _merge_extremes(self) -> None:
        """Give a ``MinMaxMetric`` the extremes of all ranks, which it keeps in plain attributes."""
        library = importlib.import_module("torchmetrics")
        for metric in metrics_in(self._target).values():
            if isinstance(metric, library.MinMaxMetric):
                ranks = gather_trees(self._collective, (metric.min_val, metric.max_val))
                lowest, highest = (torch.stack(each).to(metric.device) for each in zip(*ranks, strict=True))
                metric.min_val, metric.max_val = lowest.min(), highest.max()


# -- states -----------------------------------------------------------------------------------------------------------


def contribution_of(part: Any) -> Contribution | None:
    """Return this rank's contribution to a metric; ``None`` without updates if all states have their defaults."""
    state, count = cast("dict[str, Any]", part.metric_state), int(part.update_count)
    if not count and all(_is_same(value, part._defaults[name]) for name, value in state.items()):
        return None  # a state loaded from a checkpoint has no updates either, but differs from the default
    return count, state


def _is_never_available(original: object) -> bool:
    return False


def _is_same(value: Any, default: Any) -> bool:
    if not (isinstance(value, torch.Tensor) and isinstance(default, torch.Tensor)):
        return isinstance(value, list) and not value
    default = default.to(value.device)
    return value.shape == default.shape and bool(((value == default) | ((value != value) & (default != default))).all())


def merged(parts: Mapping[str, Any], ranks: Sequence[RankStates], owner: str) -> dict[str, Contribution]:
    """Merge the contributions of several ranks, by each state's ``dist_reduce_fx``.

    The result has no entry for a metric without any contribution.

    Args:
        parts: The metrics, by name.
        ranks: The contributions, rank by rank.
        owner: The name of the object that has these metrics, for the error.

    Raises:
        ValueError: On all ranks that merge these contributions, if ranks have different metrics.
    """
    if len(set(map(tuple, ranks))) > 1:
        names = "; ".join(f"rank {rank}: {', '.join(contributions)}" for rank, contributions in enumerate(ranks))
        raise ValueError(f"Ranks have different metrics in {owner} ({names}). List the same ones on all ranks. [J146]")
    total: dict[str, Contribution] = {}
    for name, part in parts.items():
        own = [contribution for contributions in ranks if (contribution := contributions[name])]
        if own:
            state = {key: _reduced(part, key, reduction, own) for key, reduction in part._reductions.items()}
            total[name] = max(sum(count for count, _ in own), 1), state
    return total


def _reduced(part: Any, name: str, reduction: Callable[..., Any] | None, ranks: Sequence[Contribution]) -> Any:
    """Merge one state of several ranks; lists are concatenated."""
    utilities = importlib.import_module("torchmetrics.utilities")
    on_cpu = part.compute_on_cpu and isinstance(part._defaults[name], list)
    device = torch.device("cpu") if on_cpu else part.device
    values: list[Any] = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device), [state[name] for _, state in ranks]
    )
    if any(isinstance(value, list) for value in values):
        listed = [item for value in values for item in cast("list[Any]", value if isinstance(value, list) else [value])]
        if reduction is None or reduction is utilities.dim_zero_cat or not listed:
            return listed
        return reduction(listed)
    if reduction is None:
        return torch.stack(values) if len(values) > 1 else values[0]
    if reduction is utilities.dim_zero_cat:
        return reduction(values)
    if reduction is utilities.dim_zero_mean:
        counts = [max(count, 1) for count, _ in ranks]
        return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
    return reduction(torch.stack(values))


def put(part: Any, update_count: int, state: Mapping[str, Any]) -> None:
    """Replace a metric's state and number of updates."""
    for name, value in state.items():
        setattr(part, name, value)
    part._update_count = update_count
