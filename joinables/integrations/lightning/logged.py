"""Logged values and torchmetrics of a ``LightningModule``: :class:`LoggedValues`, :func:`metrics_of`.

The values of dummies, often NaN, do not enter the reductions::

    reduction     rank with data          dummy
    ---------     --------------          -----
    mean, step    value * weight, weight  0, 0
    mean, epoch   sum, samples            0, 0
    sum           value                   0
    max, min      value                   -inf, inf
    none          value                   the previous value; nothing, if there was none

The mean over ranks in a step has the weights of their gradients, so it equals the value of a single process.

A step may log a value only for some batches, such as a loss for each class. So all ranks reduce the values of a
training step together at its end. If the keys of a rank have changed, they agree on the keys before that. They agree
again when an epoch or an evaluation ends. A rank that has not logged a key takes part as a dummy does.

Metrics are merged over all ranks when a block ends. So no metric communicates by itself, a rank without updates takes
part, and states may be lists of any length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from typing_extensions import override

from join.collectives import collective_of
from join.collectives._torch_private import pytree
from joinables.integrations.lightning.blocks import Blocks
from joinables.integrations.lightning.names import ResultCollection
from joinables.metrics import MetricAtEnd, is_mergeable, metrics_in
from joinables.modules import replaced

_Description: TypeAlias = list[Any]
"""Key of a value that all ranks reduce, and its arguments of ``log``, in a form that ranks exchange."""


class LoggedValues(ResultCollection):
    """Collection of the values that one loop has logged; it replaces Lightning's own.

    Args:
        training: Whether the loop trains.
        blocks: The trainer's blocks.
        strategy: The trainer's strategy.
    """

    def __init__(self, training: bool, blocks: Blocks, strategy: Any) -> None:
        super().__init__(training)
        self._blocks, self._strategy = blocks, strategy
        self._of_step: dict[str, float] = {}  # keys to reduce at the end of the step, with the weights of their values
        # The descriptions of this rank's keys in the last step, and of all ranks' keys.
        self._own: list[_Description] = []
        self._all: list[_Description] = []
        self._last: dict[str, torch.Tensor] = {}  # the values of all ranks in the last step that had any
        self._adds = False  # whether a value is added that only other ranks have

    @override
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        logged = cast("Any", self[key])
        sync, in_step = logged.meta.sync, self.training and self._blocks.in_step
        if in_step and logged.is_tensor and logged.meta.on_step and sync.should and not sync.rank_zero_only:
            weight = self._blocks.weight if logged.meta.is_mean_reduction else 1.0
            self._of_step[key] = 0.0 if self._blocks.is_dummy else weight
        with replaced(self._blocks, "in_step", True), ExitStack() as undo:
            if self._adds or key in self._of_step:  # it is reduced later
                undo.enter_context(replaced(sync, "_fn", _unchanged))
            if not (self._blocks.is_dummy and logged.is_tensor):
                super().update_metrics(key, value, batch_size)
            elif sync.should:
                super().update_metrics(key, _nothing(value, logged.meta), 0)
            elif not logged.update_called:
                logged.has_reset = True  # the metric has no value

    # -- what all ranks reduce ----------------------------------------------------------------------------------------

    def have_changed(self) -> bool:
        """Return whether this rank reduces other keys in this step than in the last one."""
        before, self._own = self._own, [self._description(key) for key in sorted(self._of_step)]
        return self._own != before

    def reduce_step(self, *, changed: bool) -> None:
        """Reduce the values of a training step; all ranks call this at its end.

        Args:
            changed: Whether any rank reduces other keys than in the last step.
        """
        if changed:
            self._all = self._agree(self._own)
        elif self._all != self._own:
            self._add(self._all)
        weights, self._of_step = self._of_step, {}
        metrics = {key: cast("Any", self[key]) for key, *_ in self._all}
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            chosen = {key: each for key, each in metrics.items() if _op(each.meta) == op}
            if chosen:
                rows = torch.stack([_row(each, weights.get(key, 0.0)) for key, each in chosen.items()])
                dist.all_reduce(rows, op)
                for (key, each), (value, weight) in zip(chosen.items(), rows, strict=True):
                    if each.meta.is_mean_reduction:
                        value = value / weight
                    value = (-value if each.meta.is_min_reduction else value).to(each.value.dtype)
                    value = torch.where(weight > 0, value, self._last.get(key, value))  # of no rank, or only dummies
                    self._last[key] = each._forward_cache = value
                    if not each.meta.on_epoch:
                        each.value = value

    def agree(self) -> None:
        """Take part in the reductions of all ranks; all ranks call this when an epoch or an evaluation ends."""
        own = [
            self._description(key)
            for key, each in self.valid_items()
            if each.is_tensor and each.meta.on_epoch and each.meta.sync.should
        ]
        if (descriptions := self._agree(own)) != own:  # they are reduced in one order
            reduced = [key for key, *_ in descriptions]
            others = [key for key in cast("list[str]", list(self)) if key not in reduced]
            for key in reduced + others:
                self[key] = self.pop(key)  # to the end

    def _agree(self, own: list[_Description]) -> list[_Description]:
        """Return the descriptions of all ranks, and add the values that only other ranks have."""
        ranks: list[list[_Description]] = collective_of(None).all_gather_object(own, plain=True)
        if all(each == own for each in ranks):
            return own
        known = {description[0]: description for rank in ranks for description in rank}
        descriptions = [known[key] for key in sorted(known)]
        self._add([description for description in descriptions if description not in own])
        return descriptions

    def _add(self, descriptions: list[_Description]) -> None:
        """Log values that change no reduction."""
        nothing = torch.zeros((), device=self._strategy.root_device)
        for key, fx, name, loader, adds_loader, *flags, reduce_fx in descriptions:
            if key in self._of_step:
                continue
            how = {"sync_dist": True, "sync_dist_fn": self._strategy.reduce, "add_dataloader_idx": adds_loader}
            adding = replaced(self, "_adds", True), replaced(self._blocks, "is_dummy", True)
            with adding[0], adding[1], replaced(self, "dataloader_idx", loader):
                self.log(fx, name, nothing, *flags, reduce_fx, **how, batch_size=0)

    def _description(self, key: str) -> _Description:
        meta = cast("Any", self[key]).meta
        fx = meta.fx if meta.dataloader_idx is None else meta.fx.removesuffix(f".{meta.dataloader_idx}")
        flags = [meta.add_dataloader_idx, meta.prog_bar, meta.logger, meta.on_step, meta.on_epoch]
        return [key, fx, meta.name, meta.dataloader_idx, *flags, meta.reduce_fx.__name__]


def _unchanged(value: torch.Tensor, **_: Any) -> torch.Tensor:
    return value


def _op(meta: Any) -> Any:
    return dist.ReduceOp.MAX if meta.is_max_reduction or meta.is_min_reduction else dist.ReduceOp.SUM


def _row(logged: Any, weight: float) -> torch.Tensor:
    """Return a value of this rank and its weight, as numbers whose sum or maximum over ranks is reduced."""
    value = logged._forward_cache.double()
    if logged.meta.is_mean_reduction:
        value = value * weight if weight else torch.zeros_like(value)
    return torch.stack([-value if logged.meta.is_min_reduction else value, torch.full_like(value, weight)])


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
        if not self._channel.place.step.is_dummy or method.__name__ == "update":
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
    for part in metrics_in(twin).values():
        part.distributed_available_fn = bool  # which returns False: the other ranks have no twin
    return twin
