"""Checks of what a :class:`Trainer` is given: its own arguments, and the module and the loaders of a run.

All of them raise a ``TypeError`` or a ``ValueError`` that names the argument and its value and says what to give.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from joinables.trainer.callbacks.base import Callback
from joinables.trainer.callbacks.checkpoint import ModelCheckpoint
from joinables.trainer.callbacks.files import MetricFiles
from joinables.trainer.callbacks.progress import ProgressBar
from joinables.trainer.ddp_strategy import DDPStrategy
from joinables.trainer.environment import detect_environment
from joinables.trainer.hooks import check_callback_hooks, check_hooks, check_step
from joinables.trainer.loops.data import copied_sampler
from joinables.trainer.module import TrainModule
from joinables.trainer.strategy import Strategy, strategy_of


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is not a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number [J164]")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least} [J165]")


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Refuse what is none of the ``known`` values."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, known))} [J166]")


def check_limits(max_epochs: Any, max_steps: Any, gradient_clip_val: Any) -> None:
    """Refuse what cannot be a limit, such as a negative number; ``None`` stands for no limit."""
    for name, value in (("max_epochs", max_epochs), ("max_steps", max_steps)):
        if value is not None:
            check_count(name, value, least=0)
    if isinstance(gradient_clip_val, str):
        raise TypeError(f"gradient_clip_val={gradient_clip_val!r} must be a number, or None for no limit [J167]")
    if gradient_clip_val is not None and not gradient_clip_val > 0:
        raise ValueError(f"gradient_clip_val={gradient_clip_val!r} must be positive, or None for no limit [J168]")


def checked_accelerator(accelerator: Any) -> str:
    """Return ``"cpu"`` or ``"cuda"``: which of them ``accelerator`` means on this machine."""
    check_choice("accelerator", accelerator, ("auto", "cpu", "cuda", "gpu"))
    if accelerator in ("cuda", "gpu") and not torch.cuda.is_available():
        raise ValueError(f"accelerator={accelerator!r} and torch finds no GPU; use 'cpu' [J169]")
    return "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu"


def world_size_for(devices: Any, num_nodes: Any, accelerator: str) -> int:
    """The number of processes on all nodes.

    With ``devices="auto"``, that is as many as a launcher has started; without a launcher, one for each GPU, or 1.
    """
    check_count("num_nodes", num_nodes)
    environment = detect_environment()
    there = torch.cuda.device_count() if accelerator == "cuda" else None
    if num_nodes > 1 and environment is None:
        raise ValueError(
            f"num_nodes={num_nodes}: processes on other nodes must be started there; use torchrun, SLURM or MPI [J170]"
        )
    if devices == "auto":
        return there or 1 if environment is None else environment.place.world_size
    check_count("devices", devices)
    if there is not None and devices > there:
        raise ValueError(f"devices={devices} and torch finds {there} GPUs; ask for as many at most [J171]")
    wanted = devices * num_nodes
    if wanted > 1 and environment is not None and (started := environment.place.world_size) != wanted:
        raise ValueError(
            f"devices={devices} and num_nodes={num_nodes}, but {environment.name} started {started} processes; leave"
            " devices out to train on all of them [J172]"
        )
    return wanted


def checked_strategy(strategy: str | Strategy, world_size: int, devices: Any) -> Strategy:
    """Return the strategy to train with; ``"auto"`` is ``"single"`` for one process, and ``"ddp"`` for several."""
    environment = detect_environment()
    if strategy == "auto":
        if world_size == 1 and environment is not None and (there := environment.place.world_size) > 1:
            raise ValueError(
                f"devices={devices}, and {environment.name} started {there} processes, each of which would train"
                " alone; leave devices out to train on all of them, or pass strategy='single' if that is meant [J173]"
            )
        return strategy_of("single" if world_size == 1 else "ddp")
    found = strategy_of(strategy)
    if not found.is_distributed and world_size > 1:
        raise ValueError(
            f"strategy='single' is for one process, and devices and num_nodes ask for {world_size}; leave strategy out"
            " [J174]"
        )
    return found


def with_sync_batchnorm(strategy: Strategy, accelerator: str) -> Strategy:
    """A copy of ``strategy`` that trains with SyncBatchNorm."""
    if accelerator == "cpu":
        raise ValueError(
            "sync_batchnorm=True needs GPUs: torch's SyncBatchNorm does not work on CPUs; leave it out [J175]"
        )
    if not isinstance(strategy, DDPStrategy):
        raise ValueError(
            "sync_batchnorm=True needs a strategy with several processes, such as 'ddp'; leave it out [J176]"
        )
    return strategy.with_sync_batchnorm()


def checked_callbacks(callbacks: Any, enable_progress_bar: bool) -> list[Callback]:
    """The callbacks in the order in which they are called."""
    several = () if callbacks is None else callbacks
    listed: list[Any] = [several] if isinstance(several, Callback) else list(several)
    for each in listed:
        if not isinstance(each, Callback):
            raise TypeError(f"callbacks has a {type(each).__name__}; derive it from joinables.trainer.Callback [J177]")
        check_callback_hooks(each)
    if enable_progress_bar and not any(isinstance(each, ProgressBar) for each in listed):
        listed.append(ProgressBar())
    # Files hold what the others logged, and a checkpoint what they did.
    listed.sort(key=lambda each: isinstance(each, (MetricFiles, ModelCheckpoint)))
    keys = [each.state_key for each in listed]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"callbacks has several {', '.join(twice)}; give each a state_key of its own [J178]")
    return listed


# -- of a run ---------------------------------------------------------------------------------------------------------

_NEEDED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": ("predict_step",),
}


def check_module(module: Any, stage: str) -> None:
    """Refuse a module that lacks what a run of this kind calls, or has hooks that nobody calls."""
    if not isinstance(module, TrainModule):
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise TypeError("the trainer wraps modules in DistributedDataParallel itself; pass the bare module [J179]")
        if isinstance(module, type):
            raise TypeError(f"module is the class {module.__name__}; pass an object: {module.__name__}(...) [J180]")
        raise TypeError(f"module is a {type(module).__name__}; derive it from joinables.trainer.TrainModule [J181]")
    for name in _NEEDED[stage]:
        inherited = getattr(type(module), name) is getattr(TrainModule, name) and name not in vars(module)
        if inherited and name != "predict_step":  # which has a default
            raise TypeError(f"{type(module).__name__} has no {name}, which {stage} needs; write one [J182]")
    check_step(module, _NEEDED[stage][0])
    check_hooks(module)


def check_manual(module: TrainModule, *, sets_steps: bool, scales_loss: bool) -> None:
    """Refuse, for a module that steps its optimizers itself, what goes with automatic optimization only."""
    if module.automatic_optimization:
        return
    if sets_steps:
        raise ValueError(
            "gradient_clip_val and accumulate_grad_batches are for automatic optimization; clip and accumulate in"
            " training_step [J183]"
        )
    if scales_loss:
        raise ValueError(
            "precision='16-mixed' scales the loss, which manual optimization cannot; use 'bf16-mixed' [J184]"
        )


def check_loader(name: str, loader: Any, epochs: int) -> None:
    """Refuse what is no loader of batches, or cannot be iterated in each of so many ``epochs``."""
    kind = cast("type[object]", type(loader)).__name__
    if _is_several(loader):
        raise TypeError(
            f"{name} is a {kind} of loaders, and one at a time is gone through; join their data sets in a"
            " torch.utils.data.ConcatDataset, or make several calls [J185]"
        )
    if isinstance(loader, Dataset):
        raise TypeError(f"{name} is a {kind}; wrap it: DataLoader(dataset, batch_size=...) [J186]")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{name} is a {kind}; give a DataLoader, or what can be iterated for batches [J187]")
    if isinstance(loader, Iterator) and epochs > 1:
        raise TypeError(
            f"{name} is a {kind}, which is over after one epoch, and there are {epochs} to come; give"
            " what can be iterated again [J188]"
        )


def _is_several(loader: Any) -> bool:
    """Whether this is a list, tuple or dict of loaders, and not a loader."""
    if isinstance(loader, (list, tuple)):
        return any(isinstance(each, DataLoader) for each in cast("Sequence[Any]", loader))
    return isinstance(loader, Mapping)


def warn_if_not_dealt_out(name: str, loader: Any, world_size: int) -> None:
    """Warn of a loader of which every rank may go through all batches; points at the line that called the trainer."""
    if not isinstance(loader, DataLoader):
        kind = f"is a {cast('type[object]', type(loader)).__name__} and no DataLoader"
        way_out = "make it an IterableDataset, in DataLoader(dataset, batch_size=None)"
    elif (sampler := copied_sampler(loader)) is not None:
        kind = f"has a sampler of its own, a {sampler}"
        way_out = "give its sampler a method set_epoch(epoch). For a part of a data set, take torch.utils.data.Subset"
    else:
        return
    warnings.warn(
        f"{name} {kind}, so it is not dealt out: each of the {world_size} ranks goes through what it gives"
        f" there. If that differs by rank, {way_out}",
        stacklevel=5,  # warn, _launch, fit, the wrapper of fit that checks keywords, and the caller
    )
