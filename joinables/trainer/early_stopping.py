"""Ending a fit that no longer gets better: :class:`EarlyStopping`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from joinables.trainer.callback import Callback
from joinables.trainer.keywords import checks_keywords
from joinables.trainer.metrics import monitored

if TYPE_CHECKING:
    from joinables.trainer.module import TrainModule
    from joinables.trainer.trainer import Trainer


class EarlyStopping(Callback):
    """Ends the fit when a metric has not improved for some epochs, or is no number any more.

    Args:
        monitor: the metric.
        mode: whether small or large values are good.
        patience: how many epochs without improvement to wait.
        min_delta: what counts as improvement.

    Raises:
        ValueError: if an argument is out of range.
    """

    @checks_keywords
    def __init__(
        self, monitor: str, mode: Literal["min", "max"] = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is neither 'min' nor 'max'")
        if patience < 0 or min_delta < 0:
            raise ValueError(f"patience={patience} and min_delta={min_delta} must not be negative")
        self._monitor, self._sign = monitor, 1 if mode == "min" else -1
        self._patience, self._min_delta = patience, min_delta
        self._best = math.inf
        self._waited = 0

    @property
    @override
    def state_key(self) -> str:
        return f"EarlyStopping({self._monitor})"

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        value = self._sign * monitored(trainer.metrics, self._monitor)
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        if self._waited > self._patience or math.isnan(value):
            trainer.should_stop = True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited = state["best"], state["waited"]
