"""The base class of modules to train: :class:`TrainModule`.

It is a ``torch.nn.Module`` with methods that say what a step is and which optimizers it needs; the trainer does the
rest. The names are those of a LightningModule: one that uses only these runs unchanged with this base class instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from joinables.trainer.hooks import ModuleHooks
from joinables.trainer.loops.metrics import Reduction

if TYPE_CHECKING:
    from joinables.trainer.trainer import Trainer


class TrainModule(ModuleHooks, torch.nn.Module):
    """Base of modules that a :class:`Trainer` trains.

    Override ``training_step`` and ``configure_optimizers`` to fit, and ``validation_step``, ``test_step`` or
    ``predict_step`` for the other runs. There are hooks between the steps, those of :class:`ModuleHooks`.

    Parts that are in eval mode when a fit begins, such as frozen BatchNorm layers, stay in it; a module that is in eval
    mode as a whole is put into training mode.

    With ``automatic_optimization = False`` the step itself calls ``manual_backward`` and steps what ``optimizers()``
    returns.
    """

    automatic_optimization: bool = True
    _trainer: Trainer | None = None

    # -- what a user overrides ----------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of one batch, its mean over the samples: a tensor, or a dict with it under ``"loss"``."""
        raise NotImplementedError(f"{type(self).__name__} has no training_step, which fit needs; write one [J257]")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch, without grad; ``self.log`` the metrics."""
        raise NotImplementedError(
            f"{type(self).__name__} has no validation_step, which validate needs; write one [J258]"
        )

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch, without grad; ``self.log`` the metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step, which test needs; write one [J259]")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the outputs for one batch; by default, the module's output for it, or for a tuple's first element."""
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, several in a list, ``(optimizers, schedulers)``, or a dict.

        A dict has the keys ``"optimizer"`` and ``"lr_scheduler"``, and ``"monitor"`` if that is a
        ``ReduceLROnPlateau``; a scheduler is stepped after every epoch, or, given
        as ``{"scheduler": s, "interval": "step"}``, after every optimizer step.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no configure_optimizers, which fit needs; write one [J260]"
        )

    # -- what a user calls --------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer of the run that is under way.

        Raises:
            RuntimeError: outside a run.
        """
        if self._trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} is not in a run of a Trainer; call this in a hook or a step [J261]"
            )
        return self._trainer

    def log(
        self,
        name: str,
        value: float | torch.Tensor,
        prog_bar: bool = False,
        *,
        reduce_fx: Reduction = "mean",
        batch_size: int | None = None,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        sync_dist: bool | None = None,
    ) -> None:
        """Record a metric.

        At the end of the epoch, ``trainer.callback_metrics[name]`` is its mean over all samples of all ranks, the same
        number whatever the number of processes.

        Args:
            name: its name.
            value: a number, or a tensor with one element; for ``"mean"``, the mean over the samples of the batch.
            prog_bar: whether the progress bar shows the latest value.
            reduce_fx: how values become one; ``"mean"`` is weighted by the number of samples.
            batch_size: the number of samples in the batch; by default, the length of the batch's first tensor.
            logger: whether it goes into files (``CSVMetrics``, ``TensorBoardMetrics``).
            on_step: whether these files also get each single value, of rank 0.
            on_epoch: accepted for familiarity; values are always reduced over the epoch.
            sync_dist: accepted for familiarity; values are always reduced over the ranks.

        Raises:
            ValueError: for a value with several elements, or an unknown ``reduce_fx``.
        """
        self.trainer.record(
            name,
            value,
            reduce_fx=reduce_fx,
            batch_size=batch_size,
            prog_bar=prog_bar,
            logger=logger,
            on_step=bool(on_step),
        )

    def log_dict(self, metrics: Mapping[str, float | torch.Tensor], prog_bar: bool = False, **options: Any) -> None:
        """Record several metrics; ``options`` are those of :meth:`log`."""
        for name, value in metrics.items():
            self.log(name, value, prog_bar, **options)

    def optimizers(self) -> Any:
        """The optimizer of the run, or the list of them if there are several."""
        optimizers = self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """The scheduler of the run, or the list of them if there are several; ``None`` without any."""
        schedulers = [each.scheduler for each in self.trainer.schedulers]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Compute gradients, averaged over the ranks; for ``automatic_optimization = False``.

        Args:
            loss: the mean over the samples of the batch.
            **options: ``retain_graph`` and ``create_graph``, as of ``torch.Tensor.backward``.

        Raises:
            TypeError: for another option.
        """
        unknown = options.keys() - {"retain_graph", "create_graph"}
        if unknown:
            # DDP waits for the gradients of all parameters, and would wait for those that inputs= leaves out.
            raise TypeError(
                f"manual_backward takes retain_graph and create_graph, and not {', '.join(sorted(unknown))}; leave it"
                " out [J262]"
            )
        self.trainer.backward(loss, **options)

    @property
    def device(self) -> torch.device:
        """Where the module's first parameter is."""
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0."""
        return self.trainer.current_epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps so far."""
        return self.trainer.global_step

    @property
    def global_rank(self) -> int:
        """This process, from 0."""
        return self.trainer.global_rank

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        state.pop("_trainer", None)  # a copy of the module is in no run
        return state
