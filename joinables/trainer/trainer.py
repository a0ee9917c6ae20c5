"""Training, validation, test and prediction in one call each: :class:`Trainer`.

A call runs one function, ``joinables.trainer.work.work``, on every rank and returns its result. The processes are
started for it, or torchrun, SLURM or MPI have started them; everything else is the same. The process that called gets
everything back: weights, optimizer state, counters, metrics. So a second ``fit`` goes on where the first ended.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from join import JoinReport
from joinables.trainer import arguments
from joinables.trainer.callbacks.base import Callback
from joinables.trainer.callbacks.checkpoint import ModelCheckpoint
from joinables.trainer.checkpoints import snapshot
from joinables.trainer.checkpoints.file import read_checkpoint, write_checkpoint
from joinables.trainer.environment import detect_environment
from joinables.trainer.keywords import checks_keywords
from joinables.trainer.loops import rng
from joinables.trainer.loops.data import Plan
from joinables.trainer.loops.precision import Precision
from joinables.trainer.loops.run import FitRun, Run, Task
from joinables.trainer.module import TrainModule
from joinables.trainer.result import LastFit, Result
from joinables.trainer.strategy import Strategy
from joinables.trainer.work import put_buffers, receive_callbacks, receive_home, send_callback, work

Uneven = Literal["join", "stop", "error"]


class Trainer:
    """Trains modules, on one process or many, whatever their numbers of batches.

    Args:
        devices: processes on this node: a number, or ``"auto"`` for as many as torchrun, SLURM or MPI have started, or
            one a GPU, or 1.
        num_nodes: nodes; more than one needs a launcher, such as torchrun.
        accelerator: ``"cpu"``, ``"cuda"`` (or ``"gpu"``), or ``"auto"`` for GPUs if there are any.
        strategy: a name, of which ``strategies()`` has the list, or a ``Strategy``; ``"auto"`` is ``"single"`` for one
            process and ``"ddp"`` for several. ``"single"`` under torchrun, SLURM or MPI lets each process train alone.
        precision: 32, 64, ``"bf16-mixed"`` or ``"16-mixed"``.
        max_epochs: when to stop, counted over all fits; by default after one epoch, or, with ``max_steps``, only then.
        max_steps: when to stop at the latest, in optimizer steps; ``None`` for no such limit.
        accumulate_grad_batches: batches for one optimizer step.
        gradient_clip_val: largest norm of the gradient; ``None`` for no limit.
        uneven: what happens if ranks have different numbers of batches: ``"join"`` trains on all of them, ``"stop"``
            ends the epoch with the first rank that has no more, ``"error"`` raises.
        sync_batchnorm: whether BatchNorm layers are SyncBatchNorm while they train; on GPUs only.
        callbacks: objects that are called at certain points of a run.
        enable_progress_bar: whether rank 0 shows a bar on a terminal; needs tqdm. Elsewhere, and in notebooks,
            ``callbacks=ProgressBar(disable=False)`` shows it.
        default_root_dir: where files go; by default, the current directory.
        seed: where random numbers and the order of data start; with ``None``, ranks that are started here go on with
            this process's random numbers, and this process goes on with rank 0's.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if one is out of range, or does not go with another.
    """

    @checks_keywords
    def __init__(
        self,
        *,
        devices: int | Literal["auto"] = "auto",
        num_nodes: int = 1,
        accelerator: Literal["auto", "cpu", "cuda", "gpu"] = "auto",
        strategy: str | Strategy = "auto",
        precision: int | str = 32,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        uneven: Uneven = "join",
        sync_batchnorm: bool = False,
        callbacks: Sequence[Callback] | Callback | None = None,
        enable_progress_bar: bool = False,
        default_root_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        self._accelerator = arguments.checked_accelerator(accelerator)
        self.world_size = arguments.world_size_for(devices, num_nodes, self._accelerator)
        self.strategy = arguments.checked_strategy(strategy, self.world_size, devices)
        if sync_batchnorm:
            self.strategy = arguments.with_sync_batchnorm(self.strategy, self._accelerator)
        self.precision = precision
        if self._scales_loss and self.strategy.shards_optimizers:  # the first of them refuses an unknown precision
            raise ValueError("precision='16-mixed' does not go with sharded optimizers; use 'bf16-mixed' [J267]")
        arguments.check_limits(max_epochs, max_steps, gradient_clip_val)
        self.max_epochs = 1 if max_epochs is None and max_steps is None else max_epochs
        self.max_steps = max_steps
        arguments.check_count("accumulate_grad_batches", accumulate_grad_batches)
        self.accumulate_grad_batches, self.gradient_clip_val = accumulate_grad_batches, gradient_clip_val
        arguments.check_choice("uneven", uneven, ("join", "stop", "error"))
        self.uneven: Uneven = uneven
        if seed is not None:
            arguments.check_count("seed", seed, least=0)
        self.seed = seed
        self.default_root_dir = Path(default_root_dir or ".").absolute()
        self.callbacks = arguments.checked_callbacks(callbacks, enable_progress_bar)
        self.metrics: dict[str, float] = {}
        """The latest value of every metric."""
        self.should_stop = False
        """Set it, on any rank, to end the fit after the epoch under way."""
        self.plan: Plan | None = None
        """What is known of the ranks' data in the epoch under way."""
        self._run: Run | None = None  # the one under way in this process
        self._last = LastFit()

    @property
    def _scales_loss(self) -> bool:
        return Precision(self.precision, self._accelerator).scales_loss

    # -- runs ---------------------------------------------------------------------------------------------------------

    @checks_keywords
    def fit(
        self,
        module: TrainModule,
        train_loader: Any,
        val_loader: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> Result:
        """Train ``module`` until there are ``max_epochs`` or ``max_steps``.

        A second call with the same module goes on where the first ended, once one of these was raised; one with another
        module begins anew, callbacks too. A fit that raises leaves everything as it was before, if processes were
        started for it; a module that is trained in this process keeps the weights that it had by then. Either way, each
        ``ModelCheckpoint`` knows the files that it has written, so that a fit can go on from one of them.

        Args:
            module: what to train; it has the trained weights afterwards.
            train_loader: batches; a ``DataLoader`` without a sampler of its own is dealt out to the ranks.
            val_loader: batches to validate on after every epoch.
            ckpt_path: a checkpoint to go on from instead, with its weights.
        """
        self._check_run("fit", module)
        if self.max_epochs is None and self.max_steps is None:
            raise ValueError("max_epochs=None and max_steps=None: this fit would have no end; set one of them [J268]")
        to_come = 1 if self.max_epochs is None else self.max_epochs - self.epochs
        arguments.check_loader("train_loader", train_loader, to_come)
        sets_steps = self.gradient_clip_val is not None or self.accumulate_grad_batches > 1
        arguments.check_manual(module, sets_steps=sets_steps, scales_loss=self._scales_loss)
        if val_loader is not None:
            arguments.check_module(module, "validate")
            arguments.check_loader("val_loader", val_loader, to_come)
        elif callable(getattr(module, "val_dataloader", None)):
            raise TypeError(
                f"{type(module).__name__} has val_dataloader, which the trainer does not call; give fit what it returns"
                " as val_loader, and rename it if it is your own [J269]"
            )
        if ckpt_path is not None:
            # A missing or broken file is told here, before anything changes, and not by a worker.
            snapshot.check(read_checkpoint(ckpt_path), str(ckpt_path))
        if self._last.module is not module:
            self._last.begin(module, self.callbacks)
            self.metrics = {}
        self._last.remember_callbacks(self.callbacks)
        self.should_stop = False
        loaders = {"train_loader": train_loader, "val_loader": val_loader}
        return replace(self._launch("fit", module, loaders, ckpt_path), state=None)

    @checks_keywords
    def validate(
        self, module: TrainModule, loader: Any, ckpt_path: str | os.PathLike[str] | None = None
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over ``loader``; return a list with the metrics, by name.

        With ``ckpt_path``, ``module`` gets the weights of that checkpoint first, and keeps them; so in ``test`` and
        ``predict``.
        """
        return [dict(self._launch("validate", module, {"loader": loader}, ckpt_path).metrics)]

    @checks_keywords
    def test(
        self, module: TrainModule, loader: Any, ckpt_path: str | os.PathLike[str] | None = None
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over ``loader``; return a list with the metrics, by name."""
        return [dict(self._launch("test", module, {"loader": loader}, ckpt_path).metrics)]

    @checks_keywords
    def predict(self, module: TrainModule, loader: Any, ckpt_path: str | os.PathLike[str] | None = None) -> list[Any]:
        """Run ``predict_step`` over ``loader``; return the outputs by batch, on the CPU, in the data set's order."""
        return list(self._launch("predict", module, {"loader": loader}, ckpt_path).predictions or ())

    def _check_run(self, stage: str, module: TrainModule) -> None:
        arguments.check_module(module, stage)
        if self._run is not None:
            raise RuntimeError(
                f"this trainer is in a run already, in which {stage} cannot be called; call it after that [J270]"
            )

    def _launch(self, stage: str, module: TrainModule, loaders: dict[str, Any], ckpt_path: Any) -> Result:
        """Have all ranks do their part of a run, and bring its results into this process."""
        if stage != "fit":
            self._check_run(stage, module)
            arguments.check_loader("loader", loaders["loader"], 1)
        if self.world_size > 1 and self.is_global_zero:
            for name, loader in loaders.items():
                if loader is not None:
                    arguments.warn_if_not_dealt_out(name, loader, self.world_size)
        with tempfile.TemporaryDirectory(prefix="joinables-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            path = None if ckpt_path is None else Path(ckpt_path)
            if stage == "fit" and path is None and self._last.state is not None:
                path = folder / "last-fit"
                write_checkpoint(self._last.state, path, durable=False)
            task = Task(stage, path, folder, os.getpid(), rng.capture())
            try:
                result: Result = self.strategy.launch(
                    self.world_size, self._accelerator, work, self, module, loaders, task
                )
            except BaseException:
                receive_callbacks(folder, self.callbacks)
                raise
            home = receive_home(folder)
            if home is not None:
                result = replace(result, state=home["state"])
                self._take_over(result)
                Precision(self.precision, "cpu").convert_module(module)
                if result.state is not None:
                    module.load_state_dict(result.state["module"])
                elif path is not None:
                    module.load_state_dict(read_checkpoint(path)["module"])
                put_buffers(module, home["buffers"])
                rng.restore(home["random"])
            if stage == "fit":
                self._last.end(result)
        return result

    def _take_over(self, result: Result) -> None:
        """Bring this trainer and its callbacks to the state of rank 0's, in another process."""
        self.metrics = dict(result.callback_metrics)
        self.should_stop, self.strategy.report = result.stopped, result.join_report
        for callback in self.callbacks:
            if callback.state_key in result.callbacks:
                callback.load_state_dict(result.callbacks[callback.state_key])

    # -- for modules and callbacks ------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The latest value of every metric, as tensors."""
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.metrics.items()}

    @property
    def join_report(self) -> JoinReport | None:
        """Who did what in the last epoch; ``None`` before any."""
        return self.strategy.report

    @property
    def latest(self) -> dict[str, float]:
        """The single values logged last on this rank, of metrics that the progress bar shows."""
        metrics = {} if self._run is None else self._run.store.metrics
        return {name: metric.last for name, metric in metrics.items() if metric.prog_bar}

    @property
    def run(self) -> Run:
        """The run under way.

        Raises:
            RuntimeError: outside a run.
        """
        if self._run is None:
            raise RuntimeError("there is no run of the trainer under way; call this in a hook or a step [J271]")
        return self._run

    @property
    def _fit(self) -> FitRun | None:
        return self._run if isinstance(self._run, FitRun) else None

    @property
    def collective(self) -> Any:
        """The ranks of the run under way."""
        return self.run.collective

    @property
    def global_rank(self) -> int:
        """The rank of this process; outside a run 0, or what torchrun, SLURM or MPI say."""
        if self._run is not None:
            return self._run.rank
        environment = detect_environment() if self.strategy.is_distributed else None
        return 0 if environment is None else environment.place.rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def epochs(self) -> int:
        """How many epochs were completed, over all fits."""
        return (self._fit or self._last).counters.epochs

    @property
    def current_epoch(self) -> int:
        """The epoch under way, from 0; outside a fit, the number of completed ones."""
        return self._fit.position.epoch if self._fit else self.epochs

    @property
    def global_step(self) -> int:
        """The number of optimizer steps, over all fits."""
        return (self._fit or self._last).counters.global_step

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the fit under way."""
        return self._fit.optimizers if self._fit else []

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers of the fit under way, with when they step."""
        return self._fit.schedulers if self._fit else []

    def record(self, name: str, value: Any, *, batch_size: int | None, **options: Any) -> None:
        """Record a metric: ``module.log`` calls this."""
        run = self.run
        if run.task.stage == "predict":
            raise RuntimeError(
                f"metric {name!r} was logged in a prediction, which has no metrics; use validate or test [J272]"
            )
        if not run.takes_metrics:
            raise RuntimeError(
                f"metric {name!r} was logged in a callback's on_start or on_end, where no metrics are taken; log it in"
                " on_evaluation_start, on_evaluation_end, on_train_epoch_start or on_train_end [J273]"
            )
        run.store.record(name, value, run.samples if batch_size is None else batch_size, **options)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the gradients of ``loss``: ``module.manual_backward`` calls this."""
        if self._fit is None:
            raise RuntimeError("manual_backward is for training_step; call it there [J274]")
        self._fit.backward(loss, **options)

    def save_checkpoint(self, path: str | os.PathLike[str]) -> bool:
        """Write a checkpoint; called on all ranks at the same step, those without data excepted, or after the fit.

        All ranks hold parts of it, so a call on one rank alone is an error. A fit resumes from the file bit for bit,
        whichever hook it was written in; between the batches of one accumulated step, without the gradients so far.

        Returns:
            Whether this rank is the one that wrote it.

        Raises:
            RuntimeError: before any fit, in another run, or when the module that was trained is gone.
            TypeError: if a state holds more than plain data and tensors.
        """
        if self._fit is not None and self._fit.optimizers:
            state = self._fit.take_snapshot()
        else:
            module, state = self._last.module, self._last.state
            if self._run is not None or module is None or (state is None and self.is_global_zero):
                raise RuntimeError(
                    "there is no fit under way, nor the state and the module of one that ended; save in a fit, or right"
                    " after it [J275]"
                )
            state = None if state is None else {**state, "module": module.state_dict()}
        if state is not None:
            snapshot.check_readable(state)
            write_checkpoint(state, path)
        return state is not None

    def note(self, callback: Callback) -> None:
        """Let the process that started the run have the state of one of its callbacks, even if the run then fails."""
        send_callback(self.run.task, self.callbacks.index(callback), callback)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ``ModelCheckpoint`` among the callbacks."""
        return next((each for each in self.callbacks if isinstance(each, ModelCheckpoint)), None)

    def device_of(self, rank: int) -> torch.device:
        """The device on which this process computes, as ``rank``."""
        if self._accelerator == "cpu":
            return torch.device("cpu")
        environment = detect_environment()
        local_rank = rank if environment is None else environment.place.local_rank
        # Some launchers let each process see only its own GPU.
        return torch.device("cuda", local_rank % torch.cuda.device_count())
