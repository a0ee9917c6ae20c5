"""Checkpoints of state that no rank has whole: :func:`write_sharded` and :func:`read_sharded`.

A checkpoint is a folder in the format of ``torch.distributed.checkpoint`` (DCP): every rank writes its own shards, and
any number of ranks reads them. It is written beside its place, and takes it in two renames, since a folder cannot be
renamed over another one::

    rank 0                                    the others
    broadcast of the name of the part, .NAME.*.part
    tidies up, makes the part
    all-gather: whether that went well
    all-gather: whether everybody sees it
    DCP: plans to rank 0, everybody writes, rank 0 writes the table of contents
    moves NAME aside, to .NAME.old
    renames the part to NAME
    removes .NAME.old
    all-gather: whether that went well

What there is after a kill, of one rank or all, and what reading finds then::

    before the first rename    NAME and a part                       the old one
    between the renames        .NAME.old and a part                  the old one, from .NAME.old
    after the second rename    NAME, and what is left of .NAME.old   the new one

The next write tidies up what is left over. Files and renames are flushed to the disk. Each file ends with a checksum,
which DCP does not mind; before anything is read, every rank checks some of the files.

Source: "torch.distributed.checkpoint" in PyTorch's documentation.
"""

from __future__ import annotations

import glob
import io
import os
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import override

from join.collectives import Collective, SingleCollective, TorchCollective
from joinables.trainer.checkpoints.file import sync_folder, temporary_name
from joinables.trainer.checkpoints.sealed import SealedFile, is_sealed


def write_sharded(state: Mapping[str, Any], path: str | os.PathLike[str], collective: Collective) -> None:
    """Write ``state`` to the folder ``path``; called on all ranks.

    ::

        model, optimizer = get_state_dict(fully_sharded, adam)  # of torch.distributed.checkpoint.state_dict
        write_sharded({"model": model, "optimizer": optimizer, "epoch": epoch}, path, collective)

    Args:
        state: under the same keys on all ranks. Of a ``DTensor`` each rank writes its shards; everything else has to
            be the same on all ranks, and one of them writes it.
        path: on a file system that all ranks share; its folder is made. A checkpoint that is there is replaced, with
            everything in its folder. One run at a time may write to it.
        collective: the ranks, connected by ``torch.distributed``, or a single one.

    Raises:
        TypeError: for ranks that are connected otherwise.
        RuntimeError: on all ranks, if one could not do its part, as where the disk is full; the message says which and
            why. An older checkpoint stays.
    """
    place, group = Path(path).absolute(), _group_of(collective)
    failing = f"cannot write {str(path)!r}"
    part: Path = collective.broadcast_object(temporary_name(place), 0)
    try:
        with _raised_on_all(collective, failing):
            if collective.rank == 0:
                _tidy(place)
                part.mkdir(parents=True)
        with _raised_on_all(collective, f"{failing}, whose file system all ranks have to share"):
            # DCP would make it, and this rank's shards would end on a disk where nobody looks for them.
            part.stat()
        with _dcp(group, failing) as ranks:
            dcp.save(dict(state), storage_writer=_Writer(part), **ranks)
        with _raised_on_all(collective, failing):
            if collective.rank == 0:
                _put_in_place(part, place)
    except BaseException:
        if collective.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise


def read_sharded(state: dict[str, Any], path: str | os.PathLike[str], collective: Collective) -> None:
    """Fill ``state`` from a folder that :func:`write_sharded` wrote; called on all ranks, of which there may be others.

    ::

        model, optimizer = get_state_dict(fully_sharded, adam)  # of the same shape as what was written
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        read_sharded(state, path, collective)
        set_state_dict(fully_sharded, adam, model_state_dict=model, optim_state_dict=optimizer)

    Unlike that of :func:`~joinables.trainer.checkpoints.file.read_checkpoint`, DCP's format is pickled: reading can run code,
    so read only what you trust.

    Args:
        state: tensors to be overwritten, and anything to be replaced; the same keys on all ranks. What else the
            checkpoint has is not read.
        path: the folder.
        collective: the ranks, connected by ``torch.distributed``, or a single one.

    Raises:
        TypeError: for ranks that are connected otherwise.
        FileNotFoundError: on all ranks, if there is no checkpoint.
        ValueError: on all ranks, if the bytes of a file are not those that were written; the message says of which.
            Nothing has been read then.
        RuntimeError: on all ranks, if one could not do its part, as where ``state`` has a key or a shape that the
            checkpoint has not; the message says which and why. ``state`` may be read in part then.
    """
    group, failing, found = _group_of(collective), f"cannot read {str(path)!r}", None
    with _raised_on_all(collective, failing):
        if collective.rank == 0:
            found = _find(Path(path).absolute())
    found = collective.broadcast_object(found, 0)
    if found is None:
        raise FileNotFoundError(f"{str(path)!r}: there is no such checkpoint")
    damaged: list[str] = []
    with _raised_on_all(collective, failing):
        files = [found / ".metadata", *sorted(found.glob("*.distcp"))]
        damaged = [str(file) for file in files[collective.rank :: collective.world_size] if not is_sealed(file)]
    damaged = [file for each in collective.all_gather_object(damaged) for file in each]
    if damaged:
        raise ValueError(
            f"{failing}: {' and '.join(map(repr, damaged))} has changed since it was written, or is another file:"
            " it does not end with the checksum of its bytes. Read another checkpoint"
        )
    with _dcp(group, failing) as ranks:
        dcp.load(state, storage_reader=_Reader(found), **ranks)


# -- folders ----------------------------------------------------------------------------------------------------------


def _aside(place: Path) -> Path:
    return place.with_name(f".{place.name}.old")


def _is_checkpoint(folder: Path) -> bool:
    return (folder / ".metadata").is_file()  # DCP's table of contents, which it writes last


def _find(place: Path) -> Path | None:
    """Where the checkpoint of ``place`` is, if there is one."""
    return next((folder for folder in (place, _aside(place)) if _is_checkpoint(folder)), None)


def _tidy(place: Path) -> None:
    """Finish what a killed run has left.

    Raises:
        FileExistsError: if there is something else at ``place``, which must not be removed.
    """
    if place.exists() and not _is_checkpoint(place):
        raise FileExistsError(f"{str(place)!r} is there and no checkpoint; remove it, or write to another folder")
    if _aside(place).exists():
        if not place.exists() and _is_checkpoint(_aside(place)):
            _aside(place).rename(place)
        else:
            shutil.rmtree(_aside(place))
    # The pattern has no "*": that would take in the parts of a file that is called NAME.something.
    for part in place.parent.glob(f".{glob.escape(place.name)}.{'[0-9a-f]' * 32}.part"):
        shutil.rmtree(part)


def _put_in_place(part: Path, place: Path) -> None:
    sync_folder(part)
    if place.exists():
        place.rename(_aside(place))
    part.rename(place)
    sync_folder(place.parent)
    shutil.rmtree(_aside(place), ignore_errors=True)


# -- DCP and its errors -----------------------------------------------------------------------------------------------


def _group_of(collective: Collective) -> dist.ProcessGroup | None:
    if isinstance(collective, TorchCollective):
        return collective.group
    if isinstance(collective, SingleCollective):
        return None
    raise TypeError(f"sharded checkpoints need torch.distributed between ranks, not {type(collective).__name__}")


@contextmanager
def _dcp(group: dist.ProcessGroup | None, failing: str) -> Generator[dict[str, Any]]:
    """Give DCP the ranks to work with; raise an ``Exception`` on all of them where it raises a ``BaseException``."""
    with warnings.catch_warnings():
        # It warns that it takes this for a single process even where it is told so.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield {"no_dist": True} if group is None else {"process_group": group}
        except CheckpointException as error:
            failures = {rank: failure for rank, (failure, _) in error.failures.items()}
            if not all(isinstance(failure, Exception) for failure in failures.values()):
                raise  # Ctrl-C
            raise _error(failing, {rank: _tell(failure) for rank, failure in failures.items()}) from error


class _SealedFiles(FileSystem):
    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        with Path(path).open("xb") as file:
            yield (sealed := SealedFile(file))
            sealed.seal()


class _Writer(dcp.FileSystemWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False)  # it would not wait for what is in Python's buffer; a seal does
        self.fs = _SealedFiles()

    @override
    def write_data(self, plan: Any, planner: Any) -> Any:
        with _plain_errors():
            return super().write_data(plan, planner)


class _Reader(dcp.FileSystemReader):
    @override
    def read_data(self, plan: Any, planner: Any) -> Any:
        with _plain_errors():
            return super().read_data(plan, planner)


@contextmanager
def _plain_errors() -> Generator[None]:
    """Raise what can be pickled: DCP sends it to the other ranks, who would wait for one that cannot be sent."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(_tell(error)) from None


@contextmanager
def _raised_on_all(collective: Collective, failing: str) -> Generator[None]:
    """Raise on all ranks what one raises in the block, in which nothing is collective."""
    caught = None
    try:
        yield
    except Exception as error:
        caught = error
    told: list[str | None] = collective.all_gather_object(None if caught is None else _tell(caught))
    failures = {rank: text for rank, text in enumerate(told) if text is not None}
    if failures:
        raise _error(failing, failures) from caught


def _tell(error: BaseException) -> str:
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"


def _error(failing: str, failures: Mapping[int, str]) -> RuntimeError:
    return RuntimeError(f"{failing}: " + "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
