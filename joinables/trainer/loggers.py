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
import math
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from joinables.trainer.files import replacing
from joinables.trainer.metrics import Shown
from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.output import screen


class FolderLogger:
    """Logger that writes into a folder ``version_N``, a new one for each fit that does not resume.

    Args:
        save_dir: The folder that contains the folders; by default in ``logs`` in the trainer's ``default_root_dir``.
    """

    def __init__(self, save_dir: str | Path | None = None) -> None:
        self._root = None if save_dir is None else Path(save_dir).absolute()
        self._made: list[Path] = []  # the folders that the last fit has made, each before its parent
        self.log_dir: Path | None = None
        """The folder of the last fit; ``None`` if that has logged nothing."""

    def open(self, default: Path, step: int, epoch: int) -> Path:
        """Return ``log_dir``, to continue there after this step and number of epochs, or a new folder."""
        root = self._root or default / "logs" / type(self).__name__.removesuffix("Logger").lower()
        if self.log_dir is not None and self.log_dir.parent == root:
            self._make(self.log_dir)
        else:
            self.log_dir = next(filter(self._make, (root / f"version_{n}" for n in count())))
        return self.log_dir

    def _make(self, folder: Path) -> bool:
        """Make a folder, unless it exists, and return whether it is new, and thus of no other run."""
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            return False
        return True

    def tidy(self) -> None:
        """Remove the folders that the fit has made, if it has logged nothing."""
        with suppress(OSError):  # a folder is not empty
            for folder in self._made:
                folder.rmdir()
                self.log_dir = None


class CSVLogger(FolderLogger):
    """Logger that writes ``metrics.csv``, a row at a time, and ``hparams.json``.

    Args:
        save_dir: The folder that contains the folders of fits; by default ``logs/csv`` in ``default_root_dir``.
    """

    @override
    def open(self, default: Path, step: int, epoch: int) -> Path:
        folder = super().open(default, step, epoch)
        self._path, self._begin, self._columns = folder / "metrics.csv", (step, epoch), list[str]()
        return folder

    def _rows(self) -> list[dict[str, str]]:
        """Return the rows of the file. Before the first row of a fit, these are the rows that the fit continues."""
        if not self._path.exists():
            return []
        step, epoch = (math.inf, math.inf) if self._columns else self._begin
        with self._path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if int(row["step"]) <= step and int(row["epoch"]) <= epoch]

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row; the file is complete after each row."""
        row = {**metrics, "step": step}
        if not row.keys() <= set(self._columns):
            rows, text = self._rows(), io.StringIO()
            self._columns = list(dict.fromkeys(["epoch", "step", *(rows or [{}])[0], *metrics]))
            writer = csv.DictWriter(text, self._columns)
            writer.writeheader()
            writer.writerows(rows)
            with replacing(self._path) as file:
                file.write(text.getvalue().encode())
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``hparams.json``."""
        with replacing(self._path.with_name("hparams.json")) as file:
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
    def open(self, default: Path, step: int, epoch: int) -> Path:
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = super().open(default, step, epoch)
        self.experiment = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        return folder

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a point of each curve, and flush."""
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step)
        self.experiment.flush()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write a text for each."""
        for name, value in params.items():
            self.experiment.add_text(f"hyperparameters/{name}", str(value))

    def finalize(self, status: str) -> None:
        """Close the files."""
        self.experiment = self.experiment.close()


def loggers_of(argument: Any) -> list[Any]:
    """Return the loggers of a trainer's argument ``logger``.

    Raises:
        TypeError: If an object is not a logger.
    """
    if argument is None or isinstance(argument, bool):
        return [] if argument is False else [CSVLogger()]
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
        every: The number of optimizer steps between values of single steps; 0 for none.
        may_fail: Whether the run continues without a log, after a warning, if the log cannot be written.
    """

    def __init__(self, loggers: Sequence[Any], every: int, *, may_fail: bool) -> None:
        self.loggers, self._every, self._may_fail = loggers, every, may_fail
        self._logged_step, self._is_open = 0, False

    @override
    def on_start(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.is_global_zero and stage != "predict":
            trainer.run.shown = trainer.run.shown or Shown()

    @override
    def on_train_start(self, trainer: Any, module: TrainModule) -> None:
        self._open(trainer, module)
        # Any rank may write a checkpoint, which has the folders.
        self.load_state_dict(trainer.run.collective.broadcast_object(self.state_dict(), 0, plain=True))

    def _open(self, trainer: Any, module: TrainModule) -> None:
        self._logged_step, self._is_open = trainer.global_step, trainer.run.shown is not None
        params = getattr(module, "hparams", None)
        with self._failing():
            for each in self.loggers if self._is_open else ():
                if isinstance(each, FolderLogger):
                    each.open(trainer.default_root_dir, trainer.global_step, trainer.epochs)
                if isinstance(params, Mapping):
                    cast("Any", each).log_hyperparams(params)

    @contextmanager
    def _failing(self) -> Generator[None]:
        """Return a context that ends the log, with a warning, if the log may fail and cannot be written."""
        try:
            yield
        except OSError as error:
            if not self._may_fail:
                raise
            warnings.warn(
                f"The metrics of this run are not logged, since {error}. Pass default_root_dir= to the Trainer with a"
                " folder in which you may write, or logger=False.",
                stacklevel=2,
            )
            self.loggers = list[Any]()

    @override
    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self._is_open and self._every and step % self._every == 0 and step != self._logged_step:
            self._logged_step, values = step, trainer.run.shown.step
            self._write(trainer, {each.name: float(each.value) for each in values.values() if each.logger})

    @override
    def on_train_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        if self._is_open:
            metrics = trainer.run.shown.metrics
            self._write(trainer, {name: each.value for name, each in metrics.items() if each.logger})
            metrics.clear()

    on_train_end = on_train_epoch_end  # with values of hooks, or of an epoch that max_steps has ended

    @override
    def on_evaluation_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.run.task.stage not in ("fit", "predict"):
            self._open(trainer, module)
            self.on_train_epoch_end(trainer, module)

    def _write(self, trainer: Any, values: dict[str, float]) -> None:
        with self._failing():
            for each in self.loggers if values else ():
                each.log_metrics({**values, "epoch": trainer.epochs}, trainer.global_step)
                if hasattr(each, "save"):  # Lightning's loggers keep rows until then
                    each.save()

    @override
    def on_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        for each in self.loggers if self._is_open else ():
            if hasattr(each, "finalize"):
                each.finalize("failed" if sys.exc_info()[0] else "success")
            if isinstance(each, FolderLogger):
                each.tidy()
            if stage == "fit" and (folder := getattr(each, "log_dir", None)) is not None:
                print(f"Logged to {folder}", file=screen(), flush=True)
        self._is_open = False

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"folders": [str(each.log_dir or "") if isinstance(each, FolderLogger) else "" for each in self.loggers]}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for each, folder in zip(self.loggers, state["folders"], strict=False):  # an earlier trainer may have had others
            if isinstance(each, FolderLogger):
                each.log_dir = Path(folder) if folder else None
