"""Training, validation, test and prediction in one call each: :class:`Trainer`.

A call runs one function, :func:`work`, on every rank and returns its result. The trainer starts the processes, or
a launcher such as torchrun has started them; all the rest is the same. The process that called receives the weights,
the optimizer state, the counters and the metrics. So a second ``fit`` continues after the first.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Never

from join import JoinReport
from join.collectives._torch_private import pytree
from join.errors import add_note
from join.read_ahead import check_loader
from joinables.modules import keeping_modes, replaced
from joinables.processes import ending_forks
from joinables.trainer import rng
from joinables.trainer.accelerator import accelerator_of, release
from joinables.trainer.arguments import REST, check_choice, check_kinds, lacking
from joinables.trainer.checkpoint import (
    CheckpointIO,
    FileCheckpointIO,
    changed_weights,
    checkpoint_io_of,
    keep_trained,
    load,
    load_checkpoint,
    load_fitting,
)
from joinables.trainer.data import order_seed
from joinables.trainer.files import temporary_folder
from joinables.trainer.launch import Place, node_of, read, write
from joinables.trainer.loggers import Logs, loggers_of
from joinables.trainer.loop import Fit, evaluate
from joinables.trainer.module import Callback, Queue, TrainModule, check_callback, check_module
from joinables.trainer.progress import ProgressBar, is_watched
from joinables.trainer.run import Run, Task, TrainerState, Uneven, is_limit
from joinables.trainer.strategy import Strategy, strategy_of

logger = logging.getLogger("joinables")

Checkpoint: TypeAlias = "str | os.PathLike[str] | None"

_DTYPES = {"32": torch.float32, "64": torch.float64, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class Result:
    """Result of one run; immutable, and the same whether the trainer or a launcher started the processes.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        epochs: The number of completed epochs, over all fits.
        global_step: The number of optimizer steps, over all fits.
        callback_metrics: The latest value of every metric.
        callbacks: The callbacks' states, by ``state_key``.
        join_report: Steps, shadowed steps and idle time by rank in the last epoch; ``None`` before the first.
        stopped: Whether a callback ended the fit.
        metrics: The metrics of this validation or test.
        predictions: The batches' outputs of a prediction, in the order of the data set; on rank 0 only.
    """

    stage: str
    epochs: int
    global_step: int
    callback_metrics: Mapping[str, float]
    callbacks: Mapping[str, Any] = field(repr=False)
    join_report: JoinReport | None = field(repr=False)
    stopped: bool
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    predictions: Sequence[Any] = ()


_RESULTS = len(fields(Result))


class Trainer(TrainerState):
    """Trainer of modules on one process or many, whose numbers of batches may differ.

    Args:
        devices: The number of processes on this node. ``"auto"`` is the number of processes that torchrun has
            started; without torchrun one for each GPU, or 1.
        num_nodes: The number of nodes. On each, start this script with a launcher such as torchrun, or once with the
            environment variables ``MASTER_ADDR`` and ``MASTER_PORT``, which name the first node and a free port on it,
            and ``NODE_RANK``. The script then starts ``devices`` processes on each node.
        accelerator: ``"cpu"``, or torch's name of the devices of this machine, such as ``"cuda"``. ``"gpu"`` is this
            machine's accelerator under any name. ``"auto"`` is the accelerator if there is one, and the CPU otherwise.
        strategy: A name from ``strategies()``, or a ``Strategy``. ``"auto"`` is ``"single"`` for one process and
            ``"ddp"`` for several. With ``"single"`` under torchrun, each process trains by itself.
        precision: 32, 64, ``"bf16-mixed"`` or ``"16-mixed"``.
        max_epochs: The number of epochs to stop after, over all fits; -1 for no limit. The default is one epoch, or no
            limit if ``max_steps`` is set.
        max_steps: The number of optimizer steps to stop after, over all fits; ``None`` or -1 for no limit.
        accumulate_grad_batches: The number of batches in one optimizer step. A change takes effect with the next epoch.
        gradient_clip_val: The largest norm of the gradient; ``None`` for no limit.
        uneven: The treatment of ranks with different numbers of batches: ``"join"`` trains on all batches, ``"stop"``
            ends the epoch with the first rank that is out of data, and ``"error"`` raises.
        callbacks: Objects that are called at certain points of a run.
        default_root_dir: The folder for files; by default, the current directory.
        logger: A logger or several, which receive the metrics: ``CSVLogger()``, a logger of Lightning, or any object
            with ``log_metrics(metrics, step)`` and ``log_hyperparams(params)``. With ``None`` or ``False``, nothing is
            logged. If a logger raises, the fit continues, and a warning has the reason.
        log_every_n_steps: The number of optimizer steps between the values of single steps that loggers receive; 0 for
            none.
        enable_progress_bar: Whether rank 0 shows its progress on stderr; by default, if stderr is a terminal or this is
            a notebook. It is a bar if tqdm is installed, and a line for each epoch otherwise.
        seed: The seed of random numbers and of the order of data. With ``None``, the order is drawn from the random
            state of this process, rank 0 continues with that state, and this process with the state of rank 0. The
            other ranks of a fit draw different numbers. The order of a loader with a ``generator`` is drawn from that
            generator.
        checkpoint_io: An object that saves, loads and removes checkpoints; by default, files of ``torch.save``.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, or cannot be combined with another.
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
        logger: Any = None,
        log_every_n_steps: int = 50,
        enable_progress_bar: bool | None = None,
        seed: int | None = None,
        checkpoint_io: CheckpointIO | None = None,
        **others: Never,
    ) -> None:
        _refuse_unknown(Trainer, others)
        check_kinds(locals())
        check_choice("uneven", uneven, ("join", "stop", "error"))
        check_choice("precision", str(precision), tuple(_DTYPES))
        self.accelerator = accelerator_of(accelerator)
        self.strategy = strategy_of("ddp" if strategy == "auto" else strategy)
        self.world_size = _world_size(devices, num_nodes, self.accelerator, self.strategy)
        if strategy == "auto" and self.world_size == 1:
            self.strategy = strategy_of("single")
        if self.world_size > 1 and not self.strategy.is_distributed:
            raise ValueError(
                f"{strategy=} trains in a single process, but the trainer has {self.world_size}. Remove strategy= from"
                " the Trainer's arguments, or pass devices=1. [J174]"
            )
        self.checkpoint_io = checkpoint_io_of(checkpoint_io)
        self.num_nodes = num_nodes
        self._how = {"num_nodes": num_nodes, "accelerator": self.accelerator}
        self.dtype = _DTYPES[str(precision)]
        if self.dtype is torch.float16 and self.strategy.shards_optimizers:
            raise ValueError("'16-mixed' cannot train with sharded optimizers. Pass precision='bf16-mixed'. [J267]")
        self.max_epochs = 1 if max_epochs is None and not is_limit(max_steps) else max_epochs
        self.max_steps, self.seed, self.uneven = max_steps, seed, uneven
        self.accumulate_grad_batches, self.gradient_clip_val = accumulate_grad_batches, gradient_clip_val
        shows = is_watched() if enable_progress_bar is None else enable_progress_bar
        logs = Logs(loggers_of(logger), log_every_n_steps)
        self.callbacks = _in_order(callbacks, [*[ProgressBar()] * shows, *[logs] * bool(logs.loggers)])
        self.default_root_dir = Path(default_root_dir or ".").absolute()
        self.metrics = {}
        """The latest value of every metric."""
        self.should_stop = False
        """Whether the fit ends after the current epoch; set it to ``True`` on any rank."""
        self._run: Run | None = None  # the current run of this process
        self._trained: dict[str, Any] | None = None
        """The snapshot at the end of a fit, with the weights, until this process has received all of its output."""
        self._last_module: weakref.ref[TrainModule] | None = None
        self._last_state: dict[str, Any] | None = None
        """The snapshot that the next fit of the last module resumes from, without the weights.

        It exists on rank 0 only, and is ``None`` before a fit has ended. :mod:`joinables.trainer.checkpoint` has its
        form.
        """
        self._first_states: dict[str, Any] = {}  # the callbacks' states before their first fit, by state_key

    # -- runs ---------------------------------------------------------------------------------------------------------

    def fit(
        self,
        module: TrainModule,
        train_loader: Any = None,
        val_loader: Any = None,
        ckpt_path: Checkpoint = None,
        **others: Never,
    ) -> Result:
        """Train ``module`` up to ``max_epochs`` or ``max_steps``.

        A second call with the same module continues after the first, once you have raised one of these limits. A call
        with another module starts from the beginning, and resets callbacks too.

        If processes were started for a fit that raises, everything is as it was before the fit. A module that is
        trained in this process keeps the weights of that moment. If something raises after the training, a file
        ``trained-*.ckpt`` in ``default_root_dir`` has the weights. In all cases each ``ModelCheckpoint`` has the paths
        of the files that it has written, so a fit can resume from one of them.

        Args:
            module: The module to train; it has the trained weights afterwards.
            train_loader: Batches. The batches of a ``DataLoader`` are distributed over the ranks, unless its sampler
                distributes them itself.
            val_loader: Batches to validate on after every epoch.
            ckpt_path: A checkpoint to resume from, with its weights, instead of the last fit.
            **others: None; unknown names raise an error.
        """
        check_module(module, "fit", {})
        if val_loader is not None:
            check_module(module, "validate", {})
        if not (is_limit(self.max_epochs) or is_limit(self.max_steps)):
            raise ValueError(
                f"max_epochs={self.max_epochs} and max_steps={self.max_steps} set no end to this fit. Set one of them"
                " on the Trainer to the number of epochs or steps. [J268]"
            )
        automatic = self.gradient_clip_val, self.accumulate_grad_batches, self.dtype is torch.float16
        if not module.automatic_optimization and automatic != (None, 1, False):
            raise ValueError(
                "Clipping, accumulation and '16-mixed' need automatic_optimization=True. Remove gradient_clip_val,"
                " accumulate_grad_batches and precision='16-mixed' from the Trainer's arguments. [J183]"
            )
        loaders = {"train_loader": train_loader, "val_loader": val_loader}
        return self._launch("fit", module, loaders, ckpt_path, others)

    def validate(
        self, module: TrainModule, loader: Any = None, ckpt_path: Checkpoint = None, **others: Never
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over ``loader`` and return a list with the metrics, by name.

        With ``ckpt_path``, ``module`` loads the weights of that checkpoint first, and keeps them. ``test`` and
        ``predict`` do the same.
        """
        return [dict(self._launch("validate", module, {"loader": loader}, ckpt_path, others).metrics)]

    def test(
        self, module: TrainModule, loader: Any = None, ckpt_path: Checkpoint = None, **others: Never
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over ``loader`` and return a list with the metrics, by name."""
        return [dict(self._launch("test", module, {"loader": loader}, ckpt_path, others).metrics)]

    def predict(
        self, module: TrainModule, loader: Any = None, ckpt_path: Checkpoint = None, **others: Never
    ) -> list[Any]:
        """Run ``predict_step`` over ``loader`` and return each batch's outputs on the CPU, in the data set's order.

        If a launcher started the processes, rank 0 returns all outputs, and the other ranks return none.
        """
        return list(self._launch("predict", module, {"loader": loader}, ckpt_path, others).predictions)

    def _launch(
        self, stage: str, module: TrainModule, loaders: dict[str, Any], ckpt_path: Any, others: Mapping[str, Any]
    ) -> Result:
        """Run a stage on all ranks, and bring its results into this process."""
        _refuse_unknown(getattr(self, stage), others)
        check_module(module, stage, loaders)
        loaders = {name: _checked_loader(name, loader) for name, loader in loaders.items()}
        self.callbacks = _in_order(self.callbacks)  # the user may have changed them
        if self._run is not None:
            raise RuntimeError(f"This trainer is running, so {stage} cannot be called. Call it after the run. [J270]")
        is_file = isinstance(self.checkpoint_io, FileCheckpointIO)
        if is_file and ckpt_path in ("best", "last") and not os.path.exists(ckpt_path):
            raise FileNotFoundError(
                f"{ckpt_path=} is not the path of a file. Pass keeper.{ckpt_path}_model_path, where keeper is the"
                " ModelCheckpoint of the trainer, or the path of one of its files. [J742]"
            )
        # This process reads the file, before anything changes: a missing or broken one does not fail in a worker.
        saved = None if ckpt_path is None else load_checkpoint(self.checkpoint_io, ckpt_path)
        if stage == "fit":
            self._begin(module)
            saved = saved or self._last_state
        before, self._trained = (self.epochs, self.global_step), None
        self.strategy.check(several_backwards=stage == "fit" and not module.automatic_optimization)
        with temporary_folder() as folder:
            seed = order_seed(loaders.get("train_loader"), self.seed)
            task = Task(stage, saved, Path(folder), os.getpid(), rng.capture(), seed)
            try:
                output = self.strategy.launch(
                    work, Place, self, module, loaders, task, world_size=self.world_size, **self._how
                )
                return self._receive(module, task, Result(*output[:_RESULTS]), *output[_RESULTS:])
            except BaseException as error:
                if self._receive_trained(task) is not None:
                    add_note(error, kept := f"The module was trained before this error. {self._keep_trained()}")
                    logging.getLogger("joinables").error(kept)  # Python 3.10 has no notes
                for index, callback in enumerate(self.callbacks):
                    if (path := Path(folder, f"callback-{index}")).exists():
                        callback.load_state_dict(torch.load(path, weights_only=False))
                self.epochs, self.global_step = before
                raise

    def _receive_trained(self, task: Task) -> dict[str, Any] | None:
        """Return the snapshot at the end of a fit, which another process may have written."""
        if self._trained is None and (path := task.folder / "snapshot").exists():
            self._trained = read(path)
        return self._trained

    def _keep_trained(self) -> str:
        """Write a checkpoint of the trained module, and return a sentence that says where it is."""
        return keep_trained(self.default_root_dir, self.checkpoint_io, self._trained or {})

    def _receive(
        self,
        module: TrainModule,
        task: Task,
        result: Result,
        weights: dict[str, Any] | None,
        random: dict[str, Any] | None,
        queue: list[Any] | None,
        results: dict[str, Any],
    ) -> Result:
        """Bring the output of the run into this process, and return its result; the weights first."""
        trained = self._receive_trained(task)
        if random is not None:  # the run was in another process
            if self.dtype is torch.float64:
                module.double()
            if trained is not None:
                trained["module"] = {**trained["module"], **(weights or {})}
                if problem := load_fitting(module, trained["module"]):
                    warnings.warn(problem + self._keep_trained(), stacklevel=4)  # at the call of fit
            elif weights is not None:
                module.load_state_dict(weights)
            self.metrics = dict(result.callback_metrics)
            self.should_stop, self.strategy.report = result.stopped, result.join_report
            self.load_state_dict(vars(result))
            rng.restore(random)
        if trained is not None:
            kept = {name: value for name, value in trained.items() if name != "module"} | self.state_dict()
            # The tensors are copied, since the optimizer of the next fit would change them.
            self._last_state = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, kept | {"metrics": self.metrics})
            self._trained = None
        if queue is not None:
            module.get_from_queue(Queue(queue))
            for callback in self.callbacks:
                callback.take_results(self, module, results.get(callback.state_key))
        return result

    def _begin(self, module: TrainModule) -> None:
        """Begin a fit; for another module, forget the last one, and reset callbacks to before their first fit."""
        self.should_stop = False
        if self._last_module is None or self._last_module() is not module:
            self._last_module, self._last_state = weakref.ref(module), None
            self.metrics, self.strategy.report = {}, None
            self.load_state_dict({"epochs": 0, "global_step": 0, "callbacks": copy.deepcopy(self._first_states)})
        for callback in self.callbacks:
            self._first_states.setdefault(callback.state_key, copy.deepcopy(callback.state_dict()))

    def __getattr__(self, name: str) -> Never:
        raise AttributeError(name) if name.startswith("_") else lacking("Trainer", name, Trainer)

    def __getstate__(self) -> dict[str, Any]:
        # Another process receives these states with its task.
        return {**vars(self), "_last_module": None, "_last_state": None, "_first_states": {}, "_trained": None}

    # -- for modules and callbacks ------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Latest value of every metric, as tensors."""
        return {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in self.metrics.items()}

    @property
    def logger(self) -> Any:
        """First logger; ``None`` without one."""
        loggers = [each for callback in self.callbacks if isinstance(callback, Logs) for each in callback.loggers]
        return loggers[0] if loggers else None

    @property
    def estimated_stepping_batches(self) -> float:
        """Number of optimizer steps of the current fit, for schedulers; infinite if no limit is known.

        It is computed from the ranks' numbers of batches when the fit begins.
        """
        run = self.run
        epochs = self.max_epochs if is_limit(self.max_epochs) else math.inf
        steps = run.steps_of_an_epoch * epochs if isinstance(run, Fit) and epochs else 0
        return min(steps, self.max_steps) if is_limit(self.max_steps) else steps

    @property
    def join_report(self) -> JoinReport | None:
        """Report on the ranks in the last epoch; ``None`` before the first."""
        return self.strategy.report

    @property
    def run(self) -> Run:
        """Current run.

        Raises:
            RuntimeError: Outside a run.
        """
        if self._run is None:
            raise RuntimeError("The trainer has no current run. Call this in a hook or a step. [J271]")
        return self._run

    @property
    def global_rank(self) -> int:
        """Rank of this process; outside a run 0, or the rank that torchrun has set."""
        return self._place.rank if self._run is None else self._run.place.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine, in a run."""
        return self._place.local_rank if self._run is None else self._run.place.local_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def current_epoch(self) -> int:
        """Current epoch, from 0; outside a fit, the number of completed epochs."""
        return self.epochs if self._run is None else self._run.position.epoch

    def save_checkpoint(self, path: str | os.PathLike[str]) -> bool:
        """Write a checkpoint.

        All ranks hold parts of it, so all ranks with data call this at the same step, or all ranks call it after the
        fit. A fit resumes from the file bit for bit, in whichever hook it was written. Between the batches of one
        accumulated step, the file does not contain the gradients so far.

        Args:
            path: The file to write.

        Returns:
            Whether this rank wrote the file.

        Raises:
            RuntimeError: Before any fit, in another run, or after the trained module was deleted.
            TypeError: If a state holds objects other than plain data and tensors.
        """
        if self._run is not None and self._run.optimizers:
            state = self._run.snapshots.take()
        else:
            module, state = self._last_module and self._last_module(), self._last_state
            if self._run is not None or module is None or (state is None and self.is_global_zero):
                raise RuntimeError(
                    "The trainer has no fit to save, or the module of its last fit is gone. Call save_checkpoint in a"
                    " fit, or after one while you hold its module. [J275]"
                )
            state = None if state is None else {**state, "module": module.state_dict()}
        if state is not None:
            self.checkpoint_io.save_checkpoint(state, os.fspath(path))
        return state is not None

    def hand_over(self, state: dict[str, Any]) -> None:
        """Keep the snapshot of the end of a fit for the process that started the run, even if hooks raise later."""
        if self.run.is_at_home:
            self._trained = state
        else:
            write(state, self.run.task.folder / "snapshot")

    @property
    def _place(self) -> Place:
        """Place of this process outside a run."""
        return self.strategy.place(self.world_size) or Place(0, 1, 0)

    def note(self, callback: Callback) -> None:
        """Send a callback's state to the process that started the run, which receives it even if the run fails."""
        task = self.run.task
        if os.getpid() != task.home:
            write(callback.state_dict(), task.folder / f"callback-{self.callbacks.index(callback)}")


# -- arguments --------------------------------------------------------------------------------------------------------


def _refuse_unknown(called: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise a ``TypeError`` for the first name, which is not an argument of the class or method that was called."""
    known = [*inspect.signature(called).parameters][:-1]
    for name in names:
        raise TypeError(f"{called.__name__} has no argument {name!r}. Use one of {', '.join(known)}. {REST}. [J643]")


def _checked_loader(name: str, loader: Any) -> Any:
    """Return the loader that was passed, by itself or as the only one of a list."""
    if isinstance(loader, Dataset):
        raise TypeError(f"{name} is a data set. Wrap it: DataLoader(dataset, batch_size=...). [J186]")
    given, parts = loader, list[Any]()
    if isinstance(loader, (list, tuple)):
        parts = list(given)
        if len(parts) == 1 and isinstance(parts[0], DataLoader):
            return cast("Any", parts[0])
    elif isinstance(loader, dict):
        parts = list(given.values())
    if any(isinstance(part, DataLoader) for part in parts):
        raise TypeError(
            f"{name} holds several loaders, and the trainer takes one. Concatenate their data sets with"
            " torch.utils.data.ConcatDataset. To validate on each of them, call validate on each. [J596]"
        )
    if name != "val_loader" or loader is not None:
        check_loader(given)
    return given


def _world_size(devices: Any, num_nodes: int, accelerator: str, strategy: Strategy) -> int:
    """Return the number of processes on all nodes.

    With ``devices="auto"``, it is the number that a launcher has started; without a launcher, one for each GPU, or 1.
    """
    if devices != "auto" and not (isinstance(devices, int) and not isinstance(devices, bool)):
        raise TypeError(
            f"{devices=} is not a number of processes. Pass a number, or 'auto'. To choose GPUs, set"
            " CUDA_VISIBLE_DEVICES before the script starts. [J593]"
        )
    place = strategy.place(1 if devices == "auto" else devices * num_nodes)
    started = None if place is None else place.world_size
    gpus = None if accelerator == "cpu" else torch.accelerator.device_count()
    on_node = ((gpus or 1) if strategy.is_distributed else 1) if devices == "auto" else devices
    wanted = started if started is not None and devices == "auto" else on_node * num_nodes
    too_many = gpus is not None and devices != "auto" and devices > gpus
    no_node = num_nodes > 1 and started is None and node_of(on_node, num_nodes, os.environ) is None
    if wanted < 1 or too_many or no_node or started not in (None, wanted):
        raise ValueError(
            f"{devices=} and {num_nodes=} do not fit this machine's GPUs ({gpus}) or the processes that torchrun or"
            f" cluster_environment started ({started}). Remove devices and num_nodes from the Trainer's"
            " arguments, or pass strategy='single' to have each process train by itself. For several nodes without a"
            " launcher, set MASTER_ADDR, MASTER_PORT and NODE_RANK on each. [J172]"
        )
    return wanted


def _in_order(callbacks: Any, others: Sequence[Callback] = ()) -> list[Callback]:
    """Return the callbacks, and then others, in the order in which they are called."""
    is_one = isinstance(callbacks, Callback) or not hasattr(callbacks or (), "__iter__")
    listed: list[Any] = [callbacks] if is_one else list(cast("Iterable[Any]", callbacks or ()))
    listed += others
    for callback in listed:
        check_callback(callback)
    listed.sort(key=lambda callback: callback.is_last)
    keys = [callback.state_key for callback in listed]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"Several callbacks have the same state_key: {', '.join(keys)}. Define a different one for each. [J178]"
        )
    return listed


# -- one rank's part --------------------------------------------------------------------------------------------------


def work(place: Place, trainer: Trainer, module: TrainModule, loaders: Mapping[str, Any], task: Task) -> Any:
    """Do one rank's part of a run, on all ranks.

    Returns:
        The output of the run, as one tuple: the fields of :class:`Result`, and the arguments of ``Trainer._receive``.
    """
    strategy = trainer.strategy
    strategy.setup(place.rank, place.world_size)
    run = (Fit if task.stage == "fit" else Run)(trainer, module, task, place)
    try:
        return _work(run, trainer, module, loaders)
    finally:
        try:
            strategy.teardown()
        finally:
            with suppress(RuntimeError):  # an error of the device says the same, and is on its way
                release(module, run.device)


def _work(run: Run, trainer: Trainer, module: TrainModule, loaders: Mapping[str, Any]) -> Any:
    task, outputs, queue, results = run.task, dict[str, Any](), Queue(), dict[str, Any]()
    if not run.is_at_home:
        rng.start_from(task.random)
    trainer._run, module._trainer = run, trainer  # pyright: ignore[reportPrivateUsage]
    try:
        with keeping_modes(module), _watched(run), ending_forks():
            run.set_up()
            if isinstance(run, Fit):
                run.start(**loaders)
                run.run()
            else:
                if task.saved is not None:
                    load(run, task.saved)
                outputs["metrics"], outputs["predictions"] = evaluate(run, loaders["loader"], task.stage)
            if run.place.local_rank == 0:
                with replaced(run, "apart", "results_to_return"):
                    module.add_to_queue(queue)
                    results = {each.state_key: each.results_to_return(trainer, module) for each in trainer.callbacks}
    finally:
        if isinstance(run, Fit):
            run.end()
        trainer._run = module._trainer = None  # pyright: ignore[reportPrivateUsage]
    result = Result(
        task.stage,
        **trainer.state_dict(),
        callback_metrics=dict(trainer.metrics),
        join_report=trainer.join_report,
        stopped=trainer.should_stop,
        **outputs,
    )
    output = tuple(vars(result).values())
    if run.place.local_rank != 0:
        return *output, None, None, None, {}
    weights = None if run.is_at_home else changed_weights(run)
    random = None if run.is_at_home else rng.capture()
    back = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, (list(queue), results))
    return *output, weights, random, *back


@contextmanager
def _watched(run: Run) -> Generator[None]:
    """Return the context of a run, which is a block of all ranks, with the callbacks' first and last hooks.

    All last hooks are called, whatever raises. The context raises the first exception, which is the cause. The other
    ranks are sent it before these hooks.
    """
    trainer, module, stage, raised = run.trainer, run.module, run.task.stage, list[BaseException]()

    def attempt(call: Callable[..., object], *args: Any) -> None:
        try:
            call(*args)
        except BaseException as error:
            fail(error)

    def fail(error: BaseException) -> None:
        run.apart = "a run that has raised an error"
        raised.append(error)
        if len(raised) > 1:
            return logger.error("a hook raised after the run had raised", exc_info=error)
        try:
            trainer.strategy.close(error)
        except BaseException as cause:
            raised[0] = cause
        return None

    trainer.strategy.open([run.snapshots])
    try:
        run.call("on_start", stage)
        run.takes_metrics = stage != "predict"
        yield
    except BaseException as error:
        fail(error)
    run.takes_metrics = False
    for name, *args in (("on_exception", *raised), ("on_end", stage), ("teardown", stage)):
        for callback in trainer.callbacks if args else ():
            attempt(getattr(callback, name), trainer, module, *args)
    attempt(module.teardown, stage)
    attempt(trainer.strategy.close)
    if raised:
        raise raised[0]
