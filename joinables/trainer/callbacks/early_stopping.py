"""Ending a fit that no longer gets better: :class:`EarlyStopping`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from joinables.trainer.callbacks.base import Callback
from joinables.trainer.keywords import checks_keywords
from joinables.trainer.loops.metrics import monitored

if TYPE_CHECKING:
    from joinables.trainer.module import TrainModule
    from joinables.trainer.trainer import Trainer


logger = logging.getLogger("joinables")


class EarlyStopping(Callback):
    """Ends the fit when a metric has not improved for some epochs, or is NaN.

    A fit that was ended stays ended: a second one, or one from its last checkpoint, does not train, and a warning says
    so. With more patience, or without this callback, it goes on.

    Args:
        monitor: the metric.
        mode: whether small or large values are good.
        patience: after how many epochs in a row without improvement to stop; 0 is the same as 1.
        min_delta: the smallest change that counts as an improvement.

    Raises:
        ValueError: if an argument is out of range.
    """

    @checks_keywords
    def __init__(
        self, monitor: str, mode: Literal["min", "max"] = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is neither 'min' nor 'max' [J193]")
        if patience < 0 or min_delta < 0:
            raise ValueError(f"patience={patience} and min_delta={min_delta} must not be negative [J194]")
        self._monitor, self._sign = monitor, 1 if mode == "min" else -1
        self._patience, self._min_delta = patience, min_delta
        self._best = self._latest = math.inf
        self._waited = 0

    @property
    @override
    def state_key(self) -> str:
        return f"EarlyStopping({self._monitor})"

    @property
    def _is_over(self) -> bool:
        """Whether the metric has not improved for ``patience`` epochs, or is NaN."""
        return self._waited >= max(self._patience, 1) or math.isnan(self._latest)

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._is_over:
            trainer.should_stop = True
            if trainer.is_global_zero:
                logger.warning(
                    "%s has ended this fit after %d epochs; to go on, give it more than patience=%d, or leave it out",
                    self.state_key,
                    trainer.current_epoch,
                    self._patience,
                )

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        value = self._sign * monitored(trainer.metrics, self._monitor)
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._latest = value
        if self._is_over:
            trainer.should_stop = True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited, "latest": self._latest}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited, self._latest = state["best"], state["waited"], state["latest"]
