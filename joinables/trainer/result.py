"""What a run comes back with: :class:`Result`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from join import JoinReport


@dataclass(frozen=True)
class Result:
    """One run's result; immutable, and the same whether the processes were started here or by a launcher.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        epochs: how many epochs were completed, over all fits.
        global_step: how many optimizer steps were made, over all fits.
        callback_metrics: the latest value of every metric.
        metrics: those of this validation or test.
        callbacks: the callbacks' states, by ``state_key``.
        best_model_path: the best checkpoint's file; empty if none was kept.
        best_model_score: its metric; ``None`` if none was monitored.
        predictions: of a prediction, the batches' outputs in the order of the data set.
        join_report: steps, shadowed steps and idle time by rank in the last epoch; ``None`` before any.
        stopped: whether a callback ended the fit.
        state: everything that a fit resumes from (``joinables.trainer.checkpoints.snapshot``), on its way to the
            trainer, which keeps it; ``None`` in what ``Trainer.fit`` returns.
    """

    stage: str
    epochs: int
    global_step: int
    callback_metrics: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    callbacks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    best_model_path: str = ""
    best_model_score: float | None = None
    predictions: tuple[Any, ...] | None = None
    join_report: JoinReport | None = None
    stopped: bool = False
    state: Mapping[str, Any] | None = None
