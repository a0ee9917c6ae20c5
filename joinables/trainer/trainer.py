"""Training, validation, test and prediction in one call each: :class:`Trainer`.

A call launches one function on every rank and returns its result; whether the processes are started here or were by
torchrun, SLURM or MPI, everything but the start is the same. The process that called gets everything back: weights,
optimizer state, counters, metrics. So a second ``fit`` goes on where the first ended.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
import weakref
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader

from join import JoinReport
from join.collectives._torch_private import pytree
from joinables.train_mode import keeping_modes
from joinables.trainer.arguments import (
    check_alone,
    check_count,
    check_loader,
    checked_accelerator,
    checked_callbacks,
    world_size_for,
)
from joinables.trainer.buffers import put_buffers, unsaved_buffers
from joinables.trainer.callbacks.base import Callback
from joinables.trainer.callbacks.checkpoint import ModelCheckpoint
from joinables.trainer.checkpoints.file import read_checkpoint, write_checkpoint
from joinables.trainer.hooks import check_hooks, check_step
from joinables.trainer.keywords import checks_keywords
from joinables.trainer.launch.environment import detect_environment
from joinables.trainer.launch.folders import temporary_folder
from joinables.trainer.loops import rng, snapshot
from joinables.trainer.loops.data import Plan, copied_sampler
from joinables.trainer.loops.evaluate import evaluate, predict
from joinables.trainer.loops.fit import FitLoop
from joinables.trainer.loops.precision import Precision
from joinables.trainer.loops.run import FitRun, Run
from joinables.trainer.module import TrainModule
from joinables.trainer.result import Result
from joinables.trainer.strategy import DDPStrategy, Strategy, strategy_of

logger = logging.getLogger("joinables")

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
        callbacks: what hooks into runs.
        enable_progress_bar: whether rank 0 shows a bar on a terminal; needs tqdm. Elsewhere, and in notebooks,
            ``callbacks=ProgressBar(disable=False)`` shows it.
        default_root_dir: where files go; by default, the current directory.
        seed: what random numbers and the order of data start from; ``None`` leaves random numbers alone: all ranks that
            are started here go on from this process's, and this process from rank 0's.

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
        self._accelerator = checked_accelerator(accelerator)
        check_count("num_nodes", num_nodes)
        self.world_size = world_size_for(devices, num_nodes, self._accelerator)
        if strategy == "auto" and self.world_size == 1:
            check_alone(devices)
        name = ("single" if self.world_size == 1 else "ddp") if strategy == "auto" else strategy
        self.strategy = strategy_of(name)
        self.precision = precision
        if max_epochs is not None:
            check_count("max_epochs", max_epochs, least=0)
        elif max_steps is None:
            max_epochs = 1
        if max_steps is not None:
            check_count("max_steps", max_steps, least=0)
        check_count("accumulate_grad_batches", accumulate_grad_batches)
        self.max_epochs, self.max_steps = max_epochs, max_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        if isinstance(gradient_clip_val, str):
            raise TypeError(f"gradient_clip_val={gradient_clip_val!r} must be a number, or None for no limit")
        if gradient_clip_val is not None and not gradient_clip_val > 0:
            raise ValueError(f"gradient_clip_val={gradient_clip_val!r} must be positive, or None for no limit")
        self.gradient_clip_val = gradient_clip_val
        if uneven not in ("join", "stop", "error"):
            raise ValueError(f"uneven={uneven!r} is none of 'join', 'stop', 'error'")
        self.uneven: Uneven = uneven
        if seed is not None:
            check_count("seed", seed, least=0)
        self.seed = seed
        self.default_root_dir = Path(default_root_dir or ".").absolute()
        self.callbacks = checked_callbacks(callbacks, enable_progress_bar)
        self._check_strategy(sync_batchnorm, num_nodes)
        if sync_batchnorm:
            self.strategy = cast("DDPStrategy", self.strategy).with_sync_batchnorm()

        self.metrics: dict[str, float] = {}
        """The latest value of every metric."""
        self.should_stop = False
        """Set it, on any rank, to end the fit after the epoch under way."""
        self.join_report: JoinReport | None = None
        """Who did what in the last epoch."""
        self.plan: Plan | None = None
        """What is known of the ranks' data in the epoch under way."""
        self.epochs = 0
        """How many epochs were completed, over all fits."""
        self._steps = 0
        self._state: dict[str, Any] | None = None  # what the next fit goes on from
        self._state_of: weakref.ref[TrainModule] | None = None  # of which module
        self._first_states: dict[str, Any] = {}  # of callbacks, before their first fit
        self._run: Run | None = None
        self._loop: FitLoop | None = None
        self._notes: Path | None = None  # where the process that started this one finds what it is told on the way

    def _check_strategy(self, sync_batchnorm: bool, num_nodes: int) -> None:
        strategy = self.strategy
        precision = Precision(self.precision, self._accelerator)
        if not strategy.is_distributed and self.world_size > 1:
            raise ValueError(
                f"strategy='single' is for one process, and devices and num_nodes ask for {self.world_size}"
            )
        if num_nodes > 1 and detect_environment().creates_processes:
            raise ValueError(
                f"num_nodes={num_nodes}: processes on other nodes must be started there; use torchrun, SLURM or MPI"
            )
        if sync_batchnorm:
            if self._accelerator == "cpu":
                raise ValueError("sync_batchnorm=True needs GPUs: torch's SyncBatchNorm does not work on CPUs")
            if not isinstance(strategy, DDPStrategy):
                raise ValueError("sync_batchnorm=True needs a strategy with several processes, such as 'ddp'")
        if strategy.shards_optimizers and precision.scales_loss:
            raise ValueError("precision='16-mixed' does not go with sharded optimizers; use 'bf16-mixed'")

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
        module begins anew, callbacks too. A fit that raises leaves everything as it was before, if processes are
        started for it; what is trained in this process keeps the weights that it had come to. Either way, each
        ``ModelCheckpoint`` knows the files that it has written, so that a fit can go on from one of them.

        Args:
            module: what to train; it has the trained weights afterwards.
            train_loader: batches; a ``DataLoader`` without a sampler of its own is dealt out to the ranks.
            val_loader: batches to validate on after every epoch.
            ckpt_path: a checkpoint to go on from instead, with its weights.
        """
        self._check_module(module, "fit")
        if self.max_epochs is None and self.max_steps is None:
            raise ValueError("max_epochs=None and max_steps=None: this fit would have no end; set one of them")
        to_come = 1 if self.max_epochs is None else self.max_epochs - self.epochs
        check_loader("train_loader", train_loader, to_come)
        sets_steps = self.gradient_clip_val is not None or self.accumulate_grad_batches > 1
        if sets_steps and not module.automatic_optimization:
            raise ValueError(
                "gradient_clip_val and accumulate_grad_batches are for automatic optimization; clip and accumulate in"
                " training_step"
            )
        if Precision(self.precision, self._accelerator).scales_loss and not module.automatic_optimization:
            raise ValueError("precision='16-mixed' scales the loss, which manual optimization cannot; use 'bf16-mixed'")
        if val_loader is None and callable(getattr(module, "val_dataloader", None)):
            raise TypeError(
                f"{type(module).__name__} has val_dataloader, which the trainer does not call; give fit what it returns"
                " as val_loader, and rename it if it is your own"
            )
        if val_loader is not None:
            self._check_module(module, "validate")
            check_loader("val_loader", val_loader, to_come)
        if ckpt_path is not None:
            # A missing or broken file is told here, before anything changes, and not by a worker.
            snapshot.check(read_checkpoint(ckpt_path), str(ckpt_path))
        if self._state_of is None or self._state_of() is not module:
            self._begin_anew(module)
        for each in self.callbacks:
            self._first_states.setdefault(each.state_key, copy.deepcopy(each.state_dict()))
        self.should_stop = False
        result = self._launch("fit", module, (train_loader, val_loader), ckpt_path)
        return replace(result, state=None)

    @checks_keywords
    def validate(
        self, module: TrainModule, loader: Any, ckpt_path: str | os.PathLike[str] | None = None
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over ``loader``; return a list with the metrics, by name.

        With ``ckpt_path``, ``module`` gets the weights of that checkpoint first, and keeps them; so in ``test`` and
        ``predict``.
        """
        return [dict(self._launch("validate", module, (loader,), ckpt_path).metrics)]

    @checks_keywords
    def test(
        self, module: TrainModule, loader: Any, ckpt_path: str | os.PathLike[str] | None = None
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over ``loader``; return a list with the metrics, by name."""
        return [dict(self._launch("test", module, (loader,), ckpt_path).metrics)]

    @checks_keywords
    def predict(self, module: TrainModule, loader: Any, ckpt_path: str | os.PathLike[str] | None = None) -> list[Any]:
        """Run ``predict_step`` over ``loader``; return the outputs by batch, on the CPU, in the data set's order."""
        return list(self._launch("predict", module, (loader,), ckpt_path).predictions or ())

    def _begin_anew(self, module: TrainModule) -> None:
        """Forget the module before; callbacks get back the state that they had before their first fit."""
        self._state, self._state_of = None, weakref.ref(module)
        self.epochs = self._steps = 0
        self.metrics = {}
        for each in self.callbacks:
            if each.state_key in self._first_states:
                each.load_state_dict(copy.deepcopy(self._first_states[each.state_key]))

    def _launch(self, stage: str, module: TrainModule, loaders: tuple[Any, ...], ckpt_path: Any) -> Result:
        if stage != "fit":
            self._check_module(module, stage)
            check_loader("loader", loaders[0], 1)
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder())
            if stage == "fit" and self._state is not None and ckpt_path is None:
                write_checkpoint(self._state, folder / "from", durable=False)
                ckpt_path = folder / "from"
            here = os.getpid()
            job = stage, None if ckpt_path is None else str(ckpt_path), str(folder), here, rng.capture()
            names = ("train_loader", "val_loader") if stage == "fit" else ("loader",)
            for name, loader in zip(names, loaders, strict=True):
                self._warn_of_copies(name, loader)
            given = dict(zip(names, loaders, strict=True))
            try:
                launched = self.strategy.launch(self.world_size, self._accelerator, _work, self, module, given, *job)
            except BaseException:
                self._read_notes(folder)
                raise
            pid, result, drawn = cast("tuple[int, Result, dict[str, Any]]", launched)
            home = folder / "to"
            buffers: dict[str, torch.Tensor] = {}
            if home.exists():
                came = read_checkpoint(home, trusted=True)
                result, buffers = replace(result, state=came["state"]), came["buffers"]
            if pid != here:
                self._bring_home(result, module)
                rng.restore(drawn)
                put_buffers(module, buffers)
                if stage != "fit" and ckpt_path is not None:
                    module.load_state_dict(read_checkpoint(ckpt_path)["module"])
            if result.state is not None:
                self._state = {key: _own(value) for key, value in result.state.items() if key != "module"}
        return result

    def _warn_of_copies(self, name: str, loader: Any) -> None:
        if loader is None or self.world_size == 1 or not self.is_global_zero:
            return
        if not isinstance(loader, DataLoader):
            kind = f"is a {cast('type[object]', type(loader)).__name__} and no DataLoader"
            way_out = "make it an IterableDataset, in DataLoader(dataset, batch_size=None)"
        elif (sampler := copied_sampler(loader)) is not None:
            kind = f"has a sampler of its own, a {sampler}"
            way_out = (
                "give its sampler a method set_epoch(epoch). For a part of a data set, take torch.utils.data.Subset"
            )
        else:
            return
        warnings.warn(
            f"{name} {kind}, so it is not dealt out: each of the {self.world_size} ranks goes through what it gives"
            f" there. If that differs by rank, {way_out}",
            stacklevel=5,  # of whoever called fit, validate, test or predict, which are wrapped
        )

    def _read_notes(self, folder: Path) -> None:
        """Take over what callbacks have noted in other processes, in a run that failed."""
        for index, callback in enumerate(self.callbacks):
            path = folder / f"noted-{index}"
            if not path.exists():
                continue
            try:
                callback.load_state_dict(read_checkpoint(path, trusted=True))
            except Exception as error:  # why the run failed is under way, and must not be replaced
                logger.warning("cannot read what %s has noted: %s", type(callback).__name__, error)

    def _bring_home(self, result: Result, module: TrainModule) -> None:
        """Take over what happened in other processes."""
        state = result.state or {}
        self.metrics = dict(result.callback_metrics)
        self.epochs, self._steps, self.should_stop = result.epochs, result.global_step, result.stopped
        self.join_report = result.join_report
        for callback in self.callbacks:
            if callback.state_key in result.callbacks:
                callback.load_state_dict(result.callbacks[callback.state_key])
        Precision(self.precision, "cpu").convert_module(module)
        if "module" in state:
            module.load_state_dict(state["module"])

    def _check_module(self, module: Any, stage: str) -> None:
        if not isinstance(module, TrainModule):
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                raise TypeError("the trainer wraps modules in DistributedDataParallel itself; pass the bare module")
            if isinstance(module, type):
                raise TypeError(f"module is the class {module.__name__}; pass an object: {module.__name__}(...)")
            raise TypeError(f"module is a {type(module).__name__}; derive it from joinables.trainer.TrainModule")
        needed = {
            "fit": ("training_step", "configure_optimizers"),
            "validate": ("validation_step",),
            "test": ("test_step",),
        }
        for name in needed.get(stage, ()):  # predict_step has a default
            if getattr(type(module), name) is getattr(TrainModule, name) and name not in vars(module):
                raise TypeError(f"{type(module).__name__} has no {name}, which {stage} needs; write one")
        check_step(module, needed.get(stage, ("predict_step",))[0])
        check_hooks(module)
        if self._run is not None:
            raise RuntimeError(f"this trainer is in a run already; {stage} cannot be called from within")

    # -- for modules and callbacks ------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The latest value of every metric, as tensors."""
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.metrics.items()}

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
            raise RuntimeError("there is no run under way")
        return self._run

    @property
    def collective(self) -> Any:
        """The ranks of the run under way."""
        return self.run.collective

    @property
    def global_rank(self) -> int:
        """This process, from 0; outside a run 0, or what torchrun, SLURM or MPI say."""
        if self._run is not None:
            return self._run.rank
        return detect_environment().place().rank if self.strategy.is_distributed else 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def current_epoch(self) -> int:
        """The epoch under way, from 0; outside a fit, the number of completed ones."""
        return self._run.epoch if isinstance(self._run, FitRun) else self.epochs

    @property
    def global_step(self) -> int:
        """The number of optimizer steps, over all fits."""
        return self._run.counters.global_step if isinstance(self._run, FitRun) else self._steps

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the fit under way."""
        return self._run.optimizers if isinstance(self._run, FitRun) else []

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers of the fit under way, with when they step."""
        return self._run.schedulers if isinstance(self._run, FitRun) else []

    def record(self, name: str, value: Any, *, batch_size: int | None, **options: Any) -> None:
        """What ``module.log`` calls."""
        run = self.run
        if run.stage == "predict":
            raise RuntimeError(
                f"metric {name!r} was logged in a prediction, which has no metrics; use validate or test"
            )
        if not run.takes_metrics:
            raise RuntimeError(
                f"metric {name!r} was logged in a callback's on_start or on_end, where no metrics are taken; log it in"
                " on_evaluation_start, on_evaluation_end, on_train_epoch_start or on_train_end"
            )
        run.store.record(name, value, run.samples if batch_size is None else batch_size, **options)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """What ``module.manual_backward`` calls."""
        if self._loop is None:
            raise RuntimeError("manual_backward is for training_step")
        self._loop.backward(loss, **options)

    def save_checkpoint(self, path: str | os.PathLike[str]) -> bool:
        """Write a checkpoint; called on all ranks at the same step, those without data excepted, or after the fit.

        Not on one rank alone: all ranks hold parts of it. A fit resumes from there bit for bit, whichever hook it was
        in; in the middle of a window of accumulation, without the gradients so far.

        Returns:
            Whether this rank is the one that wrote it.

        Raises:
            RuntimeError: before any fit, in another run, or when the module that was trained is gone.
            TypeError: if a state holds more than plain data and tensors.
        """
        state = self._state_after_fit() if self._loop is None else self._loop.take_snapshot()
        if state is not None:
            snapshot.check_readable(state)
            write_checkpoint(state, path)
        return state is not None

    def note(self, callback: Callback) -> None:
        """Let the process that started the run have the state of one of its callbacks, even if the run then fails."""
        if self._notes is not None:
            path = self._notes / f"noted-{self.callbacks.index(callback)}"
            write_checkpoint(callback.state_dict(), path, durable=False)

    def _state_after_fit(self) -> dict[str, Any] | None:
        """What the next fit would go on from, with the module's weights as they are; ``None`` but on rank 0."""
        module = None if self._state_of is None else self._state_of()
        if self._run is not None or module is None or (self._state is None and self.is_global_zero):
            raise RuntimeError("there is no fit under way, nor the state and the module of one that ended")
        return None if self._state is None else {**self._state, "module": module.state_dict()}

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ``ModelCheckpoint`` among the callbacks."""
        return next((each for each in self.callbacks if isinstance(each, ModelCheckpoint)), None)

    def device_of(self, rank: int) -> torch.device:
        """Where this process computes, as ``rank``."""
        if self._accelerator == "cpu":
            return torch.device("cpu")
        environment = detect_environment()
        local_rank = rank if environment.creates_processes else environment.place().local_rank
        # Some launchers let each process see only its own GPU.
        return torch.device("cuda", local_rank % torch.cuda.device_count())

    # -- the work of one rank -----------------------------------------------------------------------------------------

    def work(
        self, stage: str, module: TrainModule, loaders: dict[str, Any], ckpt_path: str | None, folder: str, home: int
    ) -> Result:
        """One rank's part of a run; what is launched."""
        run = FitRun(self, module) if stage == "fit" else Run(self, module, stage)
        self._run, module._trainer = run, self  # pyright: ignore[reportPrivateUsage]
        self._notes = None if os.getpid() == home else Path(folder)
        state: dict[str, Any] | None = None
        metrics: dict[str, float] = {}
        predictions: tuple[Any, ...] | None = None
        with ExitStack() as stack:
            stack.callback(self._end_run, module)
            stack.enter_context(keeping_modes(module))
            stack.callback(run.call, "on_end", stage)
            stack.callback(setattr, run, "takes_metrics", False)
            stack.enter_context(self._telling_callbacks(run))
            saved = None
            if ckpt_path is not None and run.rank == 0:
                # The state of the fit before is on its way between processes, and not all of it is for files.
                saved = read_checkpoint(ckpt_path, trusted=Path(ckpt_path).parent == Path(folder))
            run.call("on_start", stage)
            run.takes_metrics = True
            if isinstance(run, FitRun):
                self._loop = FitLoop(run, loaders["train_loader"], loaders["val_loader"], saved)
                self._loop.start()
                self._loop.run()
                state = self._loop.take_snapshot()
                self.epochs, self._steps = run.counters.epochs, run.counters.global_step
            else:
                if saved is not None:
                    snapshot.check(saved, str(ckpt_path), {"module"})
                if ckpt_path is not None:
                    run.load_weights(saved and saved["module"])
                if stage == "predict":
                    predictions = tuple(predict(run, loaders["loader"]))
                else:
                    metrics = evaluate(run, loaders["loader"], stage)
        if os.getpid() != home and state is not None:
            home_state = {"state": state, "buffers": unsaved_buffers(module)}
            write_checkpoint(home_state, Path(folder) / "to", durable=False)
            state = None
        keeper = self.checkpoint_callback
        return Result(
            stage=stage,
            epochs=self.epochs,
            global_step=self._steps,
            callback_metrics=dict(self.metrics),
            metrics=metrics,
            callbacks={each.state_key: each.state_dict() for each in self.callbacks},
            best_model_path="" if keeper is None else keeper.best_model_path,
            best_model_score=None if keeper is None else keeper.best_model_score,
            predictions=predictions,
            join_report=self.join_report,
            stopped=self.should_stop,
            state=state,
        )

    def _end_run(self, module: TrainModule) -> None:
        if self._loop is not None:
            self._loop.end()
        self._run = self._loop = None
        module._trainer = None  # pyright: ignore[reportPrivateUsage]
        self.strategy.teardown()

    @contextmanager
    def _telling_callbacks(self, run: Run) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            try:
                run.call("on_exception", error)
            except Exception:  # the exception that is under way says more
                logger.exception("a callback raised in on_exception")
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_state": None, "_state_of": None}  # the state travels in a file


def _work(
    trainer: Trainer,
    module: TrainModule,
    loaders: dict[str, Any],
    stage: str,
    ckpt_path: str | None,
    folder: str,
    home: int,
    random: dict[str, Any],
) -> tuple[int, Result, dict[str, Any]]:
    if os.getpid() != home:
        rng.start_from(random)
    result = trainer.work(stage, module, loaders, ckpt_path, folder, home)
    return os.getpid(), result, rng.capture()


def _own(value: Any) -> Any:
    """A copy whose tensors do not lie in a file that goes away."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, value)
