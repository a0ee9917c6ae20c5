"""Metrics of torchmetrics over uneven ranks: :class:`Metric`.

Inside the block a metric is local: ``update``, ``forward`` and ``compute`` communicate nothing, so ranks may call them
as often as they like. When the block ends, on all ranks alike, whatever they did in it::

    active or joined rank
    ---------------------
    all-gathers of all ranks' states and numbers of updates
    on its own: reduce them, compute the value, keep it, and take back its own state

The value over all samples of all ranks is kept where torchmetrics keeps what it has computed: ``compute()`` after the
block returns it, without communication, until the next ``update`` or ``reset``. The state that is left is the rank's
own, as after torchmetrics' own synchronisation. So no sample counts twice: not in a second block without ``reset``, nor
in an ``update`` between two blocks.

A dummy of ``Join.iterate`` is skipped, and so is a batch without samples (the first tensor given has length 0);
``forward`` returns ``None`` for it. Not done: values over all ranks of single batches, which would come between the forward and the
backward of the model and hold up both. ``forward`` returns the rank's own.

Here, and nowhere else, private attributes of torchmetrics 1.9 are used: which states a metric has and how they are
reduced (``_defaults``, ``_reductions``), ``_update_count``, ``_computed``, ``_is_synced`` and ``_wrap_compute``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from typing_extensions import override

from join import Join, JoinHook
from join.transfer import gather_trees
from joinables.stand_in import Silent

Contribution = tuple[int, dict[str, Any]]
"""One rank's number of updates, and its states by name: a tensor or a list each."""


def is_metric(module: torch.nn.Module) -> bool:
    """Whether ``module`` is one of torchmetrics; that is never imported for it."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(module, (library.Metric, library.MetricCollection, library.MetricTracker))


class Metric(Silent, JoinHook):
    """Merges a metric's states over all ranks once, when the block ends. A block that raises merges nothing.

    States are merged by their ``dist_reduce_fx``, without those of ranks that have seen nothing; ``"mean"`` weighs each
    rank by its number of updates, as torchmetrics does from one update to the next.

    Args:
        metric: a ``torchmetrics.Metric`` or ``MetricCollection``.

    Raises:
        TypeError: if it is none.
    """

    def __init__(self, metric: Any) -> None:
        super().__init__(metric)
        library = cast("Any", sys.modules.get("torchmetrics"))
        if library is None or not isinstance(metric, (library.Metric, library.MetricCollection)):
            raise TypeError(
                f"metric is a {type(metric).__name__}; give a torchmetrics.Metric or MetricCollection, and of a"
                " MetricTracker the metrics in it"
            )
        self._library = library

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        modules = self._target.named_modules()
        metrics = {name: each for name, each in modules if isinstance(each, self._library.Metric)}
        # What is no part passes on what the metrics inside it compute.
        self._parts = {name: each for name, each in metrics.items() if self._keeps_value(each)}
        for each in metrics.values():
            self._check(each)
        self._replaced = ExitStack()
        for part in self._parts.values():
            part._computed = None  # the last block's value is not this rank's
            self._replace(part, "distributed_available_fn", _Local(part.distributed_available_fn))
        for name in ("update", "forward"):
            self._replace(self._target, name, _WithSamples(getattr(self._target, name), join))

    @override
    def detach(self) -> None:
        self._replaced.close()
        super().detach()

    def _check(self, metric: Any) -> None:
        name = type(metric).__name__
        if metric.dist_sync_on_step:
            raise ValueError(
                f"dist_sync_on_step=True of {name} communicates in every forward, where ranks without data never come;"
                " leave it out, and compute() after the block is over all ranks"
            )
        if not metric.compute_with_cache:
            raise ValueError(
                f"compute_with_cache=False of {name}: this cache is where the value over all ranks is kept after the"
                " block; leave it out"
            )
        if metric._is_synced:
            raise ValueError(f"{name} holds the states of all ranks after sync(); call its unsync() before the block")
        if metric._defaults and not any(metric._defaults is each._defaults for each in self._parts.values()):
            raise TypeError(f"{name} has states that cannot be merged over ranks; list the metric that it wraps")

    def _keeps_value(self, metric: Any) -> bool:
        """Whether ``compute`` of ``metric`` keeps its value, as it does unless a wrapper does without."""
        return type(metric)._wrap_compute is self._library.Metric._wrap_compute

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        if name in vars(owner):
            self._replaced.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._replaced.callback(delattr, owner, name)
        setattr(owner, name, value)

    # -- the end of the block -----------------------------------------------------------------------------------------

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        mine = {name: _contribution(part) for name, part in self._parts.items()}
        ranks = gather_trees(self._collective, mine)
        if len({tuple(rank) for rank in ranks}) > 1:
            names = "; ".join(f"rank {rank}: {', '.join(each)}" for rank, each in enumerate(ranks))
            raise ValueError(f"ranks hold different metrics in {self.join_name}. {names}")
        with ExitStack() as own:
            merged: list[Any] = []
            for name, part in self._parts.items():
                contributions = [contribution for rank in ranks if (contribution := rank[name]) is not None]
                if contributions:
                    own.callback(_put, part, part.metric_state, part.update_count or _Elsewhere())
                    state = {
                        key: _reduced(reduction, contributions, key, _device(part, key))
                        for key, reduction in part._reductions.items()
                    }
                    _put(part, state, max(sum(count for count, _ in contributions), 1))
                    part._computed = None
                    merged.append(part)
            for part in merged:
                part.compute()


class _Elsewhere(int):
    """An update count of 0 where other ranks' updates were merged: ``compute`` has something to return."""

    def __gt__(self, other: int) -> bool:
        return other <= 0


class _Local:
    """What a metric in a block is told about being distributed: it is not. A copy of the metric is in no block."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _itself, (self._original,)


class _WithSamples:
    """A method of a metric, for batches that have samples. A copy of the metric is in no block and has its own."""

    def __init__(self, method: Callable[..., Any], join: Join) -> None:
        self._method, self._join = method, join

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._join.shadowing:
            return None
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        first = next(tensors, None)
        if first is not None and first.ndim and not len(first):
            return None
        return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _itself, (self._method,)


def _itself(obj: Any) -> Any:
    return obj


def _put(part: Any, state: dict[str, Any], update_count: int) -> None:
    for name, value in state.items():
        setattr(part, name, value)
    part._update_count = update_count


def _contribution(part: Any) -> Contribution | None:
    """This rank's part of a merge; ``None`` if it has seen nothing."""
    state = cast("dict[str, Any]", part.metric_state)
    count = int(part.update_count)
    if not count and all(_is_same(value, part._defaults[name]) for name, value in state.items()):
        return None  # but a state that was loaded from a checkpoint has no updates, and is something
    return count, state


def _is_same(value: Any, default: Any) -> bool:
    if not (isinstance(value, torch.Tensor) and isinstance(default, torch.Tensor)):
        return isinstance(value, list) and not value
    default = default.to(value.device)
    return value.shape == default.shape and bool(((value == default) | ((value != value) & (default != default))).all())


def _device(part: Any, name: str) -> torch.device:
    return torch.device("cpu") if part.compute_on_cpu and isinstance(part._defaults[name], list) else part.device


def _reduced(
    reduction: Callable[..., Any] | None, contributions: Sequence[Contribution], name: str, device: torch.device
) -> Any:
    """Reduce one state over the ranks that have something; what is a list stays one."""
    utilities = importlib.import_module("torchmetrics.utilities")
    values: list[Any] = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device), [state[name] for _, state in contributions]
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
        counts = [max(count, 1) for count, _ in contributions]
        return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
    return reduction(torch.stack(values))
