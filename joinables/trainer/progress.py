"""Progress of a run on a terminal or in a notebook: :class:`ProgressBar`."""

from __future__ import annotations

import builtins
import shutil
import sys
import time
from typing import Any, cast

import torch

from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.output import screen

_PAUSE = 0.2  # seconds between two pictures; each waits for the device, since it shows the loss


def is_watched() -> bool:
    """Return whether a person may look at stderr: it is a terminal, or this is a notebook."""
    return hasattr(builtins, "__IPYTHON__") or (cast("Any", sys.stderr) is not None and sys.stderr.isatty())


class ProgressBar(Callback):
    """Callback that shows a line for each epoch and each evaluation on rank 0.

    While batches run, the line has their number, the loss of this rank, and the number of ranks with data, and is
    written again in place. At the end, it has the metrics, and stays.
    """

    def __init__(self) -> None:
        self._width = 0  # of the line on the screen that will be written again
        self._next_picture = 0.0

    def on_train_batch_end(self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show the number of batches, at most a few times a second."""
        lengths, done = trainer.run.plan.lengths, batch_idx + 1
        if not trainer.is_global_zero or (done != lengths[0] and time.monotonic() < self._next_picture):
            return
        self._next_picture = time.monotonic() + _PAUSE
        parts = [
            f"Epoch {trainer.current_epoch + 1}: {done} of {lengths[0] if None in lengths else max(lengths)} batches"
        ]
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
        """Show the metrics of the epoch."""
        self._end(trainer, f"Epoch {trainer.current_epoch + 1}")

    def on_validation_epoch_end(self, trainer: Any, module: TrainModule) -> None:
        """Show the metrics of an evaluation by itself."""
        if trainer.run.task.stage != "fit":  # the line of the epoch has the metrics of its validation
            self._end(trainer, trainer.run.task.stage)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def teardown(self, trainer: Any, module: TrainModule, stage: str) -> None:
        """End the line of an epoch that did not end."""
        if self._width:  # the run has raised, or max_steps has ended it within an epoch
            self._write("", "\n")

    def _end(self, trainer: Any, title: str) -> None:
        if trainer.is_global_zero:
            metrics = ", ".join(f"{name}={value:.4g}" for name, value in trainer.run.latest.items())
            self._write(f"{title}: {metrics}", "\n")

    def _write(self, text: str, end: str) -> None:
        print("\r" * bool(self._width) + text.ljust(self._width), end=end, file=screen(), flush=True)
        self._width = 0 if end else len(text)
