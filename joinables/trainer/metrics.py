"""Metrics that do not depend on the number of processes: :class:`MetricStore`.

A logged value is the mean over a batch; the metric of an epoch is the mean over all samples of all ranks. Sums of
floating-point numbers usually depend on their order, and thus on the distribution of batches over ranks. The sums in
this module do not: each is a few floats that represent it exactly, and it is rounded once, at the end. One NaN makes
any metric NaN, even a minimum or maximum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from typing_extensions import override

from join.collectives import Collective

_MOST_ON_DEVICE = 256  # numbers that wait on an accelerator before they are fetched
Reduction: TypeAlias = Literal["mean", "sum", "min", "max"]


def monitored(metrics: Mapping[str, float], monitor: str | None) -> float:
    """Return the metric that a callback or a scheduler monitors.

    Raises:
        ValueError: If the metric was not logged.
    """
    if monitor is None or monitor not in metrics:
        raise ValueError(f"{monitor=} was not logged. Use one of {', '.join(sorted(metrics))}. [J242]")
    return metrics[monitor]


def exact_sum(values: Sequence[float]) -> list[float]:
    """Return a few floats whose exact sum equals the sum of ``values``: the rounded sum, then the rounding errors."""
    if not all(map(math.isfinite, values)):
        return [sum(values)]  # the result is infinite or NaN in any order
    parts: list[float] = []
    try:
        while rest := math.fsum([*values, *(-part for part in parts)]):
            parts.append(rest)
    except OverflowError:  # a partial sum is out of range
        return [math.nan]
    return parts


@dataclass
class Metric:
    """One metric of an epoch, so far.

    Attributes:
        reduce_fx: The reduction of the values to one.
        parts: The exact sum of the values (times weights for a mean); for a minimum or maximum, the value so far.
        weight: The sum of the weights.
    """

    reduce_fx: Reduction
    parts: list[float] = field(default_factory=list[float])
    weight: float = 0.0

    @property
    def value(self) -> float:
        """Reduction of all recorded values; NaN without any."""
        total = math.fsum(self.parts)
        if self.reduce_fx == "mean":
            return total / self.weight if self.weight else math.nan
        return total if self.parts or self.reduce_fx == "sum" else math.nan


class MetricStore(dict[str, Metric]):
    """The metrics of one epoch on this rank, by name.

    Numbers on an accelerator stay there until many of them are fetched at once, since a rank that reads one waits until
    its device has finished all its work.
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_device = defaultdict[Any, list[tuple[str, torch.Tensor, float]]](list)
        """By device and dtype, with names and weights."""

    @override
    def clear(self) -> None:
        super().clear()
        self._on_device.clear()

    def _fetch(self) -> None:
        """Add the numbers that are still on a device: one host synchronisation for each device and dtype."""
        waiting = dict(self._on_device)
        self._on_device.clear()
        for entries in waiting.values():
            numbers = cast("list[float]", torch.stack([number for _, number, _ in entries]).tolist())
            for number, (name, _, weight) in zip(numbers, entries, strict=True):
                self.record(name, number, weight, self[name].reduce_fx)

    def _add(self, name: str, reduce_fx: Reduction, parts: Sequence[float], weight: float) -> None:
        metric = self.setdefault(name, Metric(reduce_fx))
        if metric.reduce_fx != reduce_fx or reduce_fx not in get_args(Reduction):
            raise ValueError(
                f"Metric {name!r} was logged with {reduce_fx=}, which is unknown or differs from its previous"
                f" {metric.reduce_fx!r}. Use the same reduce_fx each time: 'mean', 'sum', 'min' or 'max'. [J244]"
            )
        values = [*metric.parts, *parts]
        metric.weight += weight
        if reduce_fx in ("mean", "sum"):
            metric.parts = exact_sum(values)
        elif values:
            pick = min if reduce_fx == "min" else max
            metric.parts = [math.nan if any(map(math.isnan, values)) else pick(values)]

    def record(self, name: str, value: float | torch.Tensor, weight: float, reduce_fx: Reduction = "mean") -> None:
        """Add a value with its weight; the other arguments are those of ``TrainModule.log``."""
        if isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.numel() == 1:
            self._add(name, reduce_fx, [], 0.0)  # raises now if reduce_fx is wrong
            # The caller may change the tensor in place later.
            waiting = self._on_device[value.device, value.dtype]
            waiting.append((name, value.detach().reshape(()).clone(), weight))
            if len(waiting) == _MOST_ON_DEVICE:
                self._fetch()
            return
        try:
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"Metric {name!r} was logged as an object of type {type(value).__name__}, which is not one number"
                f" ({error}). Pass a number or a tensor with one element, such as value.mean(). Of a metric object, log"
                " the result. [J594]"
            ) from error
        self._add(name, reduce_fx, [number * weight if reduce_fx == "mean" else number], weight)

    def reduce(self, collective: Collective) -> dict[str, float]:
        """Return the metrics over all ranks, by name; one object all-gather. A rank may have no metrics."""
        merged = MetricStore()
        for state in collective.all_gather_object(self.state_dict(), plain=True):
            merged.merge(state)
        return {name: metric.value for name, metric in sorted(merged.items())}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the values in another store's ``state_dict``."""
        for name, fields in state.items():
            self._add(name, **fields)

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics as plain data."""
        self._fetch()
        return {name: asdict(metric) for name, metric in self.items()}
