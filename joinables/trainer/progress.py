"""Progress of a run on a terminal or in a notebook: :class:`ProgressBar`."""

from __future__ import annotations

import builtins
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch
from typing_extensions import override

from joinables.trainer.metrics import Metric, Shown
from joinables.trainer.module import Callback, TrainModule

_PAUSE = 0.2  # seconds between two pictures; each waits for the device, since it shows the loss


def is_watched() -> bool:
    """Return whether a person may look at stderr: it is a terminal, or this is a notebook."""
    return hasattr(builtins, "__IPYTHON__") or (cast("Any", sys.stderr) is not None and sys.stderr.isatty())


class ProgressBar(Callback):
    """Callback that shows a bar for each epoch and each evaluation on rank 0, with metrics and the ranks with data.

    The bar of an epoch stays on the screen, with the metrics of the epoch. Without tqdm, only a line for each epoch
    and each evaluation is printed.
    """

    def __init__(self) -> None:
        self._bars: list[Any] = []  # that of an epoch, and that of its validation
        self._total: int | None = None
        self._next_picture = 0.0

    @override
    def on_start(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.is_global_zero:
            trainer.run.shown = trainer.run.shown or Shown()

    @override
    def on_train_batch_start(self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if trainer.run.shown is not None and not self._bars:
            self._begin(trainer, _title(trainer), batch_idx)

    @override
    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = trainer.run.shown
        if shown is None or not self._is_due(batch_idx):
            return
        logged = [(name, value) for name, (value, is_chosen, _) in shown.step.items() if is_chosen]
        values: dict[str, Any] = dict(logged) or {name: each.value for name, each in shown.step.items()}
        loss = cast("dict[str, Any]", outputs).get("loss") if isinstance(outputs, dict) else outputs
        if not values and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            values = {"loss": loss.detach()}
        text = _text({name: float(value) for name, value in values.items()})
        self._draw(batch_idx + 1, text, _ranks(trainer, batch_idx))

    @override
    def on_train_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        if (shown := trainer.run.shown) is not None:
            if not self._bars:  # without batches on this rank
                self._begin(trainer, _title(trainer), 0)
            self._end(_title(trainer), _chosen(shown.metrics))

    @override
    def on_evaluation_start(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.run.shown is not None:
            self._begin(trainer, stage, 0, leave=trainer.run.task.stage != "fit")

    @override
    def on_evaluation_batch_end(
        self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, stage: str
    ) -> None:
        if trainer.run.shown is not None and self._is_due(batch_idx):
            self._draw(batch_idx + 1)

    @override
    def on_evaluation_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if (shown := trainer.run.shown) is not None:
            is_part = trainer.run.task.stage == "fit"
            self._end("" if is_part else stage, "" if is_part else _chosen(shown.metrics))

    @override
    def on_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        while self._bars:  # the run has raised, or max_steps has ended it within an epoch
            self._end("", "")

    # -- bars ---------------------------------------------------------------------------------------------------------

    def _begin(self, trainer: Any, title: str, done: int, *, leave: bool = True) -> None:
        self._total, self._next_picture = trainer.run.shown.lengths[0], 0.0
        self._bars.append(_bar(title, self._total, done, leave=leave))

    def _is_due(self, index: int) -> bool:
        """Return whether a picture is drawn after this batch; the last one always is."""
        return self._bars[-1] is not None and (index + 1 == self._total or time.monotonic() >= self._next_picture)

    def _draw(self, done: int, *parts: str) -> None:
        bar, self._next_picture = self._bars[-1], time.monotonic() + _PAUSE
        bar.n = done
        bar.set_postfix_str(", ".join(filter(None, parts)))  # draws

    def _end(self, title: str, text: str) -> None:
        """End the last bar with a text; without bars, print the text as a line."""
        if (bar := self._bars.pop()) is None:
            if title:
                print(f"{title}: {text}", file=sys.stderr, flush=True)
            return
        if title:
            bar.set_postfix_str(text)
        bar.close()


def _bar(title: str, total: int | None, done: int, *, leave: bool) -> Any:
    """Return a new bar; ``None`` if tqdm is not installed."""
    try:
        plain = cast("Any", import_module("tqdm")).tqdm
    except ImportError:
        return None
    # No thread that draws, since a process with threads cannot be forked safely.
    kind: Any = type("Bar", (plain,), {"monitor_interval": 0})
    kind.set_lock(threading.RLock())  # the default is a semaphore between processes
    return kind(desc=title, total=total, initial=done, leave=leave, unit=" batches", dynamic_ncols=True, file=sys.stderr)


def _title(trainer: Any) -> str:
    of = trainer.max_epochs
    return f"Epoch {trainer.current_epoch + 1}" + (f" of {of}" if of not in (None, -1) else "")


def _ranks(trainer: Any, index: int) -> str:
    """Return how many ranks have more than ``index`` batches; empty if that is not known, or there is one rank."""
    lengths = trainer.run.shown.lengths
    if len(lengths) == 1 or None in lengths:
        return ""
    return f"{sum(length > index for length in lengths)} of {len(lengths)} ranks"


def _chosen(metrics: Mapping[str, Metric]) -> str:
    """Return the metrics as text; if some are for progress bars, only these."""
    chosen = {name: each.value for name, each in metrics.items() if each.prog_bar}
    return _text(chosen or {name: each.value for name, each in metrics.items()})


def _text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:.4g}" for name, value in values.items())
