r"""Snapshots of a fit (:func:`take`, :func:`load`, :func:`resume`), and the checkpoint files that contain them.

A snapshot is everything that a fit resumes from. It has the same form in checkpoint files, for a second ``fit`` of the
same trainer, and on its way from processes that were started to the process that started them. It is a dict of plain
data and tensors::

    epochs, global_step          counters
    module                       the module's state dict
    optimizers, schedulers       a list each, in the order of configure_optimizers; sharded state is put together
    callbacks                    by state_key
    metrics                      the latest value of each
    ranks                        a list, by rank: batches trained on in the current epoch, the seed of its order, its
                                 metrics so far, random numbers

An epoch counts as completed after its validation and the steps of its schedulers. A fit that resumes from an earlier
snapshot of the epoch skips all batches and validates again.

Taking a snapshot is collective, since each rank holds a part. Ranks without data take part through ``Snapshots``::

    all-gather of the ranks' parts; the lowest rank with data becomes the writer
    for each sharded optimizer: its shards go to the writer

A file exists as a whole or not at all. It is a file of ``torch.save``, which ``torch.load(path)`` reads, followed by
the checksum of all bytes before it: ``\nsha256 `` and 64 hexadecimal digits. Readers of zip archives and pickles ignore
this ending. Files without the right checksum are not read: the checksum shows damage, not the author of the file.
Reading runs no code (``weights_only``) and expands nothing: ``torch.save`` does not compress its entries, so compressed
entries are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from join.errors import described
from joinables._torch.objects import mark_stepped
from joinables.modules import replaced
from joinables.trainer.files import replacing, save
from joinables.trainer.launch import read
from joinables.trainer.metrics import MetricStore
from joinables.trainer.run import Run


def take(run: Run, active: bool) -> dict[str, Any] | None:
    """Return the snapshot on the rank that writes it, ``None`` elsewhere; called on all ranks.

    Args:
        run: The fit.
        active: Whether this rank still has data; outside a block, all ranks are active.
    """
    parts = run.collective.all_gather_object({**run.position.state_dict(), "active": active})
    writer = next(rank for rank, part in enumerate(parts) if part["active"])
    for optimizer in run.optimizers:
        consolidate: Any = getattr(optimizer, "consolidate_state_dict", None)
        if consolidate is not None:
            consolidate(to=writer)
    if run.collective.rank != writer:
        return None
    state: dict[str, Any] = {
        **run.trainer.state_dict(),
        "module": run.module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "schedulers": [stepped.scheduler.state_dict() for stepped in run.schedulers],
        "ranks": parts,
    }
    with replaced(run, "apart", "on_save_checkpoint"):
        run.call("on_save_checkpoint", state)
    return state


def load(run: Run, state: Mapping[str, Any]) -> dict[str, Any]:
    """Load the weights of a snapshot, the same on all ranks, and return the snapshot as hooks have changed it."""
    loaded = dict(state)
    run.call("on_load_checkpoint", loaded)
    if "module" in loaded:  # the last fit of the trainer kept the weights in the module
        run.module.load_state_dict(loaded["module"])
    return loaded


def resume(run: Run, state: Mapping[str, Any]) -> None:
    """Load a snapshot, the same on all ranks, into a fit that has its optimizers but has not begun.

    Raises:
        ValueError: If it was taken from other optimizers, groups of parameters or schedulers, or in the middle of an
            epoch by a different number of ranks, if the remainder of the epoch cannot be distributed.
    """
    state = load(run, state)
    part = _part_of(run, state["ranks"])
    try:
        for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
            if state["global_step"]:  # without the mark, a scheduler that steps in an epoch without a batch left warns
                mark_stepped(optimizer)
        for stepped, saved in zip(run.schedulers, state["schedulers"], strict=True):
            stepped.scheduler.load_state_dict(saved)
    except (ValueError, LookupError) as error:
        raise ValueError(
            f"The checkpoint has other optimizers or schedulers than configure_optimizers ({error!r}). Return the same"
            " ones, with the same groups. If a hook adds groups during a fit, add them again in on_load_checkpoint."
            " [J251]"
        ) from error
    run.trainer.load_state_dict(state)
    run.position.epoch = run.trainer.epochs
    if part is not None:
        run.position.load_state_dict(part)


def _part_of(run: Run, parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the part that this rank resumes from; ``None`` if a different number of ranks begins an epoch.

    If a different number of ranks resumes in the middle of an epoch, or the batch size is different, the samples that
    were used are the first of the epoch, and the others are distributed over the present ranks. A rank loads the random
    numbers of one previous rank, and the metrics of all previous ranks whose number equals its own modulo the number of
    ranks.
    """
    rank, ranks, before = run.collective.rank, run.collective.world_size, len(parts)
    first, sampler = parts[0], run.position.sampler
    if sampler is not None:
        sampler.start = first["start"] or 0
        if first.get("seed") is not None:  # an older version wrote none
            sampler.seed = first["seed"]
    if before == ranks and (sampler is None or first["used"] in (None, sampler.used(first["batches"]))):
        return parts[rank]
    if not any(part["batches"] or part["start"] for part in parts):
        return None  # no batch of the epoch was used
    batches, used = [part["batches"] for part in parts], first["used"]
    distributed = [len(range(place, sum(batches), before)) for place in range(before)]
    if sampler is None or used is None or batches != distributed:
        raise ValueError(
            f"{before} ranks wrote the checkpoint in the middle of an epoch, and {ranks} ranks cannot share the rest of"
            f" it. Resume with {before} ranks, or from a checkpoint of the end of an epoch. To resume with a"
            " different number of ranks, train with a DataLoader whose samples the trainer distributes. [J203]"
        )
    metrics = MetricStore()
    for part in parts[rank::ranks]:
        metrics.merge(part["metrics"])
    return {**parts[rank % before], "batches": 0, "start": used, "metrics": metrics.state_dict()}


# -- files ------------------------------------------------------------------------------------------------------------

_SEAL = b"\nsha256 "
_SIZE = len(_SEAL) + 2 * hashlib.sha256().digest_size
_CHUNK = 1 << 20  # bytes in one read


def write_checkpoint(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``state`` to ``path``; a process that is killed at any moment leaves the old file or the new one.

    If several processes write to the same path at the same time, the file of the last one stays, whole. A killed
    process may leave a file ``.joinables-*.part`` in the folder. No later write removes it.

    Args:
        state: Plain data and tensors.
        path: The file. Its folder is made.

    Raises:
        OSError: If the file cannot be written, with ``errno.ENOSPC`` if the disk is full. Its ``filename`` is ``path``,
            or the folder that could not be made. The old file stays, and no temporary file is left.
        TypeError: If the state has other objects, which could be written, but not read again.
        ValueError: If ``path`` is a folder, a device or a pipe.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    checksum = hashlib.sha256()
    with replacing(path, survives=True) as file:
        save(dict(state), lambda data: (file.write(data), checksum.update(data)))
        file.write(_SEAL + checksum.hexdigest().encode())
        file.flush()
        if unreadable := _load(file.fileno())[1]:
            raise TypeError(
                f"The checkpoint has objects that cannot be read again: {unreadable}. Put only plain data and"
                " tensors into it, from on_save_checkpoint and the callbacks' state_dict. [J200]"
            )


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of :func:`write_checkpoint`; its tensors are on the CPU, mapped from the file and not copied.

    Args:
        path: The file.

    Raises:
        OSError: If it does not exist, or cannot be read.
        ValueError: If its bytes have changed since it was written, or if it is another kind of file. The exception has
            no cause or context of torch's.
    """
    checksum = hashlib.sha256()
    # The path might name another file in a moment, so everything is read from the file that is opened here.
    # Without O_NONBLOCK, opening a pipe would wait for its writer. Reads are buffered, since other reads may be short.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        size = status.st_size - _SIZE  # below 0 for a pipe or a device
        for begin in range(0, size, _CHUNK):
            checksum.update(file.read(min(_CHUNK, size - begin)))
        if not stat.S_ISREG(status.st_mode) or file.read(_SIZE + 1) != _SEAL + checksum.hexdigest().encode():
            raise ValueError(
                f"ckpt_path={str(path)!r} does not end with the checksum of its bytes, so it is not a checkpoint of a"
                " Trainer, or has changed since it was written. Resume from another checkpoint, or load weights of"
                " other files into the module yourself. [J198]"
            )
        state, unreadable = _load(file.fileno())
        if unreadable:
            raise ValueError(
                f"ckpt_path={str(path)!r} is not a checkpoint that a Trainer has written: {unreadable}. Resume from"
                " another checkpoint. Allow the classes that your own callbacks save by"
                " torch.serialization.add_safe_globals. [J794]"
            )
        return state


def _load(descriptor: int) -> tuple[Any, str]:
    """Return the content of an open file of ``torch.save``, and the reason why it cannot be read, as a clause.

    Torch's own texts advise to read the file with its code, so none of them is shown or chained.
    """
    path = f"/proc/self/fd/{descriptor}"
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True), ""
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if "weights_only" not in str(error):
            return None, described(error)
    names: list[str] = []
    with contextlib.suppress(Exception):  # it reads fewer files than torch.load does
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    return None, f"it has objects other than plain data and tensors ({', '.join(sorted(names)) or 'without a name'})"


# -- objects that read and write --------------------------------------------------------------------------------------


class CheckpointIO(Protocol):
    """Object that saves, loads and removes checkpoints: ``Trainer(checkpoint_io=...)``; Lightning's are such objects.

    Processes that are started have copies of the object. So it keeps checkpoints in a place that all processes reach,
    such as a folder or a service. A checkpoint is a dict of plain data and tensors. Its path is a text, which need not
    name a file.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str) -> None:
        """Save a checkpoint, and replace an earlier one of this path; called on one rank."""

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Return a checkpoint, with the same data and tensors; called in the process that calls ``fit``."""
        ...

    def remove_checkpoint(self, path: str) -> None:
        """Remove a checkpoint, if it exists; called on one rank."""


class FileCheckpointIO:
    """Files of ``torch.save``; the default, and a base for subclasses that write other files to the same paths."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write a file."""
        write_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Read a file."""
        return read_checkpoint(path)

    def remove_checkpoint(self, path: str) -> None:
        """Remove a file."""
        Path(path).unlink(missing_ok=True)


def checkpoint_io_of(argument: CheckpointIO | None) -> CheckpointIO:
    """Return the object of a trainer's argument ``checkpoint_io``.

    Raises:
        TypeError: If it lacks a method.
    """
    io = FileCheckpointIO() if argument is None else argument
    names = "save_checkpoint", "load_checkpoint", "remove_checkpoint"
    if missing := [name for name in names if not callable(getattr(io, name, None))]:
        raise TypeError(
            f"checkpoint_io={argument!r} lacks the method {missing[0]}. Pass an object with the methods"
            " save_checkpoint(checkpoint, path), load_checkpoint(path) and remove_checkpoint(path). [J712]"
        )
    return io


# -- the end of a fit -------------------------------------------------------------------------------------------------

# Hooks and states of users may raise after the last step, and hours of training must not depend on that.


def changed_weights(run: Run) -> dict[str, Any] | None:
    """Return the weights that the process which started the run lacks: those that have changed since the snapshot."""
    if run.task.stage != "fit":
        return None if run.task.saved is None else run.module.state_dict()
    path, weights = run.task.folder / "snapshot", run.module.state_dict()
    before: dict[str, Any] = read(path)["module"] if path.exists() else {}

    def is_known(name: str, value: Any) -> bool:
        known, is_tensor = before.get(name), isinstance(value, torch.Tensor)
        return is_tensor and isinstance(known, torch.Tensor) and torch.equal(known, value.cpu())

    return {name: value for name, value in weights.items() if not is_known(name, value)}


def keep_trained(folder: Path, state: Mapping[str, Any]) -> str:
    """Write the weights of a snapshot, and return a sentence with their path, or with the reason why there is none."""
    name = f"trained-epoch={state['epochs']}-step={state['global_step']}"
    paths = (folder / f"{name}{f'-v{version}' if version else ''}.ckpt" for version in count())
    path = str(next(path for path in paths if not path.exists()))
    # get_extra_state may have returned objects that cannot be written, or not be read again.
    tensors = {name: value.detach() for name, value in state["module"].items() if isinstance(value, torch.Tensor)}
    try:
        write_checkpoint({"module": tensors}, path)
    except Exception as error:
        return f"Its weights could not be saved: {described(error)}."
    return f"torch.load({path!r})['module'] returns the trained weights."
