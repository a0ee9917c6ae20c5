"""Training, validation, test and prediction in one call each: :class:`Trainer`.

A call runs one function, :func:`work`, on every rank, which returns one tuple. The trainer starts the processes, or
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
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Never

from join import JoinReport
from join.collectives._torch_private import pytree
from join.errors import add_note, described
from join.read_ahead import check_loader
from joinables.modules import keeping_modes, replaced
from joinables.processes import ending_forks
from joinables.trainer import rng
from joinables.trainer.arguments import REST, accelerator_of, check_kinds, lacking, listed
from joinables.trainer.checkpoint import CheckpointIO, FileCheckpointIO, keep_trained
from joinables.trainer.data import order_seed
from joinables.trainer.files import temporary_folder
from joinables.trainer.launch import Place, node_of, read, write
from joinables.trainer.loggers import is_watched, loggers_of
from joinables.trainer.module import Callback, Queue, TrainModule, check_module, refuse_hooks
from joinables.trainer.run import Fit, Run, Task
from joinables.trainer.strategy import Strategy, strategy_of

logger = logging.getLogger("joinables")

Checkpoint: TypeAlias = "str | os.PathLike[str] | None"


class Trainer:
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
        max_epochs: The number of epochs to stop after, over all fits. The default is one epoch, or no limit if
            ``max_steps`` is set.
        max_steps: The number of optimizer steps to stop after, over all fits; ``None`` for no limit.
        accumulate_grad_batches: The number of batches in one optimizer step. A change takes effect with the next epoch.
        callbacks: Objects that are called at certain points of a run.
        default_root_dir: The folder for files; by default, the current directory.
        logger: A logger or several, which receive the metrics: ``CSVLogger(folder)``, a logger of Lightning, or any
            object with ``log_metrics(metrics, step)`` and ``log_hyperparams(params)``. With ``None`` or ``False``,
            nothing is logged. If a logger raises, the fit continues, and a warning has the reason.
        enable_progress_bar: Whether rank 0 shows the metrics of each epoch on stderr; by default, if stderr is a
            terminal or this is a notebook.
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
        max_epochs: int | None = None,
        max_steps: int | None = None,
        accumulate_grad_batches: int = 1,
        callbacks: Sequence[Callback] | Callback | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        logger: Any = None,
        enable_progress_bar: bool | None = None,
        seed: int | None = None,
        checkpoint_io: CheckpointIO | None = None,
        **others: Never,
    ) -> None:
        if others:
            known = ", ".join([*inspect.signature(Trainer).parameters][:-1])
            raise TypeError(f"Trainer has no argument {next(iter(others))!r}. Use one of {known}. {REST}. [J643]")
        check_kinds(locals())
        self.accelerator = accelerator_of(accelerator)
        self.strategy = strategy_of("ddp" if strategy == "auto" else strategy)
        self.world_size = _world_size(devices, num_nodes, self.accelerator, self.strategy)
        if strategy == "auto" and self.world_size == 1:
            self.strategy = strategy_of("single")
        self.checkpoint_io: Any = FileCheckpointIO() if checkpoint_io is None else checkpoint_io
        if not isinstance(self.checkpoint_io, CheckpointIO):
            raise TypeError(
                f"{checkpoint_io=} lacks a method. Pass an object with the methods save_checkpoint(checkpoint, path),"
                " load_checkpoint(path) and remove_checkpoint(path). [J712]"
            )
        self.num_nodes = num_nodes
        self.max_epochs = 1 if max_epochs is None and max_steps is None else max_epochs
        self.max_steps, self.seed = max_steps, seed
        self.accumulate_grad_batches = accumulate_grad_batches
        self.loggers = loggers_of(logger)
        self.enable_progress_bar = is_watched() if enable_progress_bar is None else enable_progress_bar
        self.callbacks = _in_order(callbacks)
        self.default_root_dir = Path(default_root_dir or ".").absolute()
        self.epochs = 0
        """The number of completed epochs, over all fits of the module."""
        self.global_step = 0
        """The number of optimizer steps, over all fits of the module."""
        self.callback_metrics: dict[str, float] = {}
        """The latest value of every metric."""
        self.should_stop = False
        """Whether the fit ends after the current epoch; set it to ``True`` on any rank."""
        self._run: Run | None = None
        """The current run of this process; ``None`` outside a run."""
        self._last_module: weakref.ref[TrainModule] | None = None
        self._last_state: dict[str, Any] | None = None
        """The snapshot that the next fit of the last module resumes from, without the weights.

        It exists on rank 0 only, and is ``None`` before a fit has ended. :mod:`joinables.trainer.run` has its form.
        """
        self._first_states: dict[str, Any] = {}  # the callbacks' states before their first fit, by state_key

    # -- runs ---------------------------------------------------------------------------------------------------------

    def fit(
        self, module: TrainModule, train_loader: Any, val_loader: Any = None, ckpt_path: Checkpoint = None
    ) -> dict[str, float]:
        """Train ``module`` up to ``max_epochs`` or ``max_steps``; the trainer then has the counters and metrics.

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

        Returns:
            The latest value of each metric, as in ``callback_metrics``. All else that a fit results in is in the
            module, and in the attributes of the trainer and of its callbacks.
        """
        if val_loader is not None:
            check_module(module, "validate")
        if self.max_epochs is None and self.max_steps is None:
            raise ValueError(
                "max_epochs and max_steps set no end to this fit. Set one of them on the Trainer to a number of epochs"
                " or steps. [J268]"
            )
        self._launch("fit", module, {"train_loader": train_loader, "val_loader": val_loader}, ckpt_path)
        return dict(self.callback_metrics)

    def validate(self, module: TrainModule, loader: Any, ckpt_path: Checkpoint = None) -> list[dict[str, float]]:
        """Run ``validation_step`` over ``loader`` and return a list with the metrics, by name.

        With ``ckpt_path``, ``module`` loads the weights of that checkpoint first, and keeps them. ``test`` and
        ``predict`` do the same.
        """
        return [self._launch("validate", module, {"loader": loader}, ckpt_path)]

    def test(self, module: TrainModule, loader: Any, ckpt_path: Checkpoint = None) -> list[dict[str, float]]:
        """Run ``test_step`` over ``loader`` and return a list with the metrics, by name."""
        return [self._launch("test", module, {"loader": loader}, ckpt_path)]

    def predict(self, module: TrainModule, loader: Any, ckpt_path: Checkpoint = None) -> list[Any]:
        """Run ``predict_step`` over ``loader`` and return each batch's outputs on the CPU, in the data set's order.

        If a launcher started the processes, rank 0 returns all outputs, and the other ranks return none.
        """
        return self._launch("predict", module, {"loader": loader}, ckpt_path)

    def _launch(self, stage: str, module: TrainModule, loaders: dict[str, Any], ckpt_path: Any) -> Any:
        """Run a stage on all ranks, bring its output into this process, and return its results."""
        check_module(module, stage)
        for name, loader in loaders.items():
            parts = cast("Sequence[Any]", loader) if isinstance(loader, (list, tuple)) else ()
            if isinstance(loader, Dataset) or any(isinstance(part, DataLoader) for part in parts):
                raise TypeError(
                    f"{name} is a data set, or has several loaders. Pass one loader, such as DataLoader(dataset,"
                    " batch_size=...). [J186]"
                )
            if name != "val_loader" or loader is not None:
                check_loader(loader)
        if stage == "fit" and not module.automatic_optimization and self.accumulate_grad_batches != 1:
            raise ValueError(
                "accumulate_grad_batches needs automatic_optimization=True. Remove accumulate_grad_batches from the"
                " Trainer's arguments, and accumulate in training_step. [J183]"
            )
        self.callbacks = _in_order(self.callbacks)  # the user may have changed them
        if self._run is not None:
            raise RuntimeError(f"This trainer is running, so {stage} cannot be called. Call it after the run. [J270]")
        # This process reads the file, before anything changes: a missing or broken one does not fail in a worker.
        saved = None if ckpt_path is None else self.checkpoint_io.load_checkpoint(os.fspath(cast("str", ckpt_path)))
        if stage == "fit":
            self._begin(module)
            saved = saved or self._last_state
        before = self.epochs, self.global_step
        self.strategy.check(several_backwards=stage == "fit" and not module.automatic_optimization)
        with temporary_folder() as folder:
            seed = order_seed(loaders.get("train_loader"), self.seed)
            task = Task(stage, saved, Path(folder), os.getpid(), rng.capture(), seed)
            try:
                how: dict[str, Any] = {"num_nodes": self.num_nodes, "accelerator": self.accelerator}
                args = work, Place, self, module, loaders, task
                output = self.strategy.launch(*args, world_size=self.world_size, **how)
                results, queue = self._receive(module, output)
                before = self.epochs, self.global_step
                if queue is not None:
                    module.get_from_queue(Queue(queue))
                return results
            except BaseException as error:
                if (path := task.folder / "trained").exists():
                    task.trained.update(read(path))
                if task.trained:
                    kept = keep_trained(self.default_root_dir, task.trained)
                    add_note(error, kept := f"The module was trained before this error. {kept}")
                    logging.getLogger("joinables").error(kept)  # Python 3.10 has no notes
                for index, callback in enumerate(self.callbacks):
                    if (path := Path(folder, f"callback-{index}")).exists():
                        callback.load_state_dict(torch.load(path, weights_only=False))
                self.epochs, self.global_step = before
                raise
            finally:
                task.trained.clear()

    def _receive(self, module: TrainModule, output: tuple[Any, ...]) -> tuple[Any, Any]:
        """Bring the output of :func:`work` into this process, the weights first; return its results and its queue."""
        results, snapshot, state, report, stopped, queue, random, weights = output
        if random is not None:  # the run was in another process
            try:
                if weights is not None:
                    module.load_state_dict(weights)
            except Exception as error:
                if snapshot is None:
                    raise
                warnings.warn(
                    f"This {type(module).__name__} could not load all that was trained, since it has other parts than"
                    f" the module had in the fit, or its load_state_dict raised ({described(error)}). To have all"
                    " weights here too, make these parts in __init__."
                    f" {keep_trained(self.default_root_dir, {**state, 'module': weights})}",
                    stacklevel=4,  # at the call of fit
                )
            self.should_stop, self.strategy.report = stopped, report
            self.load_state_dict(state)
            rng.restore(random)
        if snapshot is not None:  # the tensors are copied, since the optimizer of the next fit would change them
            last = {**snapshot, **state}
            self._last_state = pytree.tree_map_only(torch.Tensor, lambda each: each.to("cpu", copy=True), last)
        return results, queue

    def _begin(self, module: TrainModule) -> None:
        """Begin a fit; for another module, forget the last one, and reset callbacks to before their first fit."""
        self.should_stop = False
        if self._last_module is None or self._last_module() is not module:
            self._last_module, self._last_state = weakref.ref(module), None
            self.strategy.report, callbacks = None, copy.deepcopy(self._first_states)
            self.load_state_dict({"epochs": 0, "global_step": 0, "metrics": {}, "callbacks": callbacks})
        for callback in self.callbacks:
            self._first_states.setdefault(callback.state_key, copy.deepcopy(callback.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and metrics, and the states of the callbacks; a rank out of data early loads these."""
        callbacks = {callback.state_key: callback.state_dict() for callback in self.callbacks}
        counts = {"epochs": self.epochs, "global_step": self.global_step}
        return {**counts, "metrics": dict(self.callback_metrics), "callbacks": callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. A callback that has none there stays as it is."""
        self.epochs, self.global_step = state["epochs"], state["global_step"]
        self.callback_metrics = dict(state["metrics"])
        for callback in self.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])

    def __getattr__(self, name: str) -> Never:
        raise AttributeError(name) if name.startswith("_") else lacking(self, name, Trainer)

    def __getstate__(self) -> dict[str, Any]:
        # Another process receives these states with its task.
        return {**vars(self), "_last_module": None, "_last_state": None, "_first_states": {}}

    # -- for modules and callbacks ------------------------------------------------------------------------------------

    @property
    def logger(self) -> Any:
        """First logger; ``None`` without one."""
        return self.loggers[0] if self.loggers else None

    @property
    def estimated_stepping_batches(self) -> float:
        """Number of optimizer steps of the current fit, for schedulers; infinite if no limit is known.

        It is computed from the ranks' numbers of batches when the fit begins.
        """
        if not isinstance(run := self.run, Fit) or self.max_epochs == 0:
            return 0
        batches = max(math.inf if length is None else length for length in run.plan.lengths)
        steps = batches if batches == math.inf else math.ceil(batches / self.accumulate_grad_batches)
        limits = steps * (math.inf if self.max_epochs is None else self.max_epochs), self.max_steps
        return min(limit for limit in limits if limit is not None)

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
        place = self.strategy.place(self.world_size) if self._run is None else self._run.place
        if place is not None:
            return place.rank
        node = node_of(self.world_size // self.num_nodes, self.num_nodes, os.environ)
        return 0 if node is None else node.ranks[0]

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
            if self._run is not None or module is None or (state is None and self.global_rank == 0):
                raise RuntimeError(
                    "The trainer has no fit to save, or the module of its last fit is gone. Call save_checkpoint in a"
                    " fit, or after one while you hold its module. [J275]"
                )
            state = None if state is None else {**state, "module": module.state_dict()}
        if state is not None:
            self.checkpoint_io.save_checkpoint(state, os.fspath(path))
        return state is not None

    def keep(self, trained: dict[str, Any]) -> None:
        """Keep trained weights for the process that started the run, even if the run fails later."""
        if self.run.is_at_home:
            self.run.task.trained.update(trained)
        else:
            write(trained, self.run.task.folder / "trained")

    def note(self, callback: Callback) -> None:
        """Send a callback's state to the process that started the run, which receives it even if the run fails."""
        if not self.run.is_at_home:
            write(callback.state_dict(), self.run.task.folder / f"callback-{self.callbacks.index(callback)}")


# -- arguments --------------------------------------------------------------------------------------------------------


def _world_size(devices: Any, num_nodes: int, accelerator: str, strategy: Strategy) -> int:
    """Return the number of processes on all nodes.

    With ``devices="auto"``, it is the number that a launcher has started; without a launcher, one for each GPU, or 1.
    """
    place = strategy.place(1 if devices == "auto" else devices * num_nodes)
    started = None if place is None else place.world_size
    gpus = None if accelerator == "cpu" else torch.accelerator.device_count()
    on_node = ((gpus or 1) if strategy.is_distributed else 1) if devices == "auto" else devices
    wanted = started if started is not None and devices == "auto" else on_node * num_nodes
    too_many = gpus is not None and devices != "auto" and devices > gpus
    no_node = num_nodes > 1 and started is None and node_of(on_node, num_nodes, os.environ) is None
    if too_many or no_node or started not in (None, wanted) or (wanted > 1 and not strategy.is_distributed):
        raise ValueError(
            f"{devices=} and {num_nodes=} do not fit this machine's GPUs ({gpus}), the processes that torchrun or"
            f" cluster_environment started ({started}), or strategy='single', with which each process trains by itself."
            " Remove devices and num_nodes from the Trainer's arguments. For several nodes without a launcher, set"
            " MASTER_ADDR, MASTER_PORT and NODE_RANK on each. [J172]"
        )
    return wanted


def _in_order(callbacks: Any) -> list[Callback]:
    """Return the callbacks in the order in which they are called."""
    for callback in (found := listed(callbacks)):
        if not isinstance(callback, Callback):
            kind = type(callback).__name__
            raise TypeError(
                f"callbacks has an object of type {kind}. Derive it from joinables.trainer.Callback. [J177]"
            )
        refuse_hooks(callback)
    found.sort(key=lambda callback: callback.is_last)
    keys = [callback.state_key for callback in found]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"Several callbacks have the same state_key: {', '.join(keys)}. Define a different one for each. [J178]"
        )
    return found


# -- one rank's part --------------------------------------------------------------------------------------------------


def work(place: Place, trainer: Trainer, module: TrainModule, loaders: Mapping[str, Any], task: Task) -> Any:
    """Do one rank's part of a run, on all ranks.

    Returns:
        The output of the run, as one tuple, which ``Trainer._receive`` unpacks.
    """
    trainer.strategy.setup(place.rank, place.world_size)
    run = (Fit if task.stage == "fit" else Run)(trainer, module, task, place)
    results, queue = None, Queue()
    with ExitStack() as stack:
        stack.callback(_free, run)
        stack.callback(trainer.strategy.teardown)
        stack.enter_context(replaced(trainer, "_run", run))
        stack.enter_context(replaced(module, "_trainer", trainer))
        if not run.is_at_home:
            rng.start_from(task.random)
        if isinstance(run, Fit):
            stack.callback(run.end)
        with keeping_modes(module), _watched(run), ending_forks():
            run.set_up()
            if isinstance(run, Fit):
                run.start(**loaders)
                run.run()
            else:
                if task.saved is not None:
                    run.load(task.saved)
                results = run.evaluate(loaders["loader"], task.stage)
            if place.local_rank == 0:
                module.add_to_queue(queue)
        if run.snapshot is not None:
            run.snapshot.pop("module", None)  # a later hook may have changed the weights
        output = results, run.snapshot, trainer.state_dict(), trainer.join_report, trainer.should_stop
        if place.local_rank != 0:
            return *output, None, None, None
        queued = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, list(queue))
        if run.is_at_home:
            return *output, queued, None, None
        return *output, queued, rng.capture(), module.state_dict() if task.stage == "fit" or task.saved else None


def _free(run: Run) -> None:
    """Free the device on which a run has computed."""
    with suppress(RuntimeError):  # an error of the device says the same, and is on its way
        if run.device.type != "cpu":
            run.module.cpu()
            getattr(torch.get_device_module(run.device), "empty_cache", lambda: None)()


@contextmanager
def _watched(run: Run) -> Generator[None]:
    """Return the context of a run, which is a block of all ranks, and calls the last hooks.

    All last hooks are called, whatever raises. The context raises the first exception, which is the cause. The other
    ranks are sent it before these hooks.
    """
    trainer, stage, raised = run.trainer, run.task.stage, list[BaseException]()

    @contextmanager
    def noting() -> Generator[None]:
        try:
            yield
        except BaseException as error:
            raised.append(error)
            if len(raised) > 1:
                return logger.error("a hook raised after the run had raised", exc_info=error)
            try:
                trainer.strategy.close(error)
            except BaseException as cause:
                raised[0] = cause
        return None

    trainer.strategy.open([run.snapshots])
    run.takes_metrics = stage != "predict"
    with noting():
        yield
    run.takes_metrics = False
    for hook in run.hooks("teardown"):
        with noting():
            hook(stage)
    with noting():
        trainer.strategy.close()
    run.log.end("failed" if raised else "success")
    if raised:
        raise raised[0]
