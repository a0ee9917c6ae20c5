"""Metrics in files: :class:`CSVMetrics`, and :class:`TensorBoardMetrics` where TensorBoard is installed."""

from __future__ import annotations

import csv
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from joinables.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from joinables.trainer.module import TrainModule
    from joinables.trainer.trainer import Trainer


class MetricFiles(Callback):
    """Writes the metrics of each epoch on rank 0, and those with ``on_step`` after each batch, too.

    Only metrics that were logged in that epoch or batch are written, and none that were logged with ``logger=False``.
    """

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and trainer.run.store.singles:
            self._write(trainer, {f"{name}_step": value for name, value in trainer.run.store.singles.items()})

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero:
            self._write(trainer, trainer.run.store.reduced)

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero and trainer.run.store.reduced:
            self._write(trainer, trainer.run.store.reduced)

    def _write(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Write the values of metrics, by name, for the present step."""
        raise NotImplementedError


class CSVMetrics(MetricFiles):
    """Appends to a CSV file with the columns ``epoch, step, name, value``.

    Args:
        path: the file; by default ``metrics.csv`` in the trainer's ``default_root_dir``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else Path(path).absolute()

    @override
    def _write(self, trainer: Trainer, values: dict[str, float]) -> None:
        path = self._path or trainer.default_root_dir / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:  # it is new
                writer.writerow(("epoch", "step", "name", "value"))
            for name, value in values.items():
                writer.writerow((trainer.current_epoch, trainer.global_step, name, repr(value)))


class TensorBoardMetrics(MetricFiles):
    """Writes event files for TensorBoard.

    Args:
        folder: the folder; by default ``tensorboard`` in the trainer's ``default_root_dir``.

    Raises:
        ImportError: if TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder).absolute()
        self._writer: Any = None
        _summary_writer()

    @override
    def _write(self, trainer: Trainer, values: dict[str, float]) -> None:
        if self._writer is None:
            self._writer = _summary_writer()(str(self._folder or trainer.default_root_dir / "tensorboard"))
        for name, value in values.items():
            self._writer.add_scalar(name, value, trainer.global_step)

    @override
    def on_end(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _summary_writer() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoardMetrics needs TensorBoard: pip install tensorboard [J195]") from error
