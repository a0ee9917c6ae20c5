"""What the strategy does before the callbacks of a trainer: :class:`First`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from joinables.integrations.lightning.names import Callback


class First(Callback):
    """The first callback of a trainer.

    Args:
        end_epoch: called when a training epoch is over, before its other hooks: these find state in step on all ranks.
        fail: called with an exception that ends the run, before others may save a checkpoint.
    """

    def __init__(self, end_epoch: Callable[[], object], fail: Callable[[BaseException], object]) -> None:
        self._end_epoch, self._fail = end_epoch, fail

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """A training epoch is over."""
        self._end_epoch()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """An exception ends the run."""
        self._fail(exception)
