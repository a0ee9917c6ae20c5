"""The hooks of a module: :class:`ModuleHooks`; and checks that modules and callbacks have no hook that is never called.

The order of calls, where ``*`` is ``validation``, ``test`` or ``predict``::

    on_train_start
    an epoch      on_train_epoch_start
      a batch       on_train_batch_start, training_step, on_before_optimizer_step, on_train_batch_end
      validation    as below
                  on_train_epoch_end
    on_train_end

    on_*_start, on_*_epoch_start
      a batch       on_*_batch_start, *_step, on_*_batch_end
    on_*_epoch_end, on_*_end
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from joinables.trainer.callbacks.base import Callback


class ModuleHooks:
    """The hooks of a module; they do nothing unless overridden.

    All ranks call them at the same time, so they may communicate. Those of a batch, of an optimizer step and of a
    checkpoint must not: ranks without data, or that do not write, do not call them. Those of an evaluation run in eval
    mode and without grad, as its steps do.
    """

    def on_train_start(self) -> None:
        """Called before the first epoch of a fit."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before a training step, with its batch on the device."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the gradients are clipped and ``optimizer`` makes a step; may change them.

        With a sharded optimizer, also on a rank without data, which has the same gradients and steps its shard.
        """

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a training step, which returned ``outputs``, and after the optimizer's if one followed."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch and its validation."""

    def on_train_end(self) -> None:
        """Called after the last epoch of a fit."""

    def on_validation_start(self) -> None:
        """Called before a validation."""

    def on_validation_epoch_start(self) -> None:
        """Called before the validation batches."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before a validation step."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a validation step."""

    def on_validation_epoch_end(self) -> None:
        """Called after the validation batches, before their metrics are averaged."""

    def on_validation_end(self) -> None:
        """Called after a validation; ``trainer.callback_metrics`` is up to date."""

    def on_test_start(self) -> None:
        """Called before a test."""

    def on_test_epoch_start(self) -> None:
        """Called before the test batches."""

    def on_test_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before a test step."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a test step."""

    def on_test_epoch_end(self) -> None:
        """Called after the test batches, before their metrics are averaged."""

    def on_test_end(self) -> None:
        """Called after a test; ``trainer.callback_metrics`` is up to date."""

    def on_predict_start(self) -> None:
        """Called before a prediction."""

    def on_predict_epoch_start(self) -> None:
        """Called before the batches of a prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before a predict step."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a predict step."""

    def on_predict_epoch_end(self) -> None:
        """Called after the batches of a prediction."""

    def on_predict_end(self) -> None:
        """Called after a prediction."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take from a checkpoint."""


_MANUAL = "set automatic_optimization = False and do it in training_step"
_MODES = "the trainer sets the modes, and puts each part back into its own"
_ON_DEVICE = "do it in the step, or in the loader's collate_fn"
_INSTEAD = {
    "backward": _MANUAL,
    "configure_callbacks": "give them to Trainer(callbacks=...)",
    "configure_gradient_clipping": "use Trainer(gradient_clip_val=...) or on_before_optimizer_step",
    "configure_model": "build all parts in __init__",
    "configure_sharded_model": "build all parts in __init__",
    "lr_scheduler_step": _MANUAL,
    "on_after_backward": "use on_before_optimizer_step",
    "on_after_batch_transfer": _ON_DEVICE,
    "on_batch_end": "use on_train_batch_end",
    "on_batch_start": "use on_train_batch_start",
    "on_before_backward": "do it at the end of training_step",
    "on_before_batch_transfer": _ON_DEVICE,
    "on_before_zero_grad": "use on_train_batch_end",
    "on_epoch_end": "use on_train_epoch_end",
    "on_epoch_start": "use on_train_epoch_start",
    "on_fit_end": "use on_train_end",
    "on_fit_start": "use on_train_start",
    "on_predict_model_eval": _MODES,
    "on_predict_model_train": _MODES,
    "on_test_model_eval": _MODES,
    "on_test_model_train": _MODES,
    "on_validation_model_eval": _MODES,
    "on_validation_model_train": _MODES,
    "on_validation_model_zero_grad": "gradients are set to zero before each step",
    "optimizer_step": _MANUAL,
    "optimizer_zero_grad": _MANUAL,
    "prepare_data": "do it before the run",
    "setup": "do it in __init__",
    "teardown": "do it after the run",
    "test_epoch_end": "use on_test_epoch_end",
    "test_step_end": "do it in test_step",
    "training_epoch_end": "use on_train_epoch_end",
    "training_step_end": "do it in training_step",
    "transfer_batch_to_device": _ON_DEVICE,
    "validation_epoch_end": "use on_validation_epoch_end",
    "validation_step_end": "do it in validation_step",
}
"""Hooks of Lightning's modules that are not called, and what to do instead."""


def check_step(module: object, name: str) -> None:
    """Refuse a step that does not take a batch and its index."""
    try:
        signature = inspect.signature(getattr(module, name))
    except ValueError:  # a builtin may have none
        return
    try:
        signature.bind(object(), 0)
    except TypeError as error:
        raise TypeError(
            f"{name} of {type(module).__name__} is called with a batch and its index, in this order, and cannot be:"
            f" {error}; write def {name}(self, batch, batch_idx) [J209]"
        ) from error


def check_hooks(module: object) -> None:
    """Refuse a module with hooks of Lightning that the trainer does not call."""
    kind = type(module)
    found = [f"{name} ({instead})" for name, instead in _INSTEAD.items() if callable(getattr(kind, name, None))]
    if found:
        raise TypeError(
            f"{kind.__name__} has hooks that the trainer does not call: {', '.join(found)}; move what they do, and"
            " rename those that are your own [J210]"
        )


def check_callback_hooks(callback: Callback) -> None:
    """Refuse a callback with hooks of Lightning that the trainer does not call."""
    kind = type(callback)
    names = {"setup", "teardown", *(name for name in (*_INSTEAD, *vars(ModuleHooks)) if name.startswith("on_"))}
    found = [name for name in sorted(names - vars(Callback).keys()) if callable(getattr(kind, name, None))]
    if found:
        hooks = ", ".join(name for name in vars(Callback) if name.startswith("on_"))
        raise TypeError(
            f"{kind.__name__} has hooks that the trainer does not call: {', '.join(found)}; a callback has {hooks}:"
            " rename those that are your own [J211]"
        )
