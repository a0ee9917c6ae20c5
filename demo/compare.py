"""Comparison of a distributed run with the run of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from demo.data import load
from demo.record import Record, flat_buffers, flat_parameters
from demo.train import Digits
from joinables.trainer import Trainer


@dataclass(frozen=True)
class Outcome:
    """One distributed run, compared with the reference.

    Attributes:
        status: ``"finished"``, ``"hangs"`` or ``"fails"``. The other attributes are set only if it is ``"finished"``.
        parameter_difference: the largest difference of a parameter at the end, over all ranks.
        buffer_difference: the same for BatchNorm's running statistics.
        accuracy: on the validation images, of rank 0's model.
        losses: the mean loss of the ranks that had a batch, by step.
        drift: the largest difference of a parameter on these ranks, by step.
        reports: the ``join.report`` of each epoch, as a dict.
    """

    status: str
    parameter_difference: float | None = None
    buffer_difference: float | None = None
    accuracy: float | None = None
    losses: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)


def compare(ranks: Sequence[Record] | str, reference: Record, reports: Sequence[dict[str, Any]] = ()) -> Outcome:
    """Compare the records of the ranks with the reference; ``ranks`` is a status if the run did not finish."""
    if isinstance(ranks, str):
        return Outcome(ranks)
    losses: list[float] = []
    drift: list[float] = []
    for step, expected in reference["snapshots"].items():
        active = [rank for rank in ranks if step in rank["losses"]]
        losses.append(sum(rank["losses"][step] for rank in active) / len(active))
        drift.append(max((rank["snapshots"][step] - expected).abs().max().item() for rank in active))
    alone, *models = [Digits() for _ in (reference, *ranks)]
    for model, record in zip((alone, *models), (reference, *ranks), strict=True):
        model.load_state_dict(record["state"])
    parameters, buffers = flat_parameters(alone), flat_buffers(alone)
    return Outcome(
        status="finished",
        parameter_difference=max((flat_parameters(model) - parameters).abs().max().item() for model in models),
        buffer_difference=max((flat_buffers(model) - buffers).abs().max().item() for model in models),
        accuracy=Trainer(accelerator="cpu", logger=False).validate(models[0], DataLoader(load()[1], 64))[0]["accuracy"],
        losses=losses,
        drift=drift,
        reports=list(reports),
    )
