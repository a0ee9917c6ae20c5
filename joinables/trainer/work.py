"""One rank's part of a run (:func:`work`), and how its results get to the process that asked for the run, its *home*.

If processes were started for the run, these files take them there, in the folder of the run's ``Task``::

    home             written by rank 0 at the end: the state of a fit, buffers that are not in it, the random state
    callback-INDEX   written during the run, for a callback whose state matters even if the run fails
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from join.transfer import broadcast_tree
from joinables.train_mode import keeping_modes
from joinables.trainer.callbacks.base import Callback
from joinables.trainer.checkpoints import snapshot
from joinables.trainer.checkpoints.file import read_checkpoint, write_checkpoint
from joinables.trainer.loops import rng
from joinables.trainer.loops.evaluate import evaluate, predict
from joinables.trainer.loops.fit import FitLoop
from joinables.trainer.loops.run import FitRun, Run, Task
from joinables.trainer.module import TrainModule
from joinables.trainer.result import Result

if TYPE_CHECKING:
    from joinables.trainer.trainer import Trainer

logger = logging.getLogger("joinables")


def work(trainer: Trainer, module: TrainModule, loaders: Mapping[str, Any], task: Task) -> Result:
    """Do one rank's part of a run; called on all ranks."""
    if not task.is_at_home:
        rng.start_from(task.random)
    run = FitRun(trainer, module, task) if task.stage == "fit" else Run(trainer, module, task)
    made: dict[str, Any] = {}
    with ExitStack() as stack:
        stack.enter_context(_attached(run))
        at_end = stack.enter_context(ExitStack())  # after the callbacks' on_end
        stack.enter_context(keeping_modes(module))
        stack.callback(run.call, "on_end", task.stage)
        stack.callback(setattr, run, "takes_metrics", False)
        stack.enter_context(_telling_callbacks(run))
        saved = _read_saved(task) if run.rank == 0 else None
        run.call("on_start", task.stage)
        run.takes_metrics = True
        if isinstance(run, FitRun):
            loop = FitLoop(run, loaders["train_loader"], loaders["val_loader"])
            at_end.callback(loop.end)
            loop.start(saved)
            loop.run()
            made["state"] = run.take_snapshot()
        else:
            if task.ckpt_path is not None:
                module.load_state_dict(broadcast_tree(run.collective, saved and saved["module"], 0))
            if task.stage == "predict":
                made["predictions"] = tuple(predict(run, loaders["loader"]))
            else:
                made["metrics"] = evaluate(run, loaders["loader"], task.stage)
        made["epochs"], made["global_step"] = trainer.epochs, trainer.global_step
    if run.rank == 0 and not task.is_at_home:
        _send_home(task, module, made.pop("state", None))
    return _result(trainer, task, made)


def _read_saved(task: Task) -> dict[str, Any] | None:
    """The checkpoint that the task begins from, if any; read on rank 0."""
    if task.ckpt_path is None:
        return None
    # The state of the last fit, which comes from the home process, may hold objects that a checkpoint must not.
    saved = read_checkpoint(task.ckpt_path, trusted=task.ckpt_path.parent == task.folder)
    if task.stage != "fit":
        snapshot.check(saved, str(task.ckpt_path), {"module"})
    return saved


def _result(trainer: Trainer, task: Task, made: Mapping[str, Any]) -> Result:
    """The result of a run on this rank; ``made`` has the fields that not all runs have."""
    keeper = trainer.checkpoint_callback
    return Result(
        stage=task.stage,
        callback_metrics=dict(trainer.metrics),
        callbacks={each.state_key: each.state_dict() for each in trainer.callbacks},
        best_model_path="" if keeper is None else keeper.best_model_path,
        best_model_score=None if keeper is None else keeper.best_model_score,
        join_report=trainer.join_report,
        stopped=trainer.should_stop,
        **made,
    )


@contextmanager
def _attached(run: Run) -> Generator[None]:
    """Let the module and the callbacks find the run through the trainer, as long as it lasts."""
    trainer, module = run.trainer, run.module
    trainer._run, module._trainer = run, trainer  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        trainer._run = module._trainer = None  # pyright: ignore[reportPrivateUsage]
        run.strategy.teardown()


@contextmanager
def _telling_callbacks(run: Run) -> Generator[None]:
    """A context that calls the callbacks' ``on_exception`` with what is raised in it."""
    try:
        yield
    except BaseException as error:
        try:
            run.call("on_exception", error)
        except Exception:  # the exception that is under way says more
            logger.exception("a callback raised in on_exception")
        raise


# -- the way home -----------------------------------------------------------------------------------------------------


def _send_home(task: Task, module: TrainModule, state: Mapping[str, Any] | None) -> None:
    """Write the file ``home``."""
    unsaved: dict[str, torch.Tensor] = {}
    if state is not None:
        saved = module.state_dict().keys()
        unsaved = {name: buffer for name, buffer in module.named_buffers() if name not in saved}
    home = {"state": state, "buffers": unsaved, "random": rng.capture()}
    write_checkpoint(home, task.folder / "home", durable=False)


def receive_home(folder: Path) -> dict[str, Any] | None:
    """What rank 0 has sent, if it was another process; the tensors lie in the file, which goes with the folder."""
    return read_checkpoint(folder / "home", trusted=True) if (folder / "home").exists() else None


def put_buffers(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Give ``module`` these buffers: in place, or as new ones where it has none of that shape and type."""
    own = dict(module.named_buffers())
    for name, buffer in buffers.items():
        if name in own and (own[name].shape, own[name].dtype) == (buffer.shape, buffer.dtype):
            with torch.no_grad():
                own[name].copy_(buffer)
        else:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, buffer.clone())


def send_callback(task: Task, index: int, callback: Callback) -> None:
    """Send the state of a callback home, where it is taken over if the run fails."""
    if not task.is_at_home:
        write_checkpoint(callback.state_dict(), task.folder / f"callback-{index}", durable=False)


def receive_callbacks(folder: Path, callbacks: Sequence[Callback]) -> None:
    """Take over the states that callbacks sent home, after a run that failed."""
    for index, callback in enumerate(callbacks):
        path = folder / f"callback-{index}"
        if not path.exists():
            continue
        try:
            callback.load_state_dict(read_checkpoint(path, trusted=True))
        except Exception as error:  # why the run failed is under way, and must not be replaced
            logger.warning("cannot read the state that %s had: %s", type(callback).__name__, error)
