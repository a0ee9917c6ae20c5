"""Training on uneven data in one call, on one process or many: :class:`Trainer`.

``Trainer(devices=4).fit(module, loader)``, with a :class:`TrainModule` whose methods say what a step is.

    trainer             what users call, and one rank's part of a run
    module              base classes of modules and callbacks
    strategy            how a module is wrapped, and how its gradients are made
    launch              one function on all ranks, in processes started here or by others
    loop, run           fit, evaluation and prediction on one rank, and what is known there
    data, metrics, rng  who gets which batch; means over all samples; random states
    callbacks           those that come with the trainer
    checkpoint          what a fit resumes from
"""

from joinables.trainer.callbacks import EarlyStopping, ModelCheckpoint
from joinables.trainer.data import UnevenDistributedSampler
from joinables.trainer.launch import Launcher, LaunchError, NotPicklable, RemoteTraceback, WorkerDied, WorkerRaised
from joinables.trainer.module import Callback, TrainModule
from joinables.trainer.strategy import DDPStrategy, Strategy, register_strategy, strategies
from joinables.trainer.trainer import Result, Trainer

__all__ = [
    "Callback",
    "DDPStrategy",
    "EarlyStopping",
    "LaunchError",
    "Launcher",
    "ModelCheckpoint",
    "NotPicklable",
    "RemoteTraceback",
    "Result",
    "Strategy",
    "TrainModule",
    "Trainer",
    "UnevenDistributedSampler",
    "WorkerDied",
    "WorkerRaised",
    "register_strategy",
    "strategies",
]
