"""Training, validation, test and prediction in one call each: :class:`Trainer`.

A call runs one function, :func:`work`, on every rank and returns its result. The processes are started for it, or
torchrun, SLURM or MPI have started them; everything else is the same. The process that called gets everything back:
weights, optimizer state, counters, metrics. So a second ``fit`` goes on where the first ended.
"""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import Dataset

from join import JoinReport
from join.collectives._torch_private import pytree
from joinables.modules import keeping_modes
from joinables.trainer import rng
from joinables.trainer.accelerator import accelerator_of
from joinables.trainer.checkpoint import read_checkpoint, write_checkpoint
from joinables.trainer.launch import detect_environment
from joinables.trainer.loop import Fit, evaluate
from joinables.trainer.module import Callback, TrainModule, check_callback, check_module
from joinables.trainer.run import Counters, Run, Task, TrainerState, Uneven
from joinables.trainer.strategy import Strategy, strategy_of

logger = logging.getLogger("joinables")

Checkpoint: TypeAlias = "str | os.PathLike[str] | None"

_DTYPES = {"32": torch.float32, "64": torch.float64, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class Result:
    """One run's result; immutable, and the same whether the processes were started here or by a launcher.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        epochs: how many epochs were completed, over all fits.
        global_step: how many optimizer steps were made, over all fits.
        callback_metrics: the latest value of every metric.
        callbacks: the callbacks' states, by ``state_key``.
        join_report: steps, shadowed steps and idle time by rank in the last epoch; ``None`` before any.
        stopped: whether a callback ended the fit.
        metrics: those of this validation or test.
        predictions: of a prediction, the batches' outputs in the order of the data set.
    """

    stage: str
    epochs: int
    global_step: int
    callback_metrics: Mapping[str, float]
    callbacks: Mapping[str, Any]
    join_report: JoinReport | None
    stopped: bool
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    predictions: Sequence[Any] = ()


class Trainer(TrainerState):
    """Trains modules, on one process or many, whatever their numbers of batches.

    Args:
        devices: processes on this node: a number, or ``"auto"`` for as many as torchrun, SLURM or MPI have started, or
            one a GPU, or 1.
        num_nodes: nodes; more than one needs a launcher, such as torchrun.
        accelerator: ``"cpu"``; ``"cuda"``, or what else torch calls the devices of this machine; ``"gpu"`` for these,
            whatever they are called; or ``"auto"`` for them if there are any.
        strategy: a name, of which ``strategies()`` has the list, or a ``Strategy``; ``"auto"`` is ``"single"`` for one
            process and ``"ddp"`` for several. ``"single"`` under torchrun, SLURM or MPI lets each process train alone.
        precision: 32, 64, ``"bf16-mixed"`` or ``"16-mixed"``.
        max_epochs: when to stop, counted over all fits; by default after one epoch, or, with ``max_steps``, only then.
        max_steps: when to stop at the latest, in optimizer steps; ``None`` for no such limit.
        accumulate_grad_batches: batches for one optimizer step.
        gradient_clip_val: largest norm of the gradient; ``None`` for no limit.
        uneven: what happens if ranks have different numbers of batches: ``"join"`` trains on all of them, ``"stop"``
            ends the epoch with the first rank that has no more, ``"error"`` raises.
        callbacks: objects that are called at certain points of a run.
        default_root_dir: where files go; by default, the current directory.
        seed: where random numbers and the order of data start; with ``None``, ranks that are started here go on with
            this process's random numbers, and this process goes on with rank 0's.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if one is out of range, or does not go with another.
    """

    def __init__(
        self,
        *,
        devices: int | Literal["auto"] = "auto",
        num_nodes: int = 1,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        precision: int | str = 32,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        uneven: Uneven = "join",
        callbacks: Sequence[Callback] | Callback | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        _check_choice("uneven", uneven, ("join", "stop", "error"))
        _check_choice("precision", str(precision), tuple(_DTYPES))
        self._accelerator = accelerator_of(accelerator)
        self.world_size = _world_size(devices, num_nodes, self._accelerator, alone=strategy == "single")
        self.strategy = strategy_of(("single" if self.world_size == 1 else "ddp") if strategy == "auto" else strategy)
        if self.world_size > 1 and not self.strategy.is_distributed:
            raise ValueError(f"strategy={strategy!r} is for one process; leave it out, or set devices=1 [J174]")
        self.dtype = _DTYPES[str(precision)]
        if self.dtype is torch.float16 and self.strategy.shards_optimizers:
            raise ValueError("'16-mixed' does not go with sharded optimizers; use 'bf16-mixed' [J267]")
        if accumulate_grad_batches <= 0 or (gradient_clip_val is not None and gradient_clip_val <= 0):
            raise ValueError(f"{accumulate_grad_batches=} and {gradient_clip_val=} must be positive [J168]")
        self.max_epochs = 1 if max_epochs is None and max_steps is None else max_epochs
        self.max_steps, self.seed = max_steps, seed
        self.accumulate_grad_batches, self.gradient_clip_val = accumulate_grad_batches, gradient_clip_val
        self.uneven, self.callbacks = uneven, _in_order(callbacks)
        self.default_root_dir = Path(default_root_dir or ".").absolute()
        self.counters = Counters()
        """The optimizer steps and completed epochs, over all fits of the module."""
        self.metrics = {}
        """The latest value of every metric."""
        self.should_stop = False
        """Set it, on any rank, to end the fit after the epoch under way."""
        self._run: Run | None = None  # the one under way in this process
        self._last_module: weakref.ref[TrainModule] | None = None
        self._last_state: dict[str, Any] | None = None
        """What the next fit of the last module resumes from, without its weights: see ``joinables.trainer.checkpoint``.

        On rank 0 only, and ``None`` before a fit has ended.
        """
        self._first_states: dict[str, Any] = {}  # of callbacks, before their first fit, by state_key

    # -- runs ---------------------------------------------------------------------------------------------------------

    def fit(
        self,
        module: TrainModule,
        train_loader: Any,
        val_loader: Any = None,
        ckpt_path: Checkpoint = None,
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
        check_module(module, "fit", calls_val_dataloader=val_loader is not None)
        if val_loader is not None:
            check_module(module, "validate")
        if self.max_epochs is None and self.max_steps is None:
            raise ValueError("max_epochs=None and max_steps=None: this fit would have no end; set one of them [J268]")
        automatic = self.gradient_clip_val, self.accumulate_grad_batches, self.dtype is torch.float16
        if not module.automatic_optimization and automatic != (None, 1, False):
            raise ValueError("clipping, accumulation and '16-mixed' need automatic_optimization; leave them out [J183]")
        loaders = {"train_loader": train_loader, "val_loader": val_loader}
        return self._launch("fit", module, loaders, ckpt_path)

    def validate(self, module: TrainModule, loader: Any, ckpt_path: Checkpoint = None) -> list[dict[str, float]]:
        """Run ``validation_step`` over ``loader``; return a list with the metrics, by name.

        With ``ckpt_path``, ``module`` gets the weights of that checkpoint first, and keeps them; so in ``test`` and
        ``predict``.
        """
        return [dict(self._launch("validate", module, {"loader": loader}, ckpt_path).metrics)]

    def test(self, module: TrainModule, loader: Any, ckpt_path: Checkpoint = None) -> list[dict[str, float]]:
        """Run ``test_step`` over ``loader``; return a list with the metrics, by name."""
        return [dict(self._launch("test", module, {"loader": loader}, ckpt_path).metrics)]

    def predict(self, module: TrainModule, loader: Any, ckpt_path: Checkpoint = None) -> list[Any]:
        """Run ``predict_step`` over ``loader``; return the outputs by batch, on the CPU, in the data set's order."""
        return list(self._launch("predict", module, {"loader": loader}, ckpt_path).predictions)

    def _launch(self, stage: str, module: TrainModule, loaders: dict[str, Any], ckpt_path: Any) -> Result:
        """Have all ranks do their part of a run, and bring its results into this process."""
        check_module(module, stage)
        for name, loader in loaders.items():
            if isinstance(loader, Dataset):
                raise TypeError(f"{name} is a data set; wrap it: DataLoader(dataset, batch_size=...) [J186]")
        if self._run is not None:
            raise RuntimeError(f"this trainer is in a run, in which {stage} cannot be called; call it after [J270]")
        # A missing or broken file is told here, before anything changes, and not by a worker.
        saved = None if ckpt_path is None else read_checkpoint(ckpt_path)
        if stage == "fit":
            self._begin(module)
            saved = saved or self._last_state
        before = self.counters.state_dict()
        with tempfile.TemporaryDirectory(prefix="joinables-", ignore_cleanup_errors=True) as folder:
            task = Task(stage, saved, Path(folder), os.getpid(), rng.capture())
            try:
                result, state, home = self.strategy.launch(
                    self.world_size, self._accelerator, work, self, module, loaders, task
                )
            except BaseException:
                for index, callback in enumerate(self.callbacks):
                    if (path := Path(folder, f"callback-{index}")).exists():
                        callback.load_state_dict(torch.load(path, weights_only=False))
                self.counters.load_state_dict(before)
                raise
        if home is not None:
            self._take_over(module, result, home)
        if state is not None:
            kept = {name: value for name, value in state.items() if name != "module"}
            # Copies: the optimizer of the next fit would go on in the same tensors.
            self._last_state = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, kept)
        return result

    def _begin(self, module: TrainModule) -> None:
        """Begin a fit; for another module, forget the last one, and have callbacks be as before their own first."""
        self.should_stop = False
        if self._last_module is None or self._last_module() is not module:
            self._last_module, self._last_state = weakref.ref(module), None
            self.counters, self.metrics = Counters(), {}
            for callback in self.callbacks:
                if callback.state_key in self._first_states:
                    callback.load_state_dict(copy.deepcopy(self._first_states[callback.state_key]))
        for callback in self.callbacks:
            self._first_states.setdefault(callback.state_key, copy.deepcopy(callback.state_dict()))

    def __getstate__(self) -> dict[str, Any]:
        # Another process gets the state with its task, and does not need the rest.
        return {**vars(self), "_last_module": None, "_last_state": None, "_first_states": {}}

    def _take_over(self, module: TrainModule, result: Result, home: dict[str, Any]) -> None:
        """Bring this process to the state of rank 0's, another one."""
        self.metrics = dict(result.callback_metrics)
        self.counters.load_state_dict({"epochs": result.epochs, "global_step": result.global_step})
        self.should_stop, self.strategy.report = result.stopped, result.join_report
        for callback in self.callbacks:
            if callback.state_key in result.callbacks:
                callback.load_state_dict(result.callbacks[callback.state_key])
        if self.dtype is torch.float64:
            module.double()
        if home["module"] is not None:
            module.load_state_dict(home["module"])
        rng.restore(home["random"])

    # -- for modules and callbacks ------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The latest value of every metric, as tensors."""
        return {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in self.metrics.items()}

    @property
    def join_report(self) -> JoinReport | None:
        """Who did what in the last epoch; ``None`` before any."""
        return self.strategy.report

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
    def global_rank(self) -> int:
        """The rank of this process; outside a run 0, or what torchrun, SLURM or MPI say."""
        if self._run is not None:
            return self._run.collective.rank
        environment = detect_environment() if self.strategy.is_distributed else None
        return 0 if environment is None else environment.place.rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def current_epoch(self) -> int:
        """The epoch under way, from 0; outside a fit, the number of completed ones."""
        return self.counters.epochs if self._run is None else self._run.position.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps, over all fits."""
        return self.counters.global_step

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
        if self._run is not None and self._run.optimizers:
            state = self._run.take_snapshot()
        else:
            module, state = self._last_module and self._last_module(), self._last_state
            if self._run is not None or module is None or (state is None and self.is_global_zero):
                raise RuntimeError("there is no fit, nor state and module of one; save in a fit, or after it [J275]")
            state = None if state is None else {**state, "module": module.state_dict()}
        if state is not None:
            write_checkpoint(state, path)
        return state is not None

    def note(self, callback: Callback) -> None:
        """Let the process that started the run have the state of one of its callbacks, even if the run then fails."""
        task = self.run.task
        if os.getpid() != task.home:
            path = task.folder / f"callback-{self.callbacks.index(callback)}"
            torch.save(callback.state_dict(), path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)  # it is whole, even if this process is killed

    def device_of(self, rank: int) -> torch.device:
        """The device on which this process computes, as ``rank``."""
        if self._accelerator == "cpu":
            return torch.device("cpu")
        environment = detect_environment()
        local_rank = rank if environment is None else environment.place.local_rank
        # Some launchers let each process see only its own GPU.
        return torch.device(self._accelerator, local_rank % torch.accelerator.device_count())


# -- arguments --------------------------------------------------------------------------------------------------------


def _check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Refuse what is none of the ``known`` values."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is none of {', '.join(known)} [J166]")


def _world_size(devices: Any, num_nodes: int, accelerator: str, *, alone: bool) -> int:
    """The number of processes on all nodes.

    With ``devices="auto"``, that is as many as a launcher has started; without a launcher, one for each GPU, or 1.
    """
    environment = detect_environment()
    started = None if environment is None else environment.place.world_size
    there = None if accelerator == "cpu" else torch.accelerator.device_count()
    wanted = (1 if alone else started or there or 1) if devices == "auto" else devices * num_nodes
    too_many = (num_nodes > 1 and started is None) or (there is not None and devices != "auto" and devices > there)
    if wanted < 1 or too_many or (started not in (None, wanted) and not (alone and wanted == 1)):
        raise ValueError(
            f"devices={devices} and num_nodes={num_nodes}, but there are {there} GPUs here, and torchrun, SLURM or MPI"
            f" started {started} processes; leave both out, or pass strategy='single' for each to train alone [J172]"
        )
    return wanted


def _in_order(callbacks: Any) -> list[Callback]:
    """The callbacks in the order in which they are called."""
    listed: list[Any] = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    for callback in listed:
        check_callback(callback)
    listed.sort(key=lambda callback: callback.is_last)
    keys = [callback.state_key for callback in listed]
    if len(set(keys)) < len(keys):
        raise ValueError(f"callbacks has several of one state_key: {', '.join(keys)}; give each its own [J178]")
    return listed


# -- one rank's part --------------------------------------------------------------------------------------------------


def work(
    trainer: Trainer, module: TrainModule, loaders: Mapping[str, Any], task: Task
) -> tuple[Result, dict[str, Any] | None, dict[str, Any] | None]:
    """Do one rank's part of a run; called on all ranks.

    Returns:
        The result; the state of a fit, on rank 0; and what else is to get home, if that is another process.
    """
    is_at_home, device = os.getpid() == task.home, trainer.device_of(trainer.strategy.collective.rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if not is_at_home:
        rng.start_from(task.random)
    run = (Fit if task.stage == "fit" else Run)(trainer, module, task, device)
    made: dict[str, Any] = {}
    state: dict[str, Any] | None = None
    trainer._run, module._trainer = run, trainer  # pyright: ignore[reportPrivateUsage]
    try:
        with keeping_modes(module), _telling_callbacks(run):
            if isinstance(run, Fit):
                run.start(**loaders)
                run.run()
                state = run.take_snapshot()
            else:
                if task.saved is not None:
                    module.load_state_dict(task.saved["module"])
                made["metrics"], made["predictions"] = evaluate(run, loaders["loader"], task.stage)
    finally:
        if isinstance(run, Fit):
            run.end()
        trainer._run = module._trainer = None  # pyright: ignore[reportPrivateUsage]
        trainer.strategy.teardown()
    result = Result(
        stage=task.stage,
        **trainer.counters.state_dict(),
        callback_metrics=dict(trainer.metrics),
        callbacks={callback.state_key: callback.state_dict() for callback in trainer.callbacks},
        join_report=trainer.join_report,
        stopped=trainer.should_stop,
        **made,
    )
    if is_at_home or run.collective.rank != 0:
        return result, state, None
    weights = module.state_dict() if task.stage == "fit" or task.saved is not None else None
    return result, state, {"module": weights, "random": rng.capture()}


@contextmanager
def _telling_callbacks(run: Run) -> Generator[None]:
    """A context that calls the callbacks' ``on_start``, ``on_end``, and ``on_exception`` with what is raised in it."""
    try:
        run.call("on_start", run.task.stage)
        run.takes_metrics = run.task.stage != "predict"
        yield
    except BaseException as error:
        try:
            run.call("on_exception", error)
        except Exception:  # the exception that is under way says more
            logger.exception("a callback raised in on_exception")
        raise
    finally:
        run.takes_metrics = False
        run.call("on_end", run.task.stage)
