"""Metrics that do not depend on the number of processes: :class:`MetricStore`.

A logged value is the mean over a batch; the metric of an epoch is the mean over all samples of all ranks. Sums of
floating-point numbers depend on their order, and so on which rank had which batch. The sums here do not: they are kept
without rounding, as a few floats whose exact sum they are, and rounded once, at the end. One NaN makes any metric NaN,
also a minimum or maximum.

Source: J. R. Shewchuk, Adaptive Precision Floating-Point Arithmetic (1997), as used by ``math.fsum``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch

from join.collectives import Collective

Reduction: TypeAlias = Literal["mean", "sum", "min", "max"]


def monitored(metrics: Mapping[str, float], monitor: str | None) -> float:
    """Return the metric that a callback or a scheduler monitors; one that was not logged is a ``ValueError``."""
    if monitor is None or monitor not in metrics:
        raise ValueError(
            f"monitor={monitor!r} was not logged; the metrics are {', '.join(sorted(metrics)) or 'none'} [J242]"
        )
    return metrics[monitor]


def add_exactly(partials: Sequence[float], value: float) -> list[float]:
    """Add a float to a sum that is kept without rounding error.

    Args:
        partials: the sum so far, as floats that do not overlap: each is smaller than the last digit of the next.
        value: one that is not finite makes the sum not finite, whatever comes before or after it.

    Returns:
        The new sum, in the same form.
    """
    if not math.isfinite(value):
        return [*partials, value]
    kept: list[float] = []
    for partial in partials:
        if not math.isfinite(partial):
            kept.append(partial)
            continue
        if abs(value) < abs(partial):
            value, partial = partial, value
        high = value + partial
        low = partial - (high - value)
        if low:
            kept.append(low)
        value = high
    return [*kept, value]


def rounded_sum(partials: Sequence[float]) -> float:
    """The sum that :func:`add_exactly` keeps, rounded once."""
    try:
        return math.fsum(partials)
    except (ValueError, OverflowError):  # inf - inf, or a partial sum beyond the range
        return math.nan


@dataclass
class Metric:
    """One metric of an epoch, so far.

    Attributes:
        reduce_fx: how values become one.
        partials: for a mean or a sum, the exact sum of values (times weights).
        weight: for a mean, the sum of weights.
        extreme: for the minimum or maximum, the value so far.
        last: the latest value.
        prog_bar: whether the progress bar shows it.
        logger: whether it goes into files.
        on_step: whether single values go into files.
    """

    reduce_fx: Reduction
    partials: list[float] = field(default_factory=list[float])
    weight: float = 0.0
    extreme: float | None = None
    last: float = math.nan
    prog_bar: bool = False
    logger: bool = True
    on_step: bool = False

    def add(self, value: float, weight: float) -> None:
        """Record a value with its weight."""
        self.last = value
        if self.reduce_fx in ("mean", "sum"):
            self.partials = add_exactly(self.partials, value * weight if self.reduce_fx == "mean" else value)
            self.weight += weight
        else:
            self.extreme = self._pick(value)

    def merge(self, other: Metric) -> None:
        """Add what another rank has recorded."""
        if other.reduce_fx != self.reduce_fx:
            raise ValueError(
                f"reduce_fx={other.reduce_fx!r} on one rank and {self.reduce_fx!r} on another; log it alike on all"
                " ranks [J243]"
            )
        for partial in other.partials:
            self.partials = add_exactly(self.partials, partial)
        self.weight += other.weight
        if other.extreme is not None:
            self.extreme = self._pick(other.extreme)

    def _pick(self, value: float) -> float:
        """The smaller or the larger one of ``extreme`` and ``value``; NaN if one of them is."""
        if self.extreme is None or math.isnan(value):
            return value
        pick = min if self.reduce_fx == "min" else max
        return self.extreme if math.isnan(self.extreme) else pick(self.extreme, value)

    @property
    def value(self) -> float:
        """All recorded values reduced to one; NaN without any."""
        if self.extreme is not None:
            return self.extreme
        total = rounded_sum(self.partials)
        if self.reduce_fx == "sum":
            return total
        return total / self.weight if self.weight else math.nan


class MetricStore:
    """The metrics of one epoch on this rank.

    Attributes:
        metrics: by name.
        singles: the values of the batch at hand, for files; the loop over the batches empties it after each.
        reduced: the reduced metrics of the epoch, for files; the loop over the epochs empties it after each.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.singles: dict[str, float] = {}
        self.reduced: dict[str, float] = {}

    def record(
        self, name: str, value: float | torch.Tensor, weight: float, reduce_fx: Reduction = "mean", **options: Any
    ) -> None:
        """Add a value; arguments as of ``TrainModule.log``, with the value's weight."""
        if reduce_fx not in get_args(Reduction):
            raise ValueError(
                f"reduce_fx={reduce_fx!r} of metric {name!r} is none of {', '.join(get_args(Reduction))} [J244]"
            )
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"metric {name!r} has {value.numel()} elements; log a number [J245]")
            value = float(value.detach())
        metric = self.metrics.get(name)
        if metric is None:
            metric = self.metrics[name] = Metric(reduce_fx, **options)
        if metric.reduce_fx != reduce_fx:
            raise ValueError(
                f"metric {name!r} was logged with reduce_fx={metric.reduce_fx!r} before; log it in the same way each"
                " time [J246]"
            )
        metric.add(float(value), weight)
        if metric.on_step and metric.logger:
            self.singles[name] = metric.last

    def reduce(self, collective: Collective) -> dict[str, float]:
        """Return the metrics over all ranks, by name: one object all-gather. A rank without data may have none."""
        merged = MetricStore()
        for part in collective.all_gather_object(self.state_dict()):
            merged.merge(part)
        values = {name: metric.value for name, metric in sorted(merged.metrics.items())}
        self.reduced.update({name: value for name, value in values.items() if merged.metrics[name].logger})
        return values

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what another store has recorded, as its ``state_dict`` says."""
        for name, values in state.items():
            if name in self.metrics:
                self.metrics[name].merge(Metric(**values))
            else:
                self.metrics[name] = Metric(**values)

    def state_dict(self) -> dict[str, Any]:
        """What was recorded, as plain data."""
        return {name: asdict(metric) for name, metric in self.metrics.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was recorded."""
        self.metrics = {name: Metric(**values) for name, values in state.items()}
