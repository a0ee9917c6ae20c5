"""Callbacks that come with the trainer: :class:`ModelCheckpoint`, :class:`EarlyStopping`."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from typing_extensions import override

from joinables.trainer.metrics import monitored
from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.trainer import Trainer

logger = logging.getLogger("joinables")


class ModelCheckpoint(Callback):
    """Writes checkpoints after epochs or steps, and keeps the best.

    All ranks decide alike, since metrics are the same on all of them; one rank writes. A new file is written before an
    old one is removed, so there is a whole one at any moment. A file of the same name from another fit is replaced; a
    file of another ``ModelCheckpoint`` of this fit is not, and the new file is called ``NAME-v1``. The paths are known
    also after a fit that raised, or whose processes died. A file that cannot be written is an ``OSError`` with its
    name.

    Args:
        dirpath: the folder; by default ``checkpoints`` in the trainer's ``default_root_dir``.
        filename: name without ``.ckpt``; ``{epoch}``, ``{step}`` and metrics are filled in, as in
            ``"{epoch}-{val_loss:.3f}"``, and become ``epoch=3-val_loss=0.123``.
        monitor: the metric that says which checkpoint is best; with ``None``, the latest is. In the middle of an epoch
            it has the value of the epoch before; in the first epoch, NaN, which is the worst.
        mode: whether small or large values are good.
        save_top_k: how many to keep; -1 for all, 0 for none but the last.
        save_last: whether to keep the latest too, as ``last.ckpt``; it is also written at the end of a fit.
        every_n_epochs: after how many epochs; a fit that ends before there is a file to keep writes one at its end, as
            does one without ``monitor`` that ``max_steps`` ends in the middle of an epoch.
        every_n_train_steps: after how many optimizer steps, instead of after epochs.

    Raises:
        ValueError: if an argument is out of range.
    """

    is_last: ClassVar[bool] = True  # a checkpoint holds what the others did

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str = "{epoch}-{step}",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        every_n_epochs: int = 1,
        every_n_train_steps: int | None = None,
    ) -> None:
        if mode not in ("min", "max") or save_top_k < -1 or every_n_epochs < 1 or every_n_train_steps == 0:
            raise ValueError(
                f"{mode=} must be 'min' or 'max', {save_top_k=} at least -1, and {every_n_epochs=} and"
                f" {every_n_train_steps=} at least 1 [J190]"
            )
        self._folder = None if dirpath is None else Path(dirpath).absolute()
        self._filename, self._monitor, self._mode = filename, monitor, mode
        self._top_k, self._last = save_top_k, save_last
        self._epochs, self._steps = every_n_epochs, every_n_train_steps
        self._kept: dict[str, float] = {}  # by path; in the order in which they were written
        self._saved_step = -1
        self.last_model_path = ""
        """The latest file, with ``save_last``."""

    @property
    @override
    def state_key(self) -> str:
        # save_top_k is left out, so that a resumed fit can change it.
        when = f"{self._epochs} epochs" if self._steps is None else f"{self._steps} steps"
        return f"ModelCheckpoint({self._monitor}, {self._mode}, {self._filename}, {self._folder}, {when})"

    @property
    def best_model_path(self) -> str:
        """The file of the best checkpoint; empty without any."""
        return next(iter(self._best_first()), "")

    @property
    def best_model_score(self) -> float | None:
        """The metric of the best checkpoint; ``None`` without any, or without ``monitor``."""
        return self._kept[self.best_model_path] if self._kept and self._monitor is not None else None

    def _best_first(self) -> list[str]:
        """The files that are kept, the best first and those with NaN last; without ``monitor``, the latest first."""
        if self._monitor is None:
            return list(reversed(self._kept))

        def order(path: str) -> tuple[bool, float]:
            score = self._kept[path]
            return (True, 0.0) if math.isnan(score) else (False, score if self._mode == "min" else -score)

        return sorted(self._kept, key=order)

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step < self._saved_step:
            # A fit that failed came further, and this one does not resume from there: the files are another fit's.
            self._kept, self._saved_step, self.last_model_path = {}, -1, ""
        if self._kept:  # a fit in between may have discarded some; one rank looks, since they are on its disk
            there = trainer.run.collective.broadcast_object([path for path in self._kept if Path(path).exists()], 0)
            self._kept = {path: self._kept[path] for path in there}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._steps is not None and step and step % self._steps == 0 and step != self._saved_step:
            self._save(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._steps is not None and self._monitor is not None:
            monitored(trainer.metrics, self._monitor)  # raises if it was not logged in the whole epoch
        if self._steps is None and (trainer.current_epoch + 1) % self._epochs == 0:
            self._save(trainer, is_epoch_end=True)

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step in (0, self._saved_step):
            return
        keeps_the_latest = self._monitor is None and self._steps is None and self._epochs == 1
        if self._top_k and (keeps_the_latest or not self._kept):
            self._save(trainer)
        elif self._last:
            self._save(trainer, only_last=True)

    def _save(self, trainer: Trainer, *, is_epoch_end: bool = False, only_last: bool = False) -> None:
        """Write a checkpoint, and remove those that are no longer among the best."""
        before, self._saved_step = self.state_dict(), trainer.global_step
        folder = self._folder or trainer.default_root_dir / "checkpoints"
        # In the middle of an epoch, a metric that is not there is NaN.
        metrics = trainer.metrics if is_epoch_end else {str(self._monitor): math.nan, **trainer.metrics}
        paths: list[str] = []
        if self._top_k and not only_last:
            score = 0.0 if self._monitor is None else monitored(metrics, self._monitor)
            path = self._free_path(trainer, folder)
            self._kept[path] = score
            for worst in self._best_first()[self._top_k :] if self._top_k > 0 else ():
                del self._kept[worst]
            paths += {path} & self._kept.keys()
        if self._last:
            self.last_model_path = str(folder / "last.ckpt")
            paths.append(self.last_model_path)
        try:
            writes = True in [trainer.save_checkpoint(path) for path in paths]
        except BaseException:
            self.load_state_dict(before)
            raise
        if writes:
            trainer.note(self)  # now, while both the new and the old files exist
            for discarded in before["kept"].keys() - self._kept.keys():  # now that the new file is written
                Path(discarded).unlink(missing_ok=True)

    def _free_path(self, trainer: Trainer, folder: Path) -> str:
        """``filename`` in ``folder``, its fields filled in; with ``-v1`` and so on where a file of this fit has it.

        A metric that is not there is NaN.
        """
        values = {**trainer.metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}
        name = re.sub(
            r"\{([^{}:]+)(?::([^{}]*))?\}",
            lambda field: f"{field[1]}={format(values.get(field[1], math.nan), field[2] or '')}".replace("/", "_"),
            self._filename,
        )
        keepers = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
        taken = {path for keeper in keepers for path in (*keeper._kept, keeper.last_model_path)}
        taken |= {str(folder / "last.ckpt")} if self._last else set()
        endings = ("", *(f"-v{number}" for number in range(1, len(taken) + 1)))
        return next(path for ending in endings if (path := str(folder / f"{name}{ending}.ckpt")) not in taken)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self._kept), "last": self.last_model_path, "step": self._saved_step}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = dict(state["kept"])
        self.last_model_path, self._saved_step = state["last"], state["step"]


class EarlyStopping(Callback):
    """Ends the fit when a metric has not improved for some epochs, or is NaN.

    A fit that was ended stays ended: a second one, or one from its last checkpoint, does not train, and a warning says
    so. With more patience, or without this callback, it goes on.

    Args:
        monitor: the metric.
        mode: whether small or large values are good.
        patience: after how many epochs in a row without improvement to stop; 0 is the same as 1.
        min_delta: the smallest change that counts as an improvement.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self, monitor: str, mode: Literal["min", "max"] = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max") or patience < 0 or min_delta < 0:
            raise ValueError(f"{mode=} must be 'min' or 'max', {patience=} and {min_delta=} at least 0 [J193]")
        self._monitor, self._sign = monitor, 1 if mode == "min" else -1
        self._patience, self._min_delta = patience, min_delta
        self._best = self._latest = math.inf
        self._waited = 0

    @property
    @override
    def state_key(self) -> str:
        return f"EarlyStopping({self._monitor})"

    @property
    def _is_over(self) -> bool:
        """Whether the metric has not improved for ``patience`` epochs, or is NaN."""
        return self._waited >= max(self._patience, 1) or math.isnan(self._latest)

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._is_over:
            trainer.should_stop = True
            if trainer.is_global_zero:
                text = "%s has ended this fit after %d epochs; to go on, give it more patience, or leave it out"
                logger.warning(text, self.state_key, trainer.current_epoch)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        value = self._sign * monitored(trainer.metrics, self._monitor)
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._latest = value
        if self._is_over:
            trainer.should_stop = True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited, "latest": self._latest}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited, self._latest = state["best"], state["waited"], state["latest"]
