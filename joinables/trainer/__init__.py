"""Trainer: uneven-data training in one call, on one process or many.

``Trainer(devices=4).fit(module, loader)`` with a :class:`TrainModule` that says what a step is.
"""

from joinables.trainer.callbacks.base import Callback
from joinables.trainer.callbacks.checkpoint import ModelCheckpoint
from joinables.trainer.callbacks.early_stopping import EarlyStopping
from joinables.trainer.callbacks.files import CSVMetrics, TensorBoardMetrics
from joinables.trainer.callbacks.progress import ProgressBar
from joinables.trainer.ddp_strategy import DDPStrategy
from joinables.trainer.launch.environment import Environment, LocalEnvironment, Place
from joinables.trainer.launch.errors import LaunchError, NotPicklable, RemoteTraceback, WorkerDied, WorkerRaised
from joinables.trainer.launch.launcher import Launcher
from joinables.trainer.loops.data import UnevenDistributedSampler
from joinables.trainer.module import TrainModule
from joinables.trainer.result import Result
from joinables.trainer.strategy import SingleStrategy, Strategy, register_strategy, strategies
from joinables.trainer.trainer import Trainer

__all__ = [
    "CSVMetrics",
    "Callback",
    "DDPStrategy",
    "EarlyStopping",
    "Environment",
    "LaunchError",
    "Launcher",
    "LocalEnvironment",
    "ModelCheckpoint",
    "NotPicklable",
    "Place",
    "ProgressBar",
    "RemoteTraceback",
    "Result",
    "SingleStrategy",
    "Strategy",
    "TensorBoardMetrics",
    "TrainModule",
    "Trainer",
    "UnevenDistributedSampler",
    "WorkerDied",
    "WorkerRaised",
    "register_strategy",
    "strategies",
]
