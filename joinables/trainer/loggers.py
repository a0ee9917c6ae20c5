"""Loggers: :class:`CSVLogger`, and the callback :class:`Reports` that calls the loggers of a run.

A logger is any object with ``log_metrics(metrics, step)`` and ``log_hyperparams(params)``. Lightning's loggers are such
objects. Rank 0 calls them. A log never ends a fit: a logger that raises is not called again, after a warning.
"""

from __future__ import annotations

import builtins
import csv
import io
import json
import math
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from typing_extensions import override

from join.errors import described
from joinables.trainer.arguments import listed
from joinables.trainer.files import replacing
from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.output import screen


class CSVLogger:
    """Logger that writes ``metrics.csv``, a row at a time, and ``hparams.json`` into a folder.

    A fit that begins at a step removes the rows of later steps and epochs, since it writes them again. So a fit that
    resumes continues the file, and any other fit replaces it: pass a different folder for each run.

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
        # A row of a single step, which has no epoch, is written before the step counts.
        done = [row for row in rows if _number(row, "step") <= (step if row.get("epoch") else step - 1)]
        return [row for row in done if _number(row, "epoch") <= epoch]

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
    """Return a whole number of a row, 0 if the row has none, such as one of a step; NaN if the row is damaged."""
    text = row.get(column)
    return 0 if text == "" else int(text) if text and text.isdecimal() else math.nan


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


_PAUSE = 0.2  # seconds between two pictures; each waits for the device, since it shows the loss


class Reports(Callback):
    """Callback that shows metrics on the screen, and passes them to loggers, on rank 0.

    The screen has a line for each epoch and each evaluation. While batches run, the line has their number, the loss of
    this rank, and the number of ranks with data, and is written again in place. At the end, it has the metrics.

    Args:
        loggers: The loggers.
        shows: Whether a person looks at the screen.
    """

    def __init__(self, loggers: Sequence[Any], shows: bool) -> None:
        self._loggers, self._shows = loggers, shows
        self._open = list[Any]()  # the loggers of this run on rank 0 that have not raised
        self._width, self._next_picture = 0, 0.0  # of the line on the screen that will be written again

    @property
    @override
    def state_key(self) -> str:
        return "joinables.trainer.loggers.Reports"  # the user's own class may be called Reports, too

    def setup(self, trainer: Any, module: TrainModule, stage: str) -> None:
        """Log the hyperparameters."""
        self._open = list(self._loggers) if trainer.global_rank == 0 and stage != "predict" else []
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
        step, epoch = trainer.global_step, trainer.epochs
        self._each(lambda each: each.begin(step, epoch) if isinstance(each, CSVLogger) else None)

    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show the number of batches, at most a few times a second."""
        lengths, done, now = trainer.run.plan.lengths, batch_idx + 1, time.monotonic()
        if not self._shows or trainer.global_rank != 0 or (done != lengths[0] and now < self._next_picture):
            return
        self._next_picture = now + _PAUSE
        count = lengths[0] if None in lengths else max(lengths)
        parts = [f"Epoch {trainer.current_epoch + 1}: {done} of {count} batches"]
        loss: Any = cast("dict[str, Any]", outputs).get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            parts += [f"loss={loss.item():.4g}"]
        if len(lengths) > 1 and None not in lengths:
            ends = done == lengths[0] < max(lengths)  # no hook runs here while rank 0 shadows
            left = sum(length > batch_idx + ends for length in lengths)
            parts += [f"{'waits for ' * ends}{left} of {len(lengths)} ranks"]
        columns = shutil.get_terminal_size().columns  # a longer line could not be written again
        self._write(", ".join(parts)[: columns - 1], "")

    def on_train_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        """Report the metrics of the epoch."""
        self._report(trainer, f"Epoch {trainer.current_epoch + 1}")

    def on_train_end(self, trainer: Any, module: TrainModule) -> None:
        """Log metrics of the last hooks, or of an epoch that ``max_steps`` has ended."""
        self._report(trainer, "")

    def on_validation_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        """Report the metrics of an evaluation by itself."""
        if (stage := trainer.run.task.stage) != "fit":  # the report of the epoch has the metrics of its validation
            self._report(trainer, stage)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def teardown(self, trainer: Any, module: TrainModule, stage: str) -> None:
        """Tell loggers that the run has ended, and end the line of an epoch that did not end."""
        status = "failed" if sys.exc_info()[0] else "success"
        self._each(lambda each: each.finalize(status) if hasattr(each, "finalize") else None)
        self._open = []
        if self._width:  # the run has raised, or max_steps has ended it within an epoch
            self._write("", "\n")

    def _report(self, trainer: Any, title: str) -> None:
        latest, names = trainer.run.latest, {"epoch": "epoch_logged", "step": "step_logged"}
        if title and self._shows and trainer.global_rank == 0:
            self._write(f"{title}: {', '.join(f'{name}={value:.4g}' for name, value in latest.items())}", "\n")
        # The counters of a log are called epoch and step.
        row = {names.get(name, name): value for name, value in latest.items()}

        def write(each: Any) -> None:
            each.log_metrics({**row, "epoch": trainer.epochs}, trainer.global_step)
            if hasattr(each, "save"):  # Lightning's loggers keep rows until then
                each.save()

        if row:
            self._each(write)
        latest.clear()

    def _write(self, text: str, end: str) -> None:
        print("\r" * bool(self._width) + text.ljust(self._width), end=end, file=screen(), flush=True)
        self._width = 0 if end else len(text)
