"""The states of metrics of torchmetrics: a rank's contributions, and how those of several ranks are merged.

Private attributes of torchmetrics 1.9 are used in this folder and nowhere else: ``_defaults``, ``_reductions``,
``_update_count``, ``_computed``, ``_is_synced``, ``_wrap_compute`` and, of a collection, ``_enable_compute_groups``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

from join.collectives._torch_private import pytree

Contribution: TypeAlias = tuple[int, dict[str, Any]]
"""One rank's number of updates, and its states by name: a tensor or a list each."""

Contributions: TypeAlias = dict[str, Contribution | None]
"""One rank's contribution to each metric, by name; ``None`` where it has none."""


def contributions(parts: Mapping[str, Any]) -> Contributions:
    """This rank's contributions."""
    return {name: _contribution(part) for name, part in parts.items()}


def merged(parts: Mapping[str, Any], ranks: Sequence[Contributions | None], where: str) -> Contributions:
    """Merge the contributions of several ranks, by each state's ``dist_reduce_fx``.

    Args:
        parts: the metrics, by name.
        ranks: the contributions, rank by rank; ``None`` for a rank that gives none.
        where: the name of the object that has these metrics, for the error.

    Raises:
        ValueError: on all ranks that merge the same, if these hold different metrics.
    """
    given = {rank: each for rank, each in enumerate(ranks) if each is not None}
    if len(set(map(tuple, given.values()))) > 1:
        names = "; ".join(f"rank {rank}: {', '.join(each)}" for rank, each in given.items())
        raise ValueError(f"ranks hold different metrics in {where}. {names}; list the same ones on all ranks [J146]")
    return {
        name: _merged(part, [found for each in given.values() if (found := each[name])]) for name, part in parts.items()
    }


def put(part: Any, update_count: int, state: Mapping[str, Any]) -> None:
    """Replace a metric's state and number of updates."""
    for name, value in state.items():
        setattr(part, name, value)
    part._update_count = update_count


def _merged(part: Any, ranks: Sequence[Contribution]) -> Contribution | None:
    if not ranks:
        return None
    state = {
        name: _reduced(reduction, ranks, name, _device(part, name)) for name, reduction in part._reductions.items()
    }
    return max(sum(count for count, _ in ranks), 1), state


def _contribution(part: Any) -> Contribution | None:
    """This rank's contribution; ``None`` if it has no update and its states are the defaults."""
    state = cast("dict[str, Any]", part.metric_state)
    count = int(part.update_count)
    if not count and all(_is_same(value, part._defaults[name]) for name, value in state.items()):
        return None  # a state that was loaded from a checkpoint has no updates either, and is not the default
    return count, state


def _is_same(value: Any, default: Any) -> bool:
    if not (isinstance(value, torch.Tensor) and isinstance(default, torch.Tensor)):
        return isinstance(value, list) and not value
    default = default.to(value.device)
    return value.shape == default.shape and bool(((value == default) | ((value != value) & (default != default))).all())


def _device(part: Any, name: str) -> torch.device:
    return torch.device("cpu") if part.compute_on_cpu and isinstance(part._defaults[name], list) else part.device


def _reduced(
    reduction: Callable[..., Any] | None, ranks: Sequence[Contribution], name: str, device: torch.device
) -> Any:
    """Merge one state of several ranks; lists are concatenated."""
    utilities = importlib.import_module("torchmetrics.utilities")
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
