"""Training on uneven data in one call, on one process or many: :class:`Trainer`.

``Trainer(devices=4).fit(module, loader)``, with a :class:`TrainModule` whose methods say what a step is.

    trainer, arguments          what users call, and the checks of what they give
    work, result                one rank's part of a run, and what it comes back with
    strategy, ddp_strategy      how a module is wrapped, and how its gradients are made
    module, hooks               what is trained
    launch                      one function on all ranks, in processes started here or by others
    loops                       fit, evaluation and prediction on one rank
    callbacks, checkpoints      what is called during a run; what a fit resumes from
"""

from joinables.trainer.callbacks.base import Callback
from joinables.trainer.callbacks.checkpoint import ModelCheckpoint
from joinables.trainer.callbacks.early_stopping import EarlyStopping
from joinables.trainer.callbacks.files import CSVMetrics, TensorBoardMetrics
from joinables.trainer.callbacks.progress import ProgressBar
from joinables.trainer.ddp_strategy import DDPStrategy
from joinables.trainer.launch import Launcher, LaunchError, NotPicklable, RemoteTraceback, WorkerDied, WorkerRaised
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
    "LaunchError",
    "Launcher",
    "ModelCheckpoint",
    "NotPicklable",
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
