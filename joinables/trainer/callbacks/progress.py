"""A progress bar, drawn by tqdm: :class:`ProgressBar`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from joinables.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from joinables.trainer.module import TrainModule
    from joinables.trainer.trainer import Trainer


class ProgressBar(Callback):
    """A progress bar on rank 0, of its batches: no rank has more, where the trainer deals them out.

    Args:
        disable: whether to show none; ``None`` shows it on a terminal only, and not in log files and pipes.

    Raises:
        ImportError: if tqdm is not installed.
    """

    def __init__(self, disable: bool | None = None) -> None:
        _tqdm()
        self._disable = disable
        self._bar: Any = None  # on rank 0, while batches are counted

    @override
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        total = None if trainer.plan is None else trainer.plan.lengths[0]
        self._open(trainer, f"epoch {trainer.current_epoch}", total)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._advance(trainer)

    @override
    def on_evaluation_start(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self._bar is None:
            self._open(trainer, stage, None)

    @override
    def on_evaluation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, stage: str
    ) -> None:
        if stage == trainer.run.task.stage:  # not the validation within an epoch
            self._advance(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._bar is not None:
            self._bar.set_postfix({name: f"{value:.4g}" for name, value in trainer.metrics.items()})
        self._close()

    @override
    def on_end(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._close()

    def _open(self, trainer: Trainer, what: str, total: int | None) -> None:
        self._close()
        if trainer.is_global_zero:
            self._bar = _tqdm()(total=total, desc=what, unit="batch", dynamic_ncols=True, disable=self._disable)

    def _advance(self, trainer: Trainer) -> None:
        """Count a batch, and show the values that were logged last."""
        if self._bar is not None:
            self._bar.update(1)
            latest = trainer.latest
            if latest:
                self._bar.set_postfix({name: f"{value:.4g}" for name, value in latest.items()}, refresh=False)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _tqdm() -> Any:
    try:
        return importlib.import_module("tqdm").tqdm
    except ImportError as error:
        raise ImportError("the progress bar needs tqdm: pip install tqdm [J196]") from error
