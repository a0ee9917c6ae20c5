"""Callbacks that come with the trainer: :class:`ModelCheckpoint`, :class:`EarlyStopping`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from typing_extensions import override

from joinables.trainer.arguments import check_choice, check_kinds
from joinables.trainer.checkpoint import FileCheckpointIO
from joinables.trainer.files import free_path
from joinables.trainer.metrics import monitored
from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.trainer import Trainer

logger = logging.getLogger("joinables")


class ModelCheckpoint(Callback):
    """Callback that writes checkpoints after epochs or steps, such as ``epoch=3-step=200.ckpt``, and keeps the best.

    All ranks decide alike, since they have the same metrics; one rank writes. A new file is written before an old one
    is removed, so a complete file exists at any moment. If another fit or another ``ModelCheckpoint`` has
    a file of the same name, the new file is called ``NAME-v1``. Only ``last.ckpt`` of another fit is replaced. Files
    outside the folder are never removed, even if this fit resumes from a checkpoint that names them. The paths are
    available even after a fit that raised, or whose processes died. If a file cannot be written, an ``OSError`` names
    it.

    Args:
        dirpath: The folder; by default ``checkpoints`` in the trainer's ``default_root_dir``.
        monitor: The metric that decides which checkpoint is best; with ``None``, the latest is best. In the middle of
            an epoch the metric has its value of the previous epoch; in the first epoch it is NaN, the worst value.
        mode: Whether small (``"min"``) or large (``"max"``) values are good.
        save_top_k: The number of checkpoints to keep: -1 for all, 0 for none but the last.
        save_last: Whether to keep the latest checkpoint too, as ``last.ckpt``. It is also written when a fit ends.
        every_n_train_steps: The number of optimizer steps between checkpoints; by default, one follows each epoch. At
            the end of a fit, one is written if there is none yet, or if there is no ``monitor``.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.
    """

    is_last: ClassVar[bool] = True  # a checkpoint contains the results of the other callbacks

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        every_n_train_steps: int | None = None,
    ) -> None:
        check_kinds(locals())
        check_choice("mode", mode, ("min", "max"))
        self._folder = None if dirpath is None else Path(dirpath).absolute()
        self._monitor, self._mode = monitor, mode
        self._top_k, self._last, self._steps = save_top_k, save_last, every_n_train_steps
        self._kept: dict[str, float] = {}  # scores by path, in the order in which the files were written
        self._saved_step = -1
        self._foreign: set[str] = set()  # files of other fits when this one began
        self.last_model_path = ""
        """The latest file, with ``save_last``."""

    @property
    @override
    def state_key(self) -> str:
        # The key does not contain save_top_k, so that a resumed fit can change it.
        return f"ModelCheckpoint({self._monitor}, {self._mode}, {self._folder}, {self._steps})"

    @property
    def best_model_path(self) -> str:
        """File of the best checkpoint; empty without any."""
        return next(iter(self._best_first()), "")

    @property
    def best_model_score(self) -> float | None:
        """Metric of the best checkpoint; ``None`` without any, or without ``monitor``."""
        return self._kept[self.best_model_path] if self._kept and self._monitor is not None else None

    def _best_first(self) -> list[str]:
        """Return the kept files, the best first and scores of NaN last; without ``monitor``, the latest first."""
        if self._monitor is None:
            return list(reversed(self._kept))
        sign = 1 if self._mode == "min" else -1
        return sorted(self._kept, key=lambda path: (math.isnan(self._kept[path]), sign * self._kept[path]))

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Forget files that an earlier fit or another process has removed, and find files of other fits."""
        own = {*self._kept}
        if trainer.global_step < self._saved_step:
            # An earlier fit failed at a later step, and this fit does not resume from its files.
            self._kept, self._saved_step, self.last_model_path = {}, -1, ""
        # Another fit may have removed some files, or left others. One rank looks, since they may be on its disk only.
        if isinstance(trainer.checkpoint_io, FileCheckpointIO):
            found = [str(path) for path in self._folder_of(trainer).glob("*.ckpt")]
            existing = [path for path in self._kept if Path(path).exists()]
            existing, found = trainer.run.collective.broadcast_object((existing, found), 0, plain=True)
            self._kept, self._foreign = {path: self._kept[path] for path in existing}, {*found} - own

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a checkpoint after a number of steps."""
        step = trainer.global_step
        if self._steps is not None and step and step % self._steps == 0 and step != self._saved_step:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Write a checkpoint, unless they are written after steps."""
        if self._steps is not None and self._monitor is not None:
            monitored(trainer.callback_metrics, self._monitor)  # raises if it was not logged in the whole epoch
        if self._steps is None:
            self._save(trainer, is_epoch_end=True)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Write the last checkpoint."""
        if trainer.global_step not in (0, self._saved_step):
            self._save(trainer, only_last=self._monitor is not None and bool(self._kept))

    def _save(self, trainer: Trainer, *, is_epoch_end: bool = False, only_last: bool = False) -> None:
        """Write a checkpoint, and remove files that are no longer among the best."""
        before, self._saved_step = self.state_dict(), trainer.global_step
        folder = self._folder_of(trainer)
        # In the middle of an epoch, a missing metric is NaN.
        missing = {} if is_epoch_end else {str(self._monitor): math.nan}
        paths: list[str] = []
        if self._top_k and not only_last:
            score = 0.0 if self._monitor is None else monitored({**missing, **trainer.callback_metrics}, self._monitor)
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
            trainer.note(self)  # called while both the new and the old files exist
            for discarded in before["kept"].keys() - self._kept.keys():
                if folder.resolve() in Path(discarded).resolve().parents:
                    trainer.checkpoint_io.remove_checkpoint(discarded)

    def _folder_of(self, trainer: Trainer) -> Path:
        return self._folder or trainer.default_root_dir / "checkpoints"

    def _free_path(self, trainer: Trainer, folder: Path) -> str:
        """Return a path that no other fit or callback has, with ``-v1`` or so if they have the first one."""
        name = f"epoch={trainer.current_epoch}-step={trainer.global_step}"
        keepers = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
        taken = self._foreign | {path for keeper in keepers for path in (*keeper._kept, keeper.last_model_path)}
        return free_path(folder, name, lambda path: str(path) in taken)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self._kept), "last": self.last_model_path, "step": self._saved_step}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = dict(state["kept"])
        self.last_model_path, self._saved_step = state["last"], state["step"]


class EarlyStopping(Callback):
    """Callback that ends the fit when a metric has not improved for some epochs, or is NaN.

    The fit stays ended: a second fit, or a fit from its last checkpoint, does not train, and logs a warning. With more
    patience, or without this callback, it continues.

    Args:
        monitor: The metric.
        mode: Whether small (``"min"``) or large (``"max"``) values are good.
        patience: The number of epochs in a row without improvement that end the fit; 0 is the same as 1.
        min_delta: The smallest change that counts as an improvement.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, monitor: str, mode: Literal["min", "max"] = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        check_kinds(locals())
        check_choice("mode", mode, ("min", "max"))
        self._monitor, self._sign = monitor, 1 if mode == "min" else -1
        self._patience, self._min_delta = patience, min_delta
        self._best = math.inf
        self._waited: float = 0

    @property
    @override
    def state_key(self) -> str:
        return f"EarlyStopping({self._monitor})"

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """End the fit if it was ended before."""
        trainer.should_stop |= self._waited >= max(self._patience, 1)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Compare the metric with its best value."""
        value = self._sign * monitored(trainer.callback_metrics, self._monitor)
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited = math.inf if math.isnan(value) else self._waited + 1
        trainer.should_stop |= self._waited >= max(self._patience, 1)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited = state["best"], state["waited"]
