"""Objects that a trainer calls at certain points of a run: :class:`Callback`.

Every hook runs on every rank. Those of an epoch or a run are called by all ranks together, so they may communicate, on
``trainer.collective``. Those of a batch must not: they are not called on a rank that has run out of data.

Hooks take the whole ``Trainer``: users annotate them so, and use all of it. Its type is imported for type checkers
only, since the trainer imports this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joinables.trainer.module import TrainModule
    from joinables.trainer.trainer import Trainer


class Callback:
    """Base of callbacks. All hooks, the ``on_...`` methods, do nothing unless overridden."""

    @property
    def state_key(self) -> str:
        """The name under which checkpoints keep this callback's state; each callback of a trainer needs its own."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoints and for the process that started the run: plain data and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""

    def on_start(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called before a run: ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def on_end(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called after a run, also after one that raised."""

    def on_exception(self, trainer: Trainer, module: TrainModule, error: BaseException) -> None:
        """Called when a run raises; must not communicate."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first epoch of a fit."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first batch of an epoch."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Called before a training step."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training step, and after the optimizer's step if one followed."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after an epoch and its validation; ``trainer.callback_metrics`` is up to date."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last epoch of a fit."""

    def on_evaluation_start(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called before the batches of a validation, test or prediction."""

    def on_evaluation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, stage: str
    ) -> None:
        """Called after one of these batches."""

    def on_evaluation_end(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called after these batches; ``trainer.callback_metrics`` is up to date."""

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint; called on the rank that writes it."""

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: Mapping[str, Any]) -> None:
        """Take from a checkpoint."""
