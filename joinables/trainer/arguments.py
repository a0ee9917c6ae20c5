"""What is checked of the :class:`Trainer`'s arguments, each by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from joinables.trainer.callbacks.base import Callback
from joinables.trainer.callbacks.checkpoint import ModelCheckpoint
from joinables.trainer.callbacks.files import MetricFiles
from joinables.trainer.callbacks.progress import ProgressBar
from joinables.trainer.hooks import check_callback_hooks
from joinables.trainer.launch.environment import detect_environment


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is no whole number, or less than ``least``.

    Raises:
        TypeError, ValueError: that name the argument and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def checked_accelerator(accelerator: Any) -> str:
    """``"cpu"`` or ``"cuda"``, whichever is meant.

    Raises:
        ValueError: if it is neither, or there is no GPU.
    """
    if accelerator not in ("auto", "cpu", "cuda", "gpu"):
        raise ValueError(f"accelerator={accelerator!r} is none of 'auto', 'cpu', 'cuda', 'gpu'")
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"accelerator={accelerator!r} and torch finds no GPU; use 'cpu'")
    return "cpu" if accelerator == "cpu" else "cuda"


def check_loader(name: str, loader: Any, epochs: int) -> None:
    """Refuse what does not hand out batches in each of so many epochs.

    Raises:
        TypeError: that says what to give.
    """
    kind = cast("type[object]", type(loader)).__name__
    if _is_several(loader):
        raise TypeError(
            f"{name} is a {kind} of loaders, and one at a time is gone through; join their data sets in a"
            " torch.utils.data.ConcatDataset, or make several calls"
        )
    if isinstance(loader, Dataset):
        raise TypeError(f"{name} is a {kind}; wrap it: DataLoader(dataset, batch_size=...)")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{name} is a {kind}; give a DataLoader, or what can be iterated for batches")
    if isinstance(loader, Iterator) and epochs > 1:
        raise TypeError(
            f"{name} is a {kind}, which is over after one epoch, and there are {epochs} to come; give"
            " what can be iterated again"
        )


def _is_several(loader: Any) -> bool:
    """Whether this holds loaders and is none itself."""
    if isinstance(loader, (list, tuple)):
        return any(isinstance(each, DataLoader) for each in cast("Sequence[Any]", loader))
    return isinstance(loader, Mapping)


def world_size_for(devices: Any, num_nodes: int, accelerator: str) -> int:
    """The number of processes on all nodes: as many as asked for, or with ``"auto"`` as there are, or GPUs are.

    Raises:
        TypeError, ValueError: if ``devices`` is no number of them, or more than there are.
    """
    environment = detect_environment()
    there = torch.cuda.device_count() if accelerator == "cuda" else None
    if devices == "auto":
        return (there or 1) * num_nodes if environment.creates_processes else environment.place().world_size
    check_count("devices", devices)
    if there is not None and devices > there:
        raise ValueError(f"devices={devices} and torch finds {there} GPUs")
    wanted = devices * num_nodes
    if wanted > 1 and not environment.creates_processes and (started := environment.place().world_size) != wanted:
        raise ValueError(
            f"devices={devices} and num_nodes={num_nodes}, but {environment.name} started {started} processes; leave"
            " devices out to train on all of them"
        )
    return wanted


def check_alone(devices: Any) -> None:
    """Raise a ``ValueError`` if other processes were started, which would all train the same and write the same."""
    environment = detect_environment()
    if not environment.creates_processes and (there := environment.place().world_size) > 1:
        raise ValueError(
            f"devices={devices}, and {environment.name} started {there} processes, each of which would train alone;"
            " leave devices out to train on all of them, or pass strategy='single' if that is meant"
        )


def checked_callbacks(callbacks: Any, enable_progress_bar: bool) -> list[Callback]:
    """The callbacks in the order in which they are called.

    Raises:
        TypeError, ValueError: if one is none, has a hook that nobody calls, or the state key of another.
    """
    if callbacks is None:
        listed: list[Any] = []
    else:
        listed = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    for each in listed:
        if not isinstance(each, Callback):
            raise TypeError(f"callbacks has a {type(each).__name__}; derive it from joinables.trainer.Callback")
        check_callback_hooks(each)
    if enable_progress_bar and not any(isinstance(each, ProgressBar) for each in listed):
        listed.append(ProgressBar())
    # Files hold what the others logged, and a checkpoint what they did.
    listed.sort(key=lambda each: isinstance(each, (MetricFiles, ModelCheckpoint)))
    keys = [each.state_key for each in listed]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"callbacks has several {', '.join(twice)}; give each a state_key of its own")
    return listed
