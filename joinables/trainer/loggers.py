"""Loggers: :class:`CSVLogger`, and the callback :class:`Logs` that calls the loggers of a run.

A logger is any object with ``log_metrics(metrics, step)`` and ``log_hyperparams(params)``. Lightning's loggers are such
objects. Rank 0 calls them. A log never ends a fit: a logger that raises is not called again, after a warning.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from join.errors import described
from joinables.trainer.files import replacing
from joinables.trainer.metrics import Shown
from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.output import screen


class CSVLogger:
    """Logger that writes ``metrics.csv``, a row at a time, and ``hparams.json`` into a folder ``version_N``.

    Each fit that does not resume has a new folder.

    Args:
        save_dir: The folder that contains the folders; by default ``logs/csv`` in the trainer's ``default_root_dir``.
    """

    def __init__(self, save_dir: str | Path | None = None) -> None:
        self._root = None if save_dir is None else Path(save_dir).absolute()
        self._made: list[Path] = []  # the folders that the last fit has made, each before its parent
        self.log_dir: Path | None = None
        """The folder of the last fit; ``None`` if that has logged nothing."""

    def open(self, default: Path, step: int, epoch: int) -> Path:
        """Return ``log_dir``, to continue there after this step and number of epochs, or a new folder."""
        root = self._root or default / "logs" / "csv"
        if self.log_dir is not None and self.log_dir.parent == root:
            self._make(self.log_dir)
        else:
            self.log_dir = next(filter(self._make, (root / f"version_{n}" for n in count())))
        self._path, self._begin, self._columns = self.log_dir / "metrics.csv", (step, epoch), list[str]()
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

    def _rows(self) -> list[dict[str, str]]:
        """Return the rows of the file. Before the first row of a fit, these are the rows that the fit continues."""
        if not self._path.exists():
            return []
        step, epoch = (math.inf, math.inf) if self._columns else self._begin
        lines = self._path.read_text(errors="replace").replace("\0", "").splitlines(keepends=True)
        # A machine that lost its power may have left a part of a line.
        rows = csv.DictReader(line for line in lines if line.endswith("\n"))
        return [row for row in rows if _number(row, "step") <= step and _number(row, "epoch") <= epoch]

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
            file.write(json.dumps({str(name): value for name, value in params.items()}, indent=2, default=str).encode())


def _number(row: Mapping[str, str], column: str) -> float:
    """Return a whole number of a row; infinity if the row is damaged."""
    text = row.get(column) or ""
    return int(text) if text.isdecimal() else math.inf


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
                " CSVLogger(), a logger of Lightning, or an object with these methods. [J642]"
            )
    return loggers


class Logs(Callback):
    """Callback that passes metrics to loggers on rank 0: after epochs, after some steps, and after evaluations.

    Args:
        loggers: The loggers.
        every: The number of optimizer steps between values of single steps; 0 for none.
    """

    def __init__(self, loggers: Sequence[Any], every: int) -> None:
        self.loggers, self._every, self._logged_step = loggers, every, 0
        self._open = list[Any]()  # the loggers of this run on rank 0 that have not raised

    @override
    def on_start(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.is_global_zero and stage != "predict":
            trainer.run.shown = trainer.run.shown or Shown()

    @override
    def on_train_start(self, trainer: Any, module: TrainModule) -> None:
        self._begin(trainer, module)
        # Any rank may write a checkpoint, which has the folders.
        self.load_state_dict(trainer.run.collective.broadcast_object(self.state_dict(), 0, plain=True))

    def _begin(self, trainer: Any, module: TrainModule) -> None:
        self._logged_step = trainer.global_step
        self._open = [] if trainer.run.shown is None else list(self.loggers)
        params = getattr(module, "hparams", None)

        def begin(each: Any) -> None:
            if isinstance(each, CSVLogger):
                each.open(trainer.default_root_dir, trainer.global_step, trainer.epochs)
            if isinstance(params, Mapping):
                each.log_hyperparams(cast("Any", params))

        self._each(begin)

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

    @override
    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self._open and self._every and step % self._every == 0 and step != self._logged_step:
            self._logged_step, values = step, trainer.run.shown.step
            self._write(trainer, {each.name: float(each.value) for each in values.values() if each.logger})

    @override
    def on_train_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        if self._open:
            metrics = trainer.run.shown.metrics
            self._write(trainer, {name: each.value for name, each in metrics.items() if each.logger})
            metrics.clear()

    on_train_end = on_train_epoch_end  # with values of hooks, or of an epoch that max_steps has ended

    @override
    def on_evaluation_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.run.task.stage not in ("fit", "predict"):
            self._begin(trainer, module)
            self.on_train_epoch_end(trainer, module)

    def _write(self, trainer: Any, values: dict[str, float]) -> None:
        # The counters of a log have these names.
        named = {f"{name}_logged" if name in ("epoch", "step") else name: value for name, value in values.items()}

        def write(each: Any) -> None:
            each.log_metrics({**named, "epoch": trainer.epochs}, trainer.global_step)
            if hasattr(each, "save"):  # Lightning's loggers keep rows until then
                each.save()

        if values:
            self._each(write)

    @override
    def on_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        status = "failed" if sys.exc_info()[0] else "success"

        def end(each: Any) -> None:
            if hasattr(each, "finalize"):
                each.finalize(status)
            if isinstance(each, CSVLogger):
                each.tidy()
            if stage == "fit" and (folder := getattr(each, "log_dir", None)) is not None:
                print(f"Logged to {folder}", file=screen(), flush=True)

        self._each(end)
        self._open = []

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"folders": [str(each.log_dir or "") if isinstance(each, CSVLogger) else "" for each in self.loggers]}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for each, folder in zip(self.loggers, state["folders"], strict=False):  # an earlier trainer may have had others
            if isinstance(each, CSVLogger):
                each.log_dir = Path(folder) if folder else None
