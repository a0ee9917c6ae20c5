"""Loggers: :class:`CSVLogger`, :class:`TensorBoardLogger`, and the callback :class:`Logs` that calls them.

A logger is any object with ``log_metrics(metrics, step)`` and ``log_hyperparams(params)``. Lightning's loggers are such
objects. Rank 0 calls them.

A row has the number of completed epochs, ``epoch``. A fit that resumes at a step removes rows of later steps and later
epochs, since it writes them again.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from join.files import replacing
from joinables.trainer.metrics import Shown
from joinables.trainer.module import Callback, TrainModule

logger = logging.getLogger("joinables")


class FolderLogger(ABC):
    """Logger that writes into a folder ``version_N``, a new one for each fit that does not resume.

    Args:
        save_dir: The folder that contains the folders; by default ``logs`` in the trainer's ``default_root_dir``.
    """

    def __init__(self, save_dir: str | Path | None = None) -> None:
        self._root = None if save_dir is None else Path(save_dir).absolute()
        self.log_dir: Path | None = None
        """The folder of the last fit."""

    def open(self, root: Path, step: int, epoch: int) -> None:
        """Continue in ``log_dir`` after the given step and number of epochs, or begin a new folder."""
        root = self._root or root / "logs" / type(self).__name__.removesuffix("Logger").lower()
        if self.log_dir is None or self.log_dir.parent != root:
            self.log_dir = next(path for path in (root / f"version_{n}" for n in count()) if not path.exists())
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._open(self.log_dir, step, epoch)

    @abstractmethod
    def _open(self, folder: Path, step: int, epoch: int) -> None: ...

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write values by name."""

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the module's hyperparameters."""


class CSVLogger(FolderLogger):
    """Logger that writes ``metrics.csv``, a row at a time, and ``hparams.json``.

    Args:
        save_dir: The folder that contains the folders of fits; by default ``logs/csv`` in ``default_root_dir``.
    """

    @override
    def _open(self, folder: Path, step: int, epoch: int) -> None:
        rows, columns = self._read()
        kept = [row for row in rows if int(row["step"]) <= step and int(row["epoch"]) <= epoch]
        self._rewrite(kept, columns or ["epoch", "step"])

    @property
    def path(self) -> Path:
        """File of the metrics."""
        assert self.log_dir is not None, "no fit has begun"
        return self.log_dir / "metrics.csv"

    def _read(self) -> tuple[list[dict[str, str]], list[str]]:
        if not self.path.exists():
            return [], []
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            return list(reader), list(reader.fieldnames or ())

    def _rewrite(self, rows: Sequence[Mapping[str, Any]], columns: list[str]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        with replacing(self.path) as file:
            file.write(text.getvalue().encode())
        self._columns = columns

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        row = {"step": step, **metrics}
        if new := [name for name in row if name not in self._columns]:
            self._rewrite(self._read()[0], [*self._columns, *new])
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    @override
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        with replacing(self.path.with_name("hparams.json")) as file:
            file.write(json.dumps(dict(params), indent=2, default=str).encode())


class TensorBoardLogger(FolderLogger):
    """Logger that writes files for TensorBoard, by ``torch.utils.tensorboard``.

    Args:
        save_dir: The folder that contains the folders of fits; by default ``logs/tensorboard`` in ``default_root_dir``.

    Raises:
        ImportError: If tensorboard is not installed.
    """

    def __init__(self, save_dir: str | Path | None = None) -> None:
        super().__init__(save_dir)
        self.experiment: Any = None
        """The ``SummaryWriter`` of the run on rank 0; ``None`` on other ranks and outside runs."""
        try:
            import torch.utils.tensorboard  # pyright: ignore[reportUnusedImport]  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"TensorBoardLogger cannot import torch.utils.tensorboard ({error}). Install it by pip install"
                " tensorboard, or pass logger=CSVLogger() to the Trainer. [J641]"
            ) from error

    @override
    def _open(self, folder: Path, step: int, epoch: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.experiment = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step)
        self.experiment.flush()

    @override
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        for name, value in params.items():
            self.experiment.add_text(f"hyperparameters/{name}", str(value))

    def finalize(self, status: str) -> None:
        """Close the files."""
        self.experiment.close()
        self.experiment = None


def loggers_of(argument: Any, *, has_folder: bool) -> list[Any]:
    """Return the loggers that the argument ``logger=`` of a trainer stands for.

    Raises:
        TypeError: If an object is not a logger.
    """
    if argument in (None, True, False):
        return [CSVLogger()] if argument or (argument is None and has_folder) else []
    loggers = list(cast("Sequence[Any]", argument)) if isinstance(argument, (list, tuple)) else [argument]
    for each in loggers:
        if not (callable(getattr(each, "log_metrics", None)) and callable(getattr(each, "log_hyperparams", None))):
            raise TypeError(
                f"logger={each!r} has no methods log_metrics(metrics, step) and log_hyperparams(params). Pass"
                " CSVLogger(), TensorBoardLogger(), a logger of Lightning, or an object with these methods. [J642]"
            )
    return loggers


class Logs(Callback):
    """Callback that passes metrics to loggers on rank 0: after epochs, after some steps, and after evaluations.

    Args:
        loggers: The loggers.
        every: The number of optimizer steps between values of single steps.
        tells: Whether the path of the log is printed at the end of a fit.
    """

    def __init__(self, loggers: Sequence[Any], every: int, *, tells: bool) -> None:
        self.loggers, self._every, self._tells = loggers, every, tells
        self._logged_step, self._is_open = 0, False

    @override
    def on_start(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.is_global_zero and stage != "predict":
            trainer.run.shown = trainer.run.shown or Shown()

    @override
    def on_train_start(self, trainer: Any, module: TrainModule) -> None:
        self._open(trainer, module)
        # Any rank may write the checkpoint, which has the folders.
        self.load_state_dict(trainer.run.collective.broadcast_object(self.state_dict(), 0, plain=True))

    def _open(self, trainer: Any, module: TrainModule) -> None:
        self._logged_step = trainer.global_step
        if trainer.run.shown is None:
            return
        self._is_open = True
        found: Any = getattr(module, "hparams", None)
        params: Any = vars(found) if found is not None and not isinstance(found, Mapping) else found
        for each in self.loggers:
            if isinstance(each, FolderLogger):
                each.open(trainer.default_root_dir, trainer.global_step, trainer.epochs)
            if params is not None:
                each.log_hyperparams(dict(params))

    @override
    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown, step = trainer.run.shown, trainer.global_step
        if shown is not None and step % self._every == 0 and step != self._logged_step:
            self._logged_step = step
            self._write(
                trainer, {f"{name}_step": float(each.value) for name, each in shown.step.items() if each.logger}
            )

    @override
    def on_train_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        self._write_metrics(trainer)

    @override
    def on_train_end(self, trainer: Any, module: TrainModule) -> None:
        self._write_metrics(trainer)

    @override
    def on_evaluation_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.run.task.stage not in ("fit", "predict"):
            self._open(trainer, module)
            self._write_metrics(trainer)

    def _write_metrics(self, trainer: Any) -> None:
        """Write the metrics that were reduced since the last time."""
        if (shown := trainer.run.shown) is not None:
            self._write(trainer, {name: each.value for name, each in shown.metrics.items() if each.logger})
            shown.metrics.clear()

    def _write(self, trainer: Any, values: dict[str, float]) -> None:
        for each in self.loggers if values else ():
            each.log_metrics({"epoch": trainer.epochs, **values}, trainer.global_step)
            if hasattr(each, "save"):  # Lightning's loggers keep rows until then
                each.save()

    @override
    def on_exception(self, trainer: Any, module: TrainModule, error: BaseException) -> None:
        self._close("failed")

    @override
    def on_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        folders = [str(each.log_dir) for each in self.loggers if self._is_open and getattr(each, "log_dir", None)]
        self._close("success")
        if folders and stage == "fit":
            logger.info("logged to %s", ", ".join(folders))
            if self._tells:
                print(f"Logged to {', '.join(folders)}", file=sys.stderr, flush=True)

    def _close(self, status: str) -> None:
        for each in self.loggers if self._is_open else ():
            if hasattr(each, "finalize"):
                each.finalize(status)
        self._is_open = False

    @override
    def state_dict(self) -> dict[str, Any]:
        own = (each.log_dir if isinstance(each, FolderLogger) else None for each in self.loggers)
        return {"folders": [None if folder is None else str(folder) for folder in own]}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        folders = cast("list[str | None]", state["folders"])
        if len(folders) == len(self.loggers):  # the trainer that wrote the checkpoint may have had others
            for each, folder in zip(self.loggers, folders, strict=True):
                if isinstance(each, FolderLogger):
                    each.log_dir = None if folder is None else Path(folder)
