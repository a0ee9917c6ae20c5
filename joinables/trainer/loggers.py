"""Loggers: :class:`CSVLogger`, :class:`Screen`, and :class:`Log`, which calls the loggers of a run.

A logger is any object with ``log_metrics(metrics, step)`` and ``log_hyperparams(params)``. Lightning's loggers are such
objects. Rank 0 calls them. A log never ends a fit: a logger that raises is not called again, after a warning.
"""

from __future__ import annotations

import builtins
import csv
import io
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from join.errors import described
from joinables.trainer.arguments import listed
from joinables.trainer.files import replacing


class CSVLogger:
    """Logger that writes ``metrics.csv``, a row at a time, and ``hparams.json`` into a folder.

    Rows are added to a file that exists, so pass a different folder for each run. If a fit resumes from a checkpoint
    that is older than the last rows, it writes these rows again: of values of one step, the last one counts. With a
    different number of processes, steps have other numbers, so resume into a different folder.

    Args:
        save_dir: The folder. It is made with the first row.
    """

    def __init__(self, save_dir: str | Path) -> None:
        self._path = Path(save_dir).absolute() / "metrics.csv"
        self._columns: list[str] = []  # of the file; empty before this process has written a row

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row; the file is complete after each row."""
        row = {**metrics, "step": step}
        columns, self._columns = self._columns, []  # a full disk may leave a part of a row
        if row.keys() <= set(columns):
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, columns).writerow(row)
            self._columns = columns
            return
        lines = self._path.read_text(errors="replace").splitlines(keepends=True) if self._path.exists() else []
        # A machine that lost its power may have left a part of a line, or zeros.
        rows = [*csv.DictReader(line.replace("\0", "") for line in lines if line.endswith("\n")), row]
        self._columns = list(dict.fromkeys(["epoch", "step", *(name for row in rows for name in row)]))
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as file:
            file.write(text.getvalue().encode())

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``hparams.json``."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path.with_name("hparams.json")) as file:
            file.write(json.dumps({str(name): value for name, value in params.items()}, indent=2, default=str).encode())


class Screen:
    """Logger that shows a line for each epoch and each evaluation on stderr."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Show a line."""
        values = ", ".join(f"{name}={value:.4g}" for name, value in metrics.items() if name != "epoch")
        print(f"Epoch {metrics['epoch']}, step {step}: {values}", file=sys.stderr, flush=True)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Show nothing: the user has just written them."""


def loggers_of(argument: Any) -> list[Any]:
    """Return the loggers of a trainer's argument ``logger``.

    Raises:
        TypeError: If an object is not a logger.
    """
    for each in (loggers := listed(argument)):
        if not (callable(getattr(each, "log_metrics", None)) and callable(getattr(each, "log_hyperparams", None))):
            raise TypeError(
                f"logger={each!r} has no methods log_metrics(metrics, step) and log_hyperparams(params). Pass"
                " CSVLogger(folder), a logger of Lightning, or an object with these methods. [J642]"
            )
    return loggers


def is_watched() -> bool:
    """Return whether a person may look at stderr: it is a terminal, or this is a notebook."""
    return hasattr(builtins, "__IPYTHON__") or (cast("Any", sys.stderr) is not None and sys.stderr.isatty())


class Log:
    """Metrics of a run on their way to loggers. A logger that raises is not called again in the run.

    Args:
        loggers: The loggers on rank 0; none on other ranks.

    Attributes:
        latest: The metrics that the loggers have not received.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._open = list(loggers)
        self.latest: dict[str, float] = {}

    def begin(self, params: Any) -> None:
        """Log the hyperparameters, if a module has a mapping of them."""
        if isinstance(params, Mapping):
            self._each(lambda logger: logger.log_hyperparams(cast("Any", params)))

    def write(self, trainer: Any, module: Any = None) -> None:
        """Log the metrics of an epoch and its validation, of the last hooks, or of an evaluation by itself."""
        # The counters of a log are called epoch and step.
        names = {"epoch": "epoch_logged", "step": "step_logged"}
        row = {names.get(name, name): value for name, value in self.latest.items()}

        def write(each: Any) -> None:
            each.log_metrics({**row, "epoch": trainer.epochs}, trainer.global_step)
            if hasattr(each, "save"):  # Lightning's loggers keep rows until then
                each.save()

        if row:
            self._each(write)
        self.latest.clear()

    on_train_epoch_end = on_train_end = write
    is_last = False

    def end(self, status: str) -> None:
        """Tell loggers that the run has ended."""
        self._each(lambda each: each.finalize(status) if hasattr(each, "finalize") else None)

    def _each(self, call: Callable[[Any], object]) -> None:
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
