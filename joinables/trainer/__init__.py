"""Training on uneven data in one call, on one process or many: :class:`Trainer`.

Call ``Trainer(devices=4).fit(module, loader)`` with a :class:`TrainModule` whose methods define a step. The modules:

    trainer             the class that users call, and one rank's part of a run
    module, arguments   base classes of modules and callbacks; kinds of arguments
    strategy, own       the wrapper of a module, and its gradients; strategies over other libraries than torch's
    launch              one function on all ranks, in processes started here or by a launcher
    run                 fit, evaluation and prediction on one rank, and their state
    data, metrics, rng  distribution of batches, and a rank's position in them; means over all samples; random states
    callbacks           the callbacks that write checkpoints and stop early
    loggers             what is written and shown after each epoch
    output, settings    lines and files of the processes that are started; their settings
    checkpoint, files   files that a fit resumes from, and the weights that a failure after training would lose
"""

from joinables.processes import LaunchError
from joinables.trainer.callbacks import EarlyStopping, ModelCheckpoint
from joinables.trainer.checkpoint import CheckpointIO, FileCheckpointIO
from joinables.trainer.data import UnevenDistributedSampler
from joinables.trainer.launch import (
    Launcher,
    NotPicklable,
    RemoteTraceback,
    WorkerDied,
    WorkerRaised,
)
from joinables.trainer.loggers import CSVLogger
from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.own import HorovodStrategy, XLAStrategy
from joinables.trainer.strategy import DDPStrategy, Strategy, register_strategy, strategies
from joinables.trainer.trainer import Trainer

__all__ = [
    "CSVLogger",
    "Callback",
    "CheckpointIO",
    "DDPStrategy",
    "EarlyStopping",
    "FileCheckpointIO",
    "HorovodStrategy",
    "LaunchError",
    "Launcher",
    "ModelCheckpoint",
    "NotPicklable",
    "RemoteTraceback",
    "Strategy",
    "TrainModule",
    "Trainer",
    "UnevenDistributedSampler",
    "WorkerDied",
    "WorkerRaised",
    "XLAStrategy",
    "register_strategy",
    "strategies",
]
