"""How far a distributed run is from the run of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from demo.data import Digits
from demo.model import accuracy, build, flat_buffers, flat_parameters
from demo.reference import Reference
from demo.train import RankResult


@dataclass(frozen=True)
class Outcome:
    """One distributed run beside the reference.

    Attributes:
        status: ``"finished"``, ``"hangs"`` or ``"fails"``; without ``"finished"`` there is nothing else.
        parameter_difference: the largest difference of a parameter in the end, over all ranks.
        buffer_difference: the same for BatchNorm's running statistics.
        accuracy: on the validation images, of rank 0's model.
        losses: the mean loss of the ranks that had a batch, by step.
        drift: the largest difference of a parameter on these ranks, by step.
        reports: what ``join.report`` said, by epoch.
    """

    status: str
    parameter_difference: float | None = None
    buffer_difference: float | None = None
    accuracy: float | None = None
    losses: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)


def compare(ranks: Sequence[RankResult] | str, reference: Reference, digits: Digits) -> Outcome:
    """Compare what the ranks brought back (or what became of them) with the reference."""
    if isinstance(ranks, str):
        return Outcome(ranks)
    losses: list[float] = []
    drift: list[float] = []
    for step, expected in enumerate(reference.snapshots):
        active = [rank for rank in ranks if step in rank.losses]
        losses.append(sum(rank.losses[step] for rank in active) / len(active))
        drift.append(max((rank.snapshots[step] - expected).abs().max().item() for rank in active))
    models = [build() for _ in ranks]
    for model, rank in zip(models, ranks, strict=True):
        model.load_state_dict(rank.state)
    parameters, buffers = flat_parameters(reference.model), flat_buffers(reference.model)
    return Outcome(
        status="finished",
        parameter_difference=max((flat_parameters(model) - parameters).abs().max().item() for model in models),
        buffer_difference=max((flat_buffers(model) - buffers).abs().max().item() for model in models),
        accuracy=accuracy(models[0], digits.validation_images, digits.validation_labels),
        losses=losses,
        drift=drift,
        reports=[report.to_dict() for report in ranks[0].reports],
    )
