"""Loggers: :class:`CSVLogger`, and the callback :class:`Logs` that calls the loggers of a run.

A logger is any object with ``log_metrics(metrics, step)`` and ``log_hyperparams(params)``. Lightning's loggers are such
objects. Rank 0 calls them. A log never ends a fit: a logger that raises is not called again, after a warning.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from join.errors import described
from joinables.trainer.files import replacing
from joinables.trainer.module import Callback, TrainModule


class CSVLogger:
    """Logger that writes ``metrics.csv``, a row at a time, and ``hparams.json`` into a folder.

    A fit that begins at a step removes the rows of later steps and epochs, since it writes them again. So a fit that
    resumes continues the file, and one that does not begins it anew: pass a folder of its own for each run.

    Args:
        save_dir: The folder. It is made with the first row.
    """

    def __init__(self, save_dir: str | Path) -> None:
        self._path = Path(save_dir).absolute() / "metrics.csv"
        self._columns: list[str] = []  # of the file; empty before this process has written a row

    def begin(self, step: int, epoch: int) -> None:
        """Remove the rows of later steps and epochs."""
        if self._path.exists():
            self._write_rows(self._rows(step, epoch))

    def _rows(self, step: float = math.inf, epoch: float = math.inf) -> list[dict[str, str]]:
        """Return the rows of the file up to this step and epoch."""
        lines = self._path.read_text(errors="replace").replace("\0", "").splitlines(keepends=True)
        # A machine that lost its power may have left a part of a line.
        rows = csv.DictReader(line for line in lines if line.endswith("\n"))
        return [row for row in rows if _number(row, "step") <= step and _number(row, "epoch") <= epoch]

    def _write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO()
        self._columns = list(dict.fromkeys(["epoch", "step", *(name for row in rows for name in row)]))
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as file:
            file.write(text.getvalue().encode())

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row; the file is complete after each row."""
        row = {**metrics, "step": step}
        if not row.keys() <= set(self._columns):
            self._write_rows([*(self._rows() if self._path.exists() else ()), row])
        else:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``hparams.json``."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path.with_name("hparams.json")) as file:
            file.write(json.dumps({str(name): value for name, value in params.items()}, indent=2, default=str).encode())


def _number(row: Mapping[str, str], column: str) -> float:
    """Return a whole number of a row; NaN if the row is damaged."""
    text = row.get(column) or ""
    return int(text) if text.isdecimal() else math.nan


def loggers_of(argument: Any) -> list[Any]:
    """Return the loggers of a trainer's argument ``logger``.

    Raises:
        TypeError: If an object is not a logger.
    """
    if argument is None or argument is False:
        return []
    loggers = list(cast("Sequence[Any]", argument)) if isinstance(argument, (list, tuple)) else [argument]
    for each in loggers:
        if not (callable(getattr(each, "log_metrics", None)) and callable(getattr(each, "log_hyperparams", None))):
            raise TypeError(
                f"logger={each!r} has no methods log_metrics(metrics, step) and log_hyperparams(params). Pass"
                " CSVLogger(folder), a logger of Lightning, or an object with these methods. [J642]"
            )
    return loggers


class Logs(Callback):
    """Callback that passes metrics to loggers on rank 0, after epochs and evaluations.

    Args:
        loggers: The loggers.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self.loggers = loggers
        self._open = list[Any]()  # the loggers of this run on rank 0 that have not raised

    def setup(self, trainer: Any, module: TrainModule, stage: str) -> None:
        """Log the hyperparameters."""
        self._open = list(self.loggers) if trainer.is_global_zero and stage != "predict" else []
        if isinstance(params := getattr(module, "hparams", None), Mapping):
            self._each(lambda logger: logger.log_hyperparams(cast("Any", params)))

    def _each(self, call: Callable[[Any], object]) -> None:
        """Call a function with each logger. A logger that raises is not called again in this run."""
        for each in list(self._open):
            try:
                call(each)
            except Exception as error:
                self._open.remove(each)
                warnings.warn(
                    f"{type(each).__name__} logs no more metrics of this run, since it raised {described(error)}. If it"
                    " cannot write its folder, pass one in which you may write.",
                    stacklevel=2,
                )

    def on_train_start(self, trainer: Any, module: TrainModule) -> None:
        """Have files continue at the step where the fit begins."""

        def begin(each: Any) -> None:
            if isinstance(each, CSVLogger):
                each.begin(trainer.global_step, trainer.epochs)

        self._each(begin)

    def on_train_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        """Log the metrics of the epoch."""
        # The counters of a log have these names.
        names = {"epoch": "epoch_logged", "step": "step_logged"}
        row = {names.get(name, name): value for name, value in trainer.run.latest.items()}

        def write(each: Any) -> None:
            each.log_metrics({**row, "epoch": trainer.epochs}, trainer.global_step)
            if hasattr(each, "save"):  # Lightning's loggers keep rows until then
                each.save()

        if row:
            self._each(write)
        trainer.run.latest.clear()

    on_train_end = on_train_epoch_end  # with values of hooks, or of an epoch that max_steps has ended

    def on_validation_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        """Log the metrics of an evaluation by itself."""
        if trainer.run.task.stage != "fit":
            self.on_train_epoch_end(trainer, module)

    on_test_epoch_end = on_validation_epoch_end

    def teardown(self, trainer: Any, module: TrainModule, stage: str) -> None:
        """Tell loggers that the run has ended."""
        status = "failed" if sys.exc_info()[0] else "success"

        def end(each: Any) -> None:
            if hasattr(each, "finalize"):
                each.finalize(status)

        self._each(end)
        self._open = []
