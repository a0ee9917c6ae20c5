"""Progress of a run on a terminal or in a notebook: :class:`ProgressBar`."""

from __future__ import annotations

import builtins
import os
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import Any, cast

import torch
from typing_extensions import override

from joinables.trainer.metrics import Shown
from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.output import screen

_PAUSE = 0.2  # seconds between two pictures; each waits for the device, since it shows the loss


def is_watched() -> bool:
    """Return whether a person may look at stderr: it is a terminal, or this is a notebook."""
    return hasattr(builtins, "__IPYTHON__") or (cast("Any", sys.stderr) is not None and sys.stderr.isatty())


class ProgressBar(Callback):
    """Callback that shows a bar for each epoch and each evaluation on rank 0, with metrics and the ranks with data.

    The bar of an epoch stays on the screen, with the metrics of the epoch. On a terminal, the validation of the epoch
    has a bar below it; elsewhere, the bar of the epoch says that the module is validated. Without tqdm, only a line for
    each epoch and each evaluation is printed.
    """

    def __init__(self) -> None:
        self._bars: list[Any] = []  # of an epoch, and of its validation; ``None`` without tqdm
        self._next_picture = 0.0

    @override
    def on_start(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.is_global_zero:
            trainer.run.shown = trainer.run.shown or Shown()

    @override
    def on_train_batch_start(self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if trainer.run.shown is not None and not self._bars:
            self._begin(trainer, f"Epoch {trainer.current_epoch + 1}", batch_idx)

    @override
    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = trainer.run.shown
        if shown is None or not self._is_due(shown, batch_idx):
            return
        loss: Any = cast("dict[str, Any]", outputs).get("loss") if isinstance(outputs, dict) else outputs
        is_number = isinstance(loss, torch.Tensor) and loss.numel() == 1
        parts = [_text(shown.step) or (f"loss={loss.item():.4g}" if is_number else "")]
        if len(shown.lengths) > 1 and None not in shown.lengths:
            ends = batch_idx + 1 == shown.lengths[0] < max(shown.lengths)  # no hook runs here while rank 0 shadows
            left = sum(length > batch_idx + ends for length in shown.lengths)
            parts += [f"{'waits for ' * ends}{left} of {len(shown.lengths)} ranks"]
        self._draw(batch_idx, ", ".join(filter(None, parts)))

    @override
    def on_train_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        if (shown := trainer.run.shown) is not None:
            if not self._bars:  # without batches on this rank
                self._begin(trainer, f"Epoch {trainer.current_epoch + 1}", 0)
            if (bar := self._bars[-1]) is not None and bar.total:
                bar.n = bar.total  # of the longest rank
            self._end(f"Epoch {trainer.current_epoch + 1}", _text(shown.metrics))

    @override
    def on_evaluation_start(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if trainer.run.shown is not None:
            self._begin(trainer, stage, 0)

    @override
    def on_evaluation_batch_end(
        self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, stage: str
    ) -> None:
        if trainer.run.shown is not None and self._is_due(trainer.run.shown, batch_idx):
            self._draw(batch_idx, "")

    @override
    def on_evaluation_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        if (shown := trainer.run.shown) is not None:
            self._end("" if trainer.run.task.stage == "fit" else stage, _text(shown.metrics))

    @override
    def on_end(self, trainer: Any, module: TrainModule, stage: str) -> None:
        while self._bars:  # the run has raised, or max_steps has ended it within an epoch
            self._end("", "")

    # -- bars ---------------------------------------------------------------------------------------------------------

    def _begin(self, trainer: Any, title: str, done: int) -> None:
        self._next_picture = 0.0
        lengths = trainer.run.shown.lengths
        total = lengths[0] if None in lengths else max(lengths)
        options = {"desc": title, "total": total, "initial": done, "unit": " batches"}
        with suppress(OSError, ValueError, AttributeError):  # stderr is not a terminal
            if os.get_terminal_size(screen().fileno()).columns == 0:  # tqdm would write empty lines
                options["ncols"] = 80
        try:
            tqdm = cast("Any", import_module("tqdm")).tqdm
        except ImportError:
            self._bars.append(None)
            return
        if self._bars and not screen().isatty():  # only a terminal moves the cursor up to a bar above another
            self._bars[-1].set_postfix_str(title)
            self._bars.append(None)
            return
        # No thread that draws, since a process with threads cannot be forked safely.
        kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
        kind.set_lock(threading.RLock())  # the default is a semaphore between processes
        self._bars.append(kind(**options, leave=not self._bars, dynamic_ncols="ncols" not in options, file=screen()))

    def _is_due(self, shown: Shown, index: int) -> bool:
        """Return whether a picture is drawn after this batch; the last one of rank 0 always is."""
        return self._bars[-1] is not None and (index + 1 == shown.lengths[0] or time.monotonic() >= self._next_picture)

    def _draw(self, index: int, text: str) -> None:
        bar, self._next_picture = self._bars[-1], time.monotonic() + _PAUSE
        bar.n = index + 1
        bar.set_postfix_str(text)  # draws

    def _end(self, title: str, text: str) -> None:
        """End the last bar; with a title, its text stays on the screen."""
        bar = self._bars.pop()
        if bar is None and title:
            print(f"{title}: {text}", file=screen(), flush=True)
        elif bar is not None:
            bar.set_postfix_str(text if title else "", refresh=False)
            bar.close()


def _text(values: dict[str, Any]) -> str:
    """Return values as text; if some are for progress bars, only these."""
    chosen = {name: each for name, each in values.items() if each.prog_bar} or values
    return ", ".join(f"{name}={float(each.value):.4g}" for name, each in chosen.items())
