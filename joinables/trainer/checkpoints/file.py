r"""Checkpoint files: :func:`write_checkpoint` and :func:`read_checkpoint`.

A file exists as a whole or not at all: it is written under a temporary name beside its place, flushed to the disk, and
renamed. A process that is killed while it writes leaves ``.NAME.*.part`` behind; nobody reads that, and the next write
to the same place removes it, unless it is locked, as it is while its writer lives.

A file is one of ``torch.save``, which ``torch.load(path)`` reads, followed by the checksum of all bytes before it:
``\nsha256 `` and 64 hexadecimal digits. Readers of zip archives and pickles do not mind. Files without the right one
are not read: it shows damage, not who wrote the file. Reading runs no code (``weights_only``). What is in a checkpoint
is described in ``joinables.trainer.checkpoints.snapshot``.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import io
import os
import pickle
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from typing_extensions import override


def write_checkpoint(state: Mapping[str, Any], path: str | os.PathLike[str], *, durable: bool = True) -> None:
    """Write ``state`` to ``path``; a process that is killed at any moment leaves the old file or the new one.

    Args:
        state: plain data and tensors.
        path: the file; its folder is made.
        durable: whether to wait for the disk, so that the file also survives a crash of the machine.

    Raises:
        OSError: if it cannot be written; with ``errno.ENOSPC`` where the disk is full. Its ``filename`` is ``path``, or
            the folder that could not be made. The old file stays, and there is no temporary one left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _tidy(path)
    try:
        file, part = _create_part(path)
        try:
            with file:
                sealed = _SealedFile(file)
                torch.save(dict(state), cast("BinaryIO", sealed))
                sealed.seal(durable=durable)
                os.replace(part, path)  # before it is closed, which unlocks it
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        error.filename = str(path)  # it has none, or that of the part
        raise
    if durable:
        sync_folder(path.parent)


def read_checkpoint(
    path: str | os.PathLike[str], *, map_location: Any = "cpu", trusted: bool = False
) -> dict[str, Any]:
    """Read a file of :func:`write_checkpoint`; its tensors are mapped from the file, not copied.

    Args:
        path: the file.
        map_location: where tensors go, as of ``torch.load``.
        trusted: whether the file may hold any object, which runs code; only for files that this program has just
            written.

    Raises:
        FileNotFoundError: if it is not there.
        OSError: if it cannot be read.
        ValueError: if its bytes have changed since it was written, it is another kind of file, or it holds objects
            that are not plain data and tensors.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"ckpt_path={str(path)!r}: there is no such file; give the path of a checkpoint [J197]")
    if not _is_sealed(Path(path)):
        raise ValueError(
            f"ckpt_path={str(path)!r} is no checkpoint of a Trainer, or has changed since it was written: it does not"
            " end with the checksum of its bytes. Go on from another one; if it holds weights of torch.save, load them"
            " with module.load_state_dict(torch.load(...)), and leave ckpt_path out [J198]"
        )
    try:
        return torch.load(path, map_location=map_location, weights_only=not trusted, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"ckpt_path={str(path)!r} cannot be read as plain data and tensors: {error}; go on from another one [J199]"
        ) from error


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that nobody else uses; the file is not made here, so that it gets usual permissions."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")


def _create_part(path: Path) -> tuple[BinaryIO, Path]:
    """Make a temporary file beside ``path``, open and locked."""
    while True:
        part = temporary_name(path)
        file = part.open("xb")
        with contextlib.suppress(OSError):  # not all file systems have locks; there, nobody tidies up
            fcntl.flock(file, fcntl.LOCK_EX)
        if part.exists():
            return file, part
        file.close()  # another process has removed it before it was locked


def _tidy(path: Path) -> None:
    """Remove the temporary files beside ``path`` whose writers were killed."""
    # The pattern has no "*": that would take in the parts of a file that is called NAME.something.
    for part in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}.part"):
        # Another writer may hold its lock, or have renamed it by now.
        with contextlib.suppress(OSError), part.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def sync_folder(folder: Path) -> None:
    """Wait for the disk, so that a rename in ``folder`` survives a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- the checksum -----------------------------------------------------------------------------------------------------

_SEAL = b"\nsha256 "
_SIZE = len(_SEAL) + 2 * hashlib.sha256().digest_size
_CHUNK = 1 << 20  # bytes that are read at once


class _SealedFile(io.RawIOBase):
    """A file for ``torch.save`` that computes the checksum of what is written to ``file``.

    An error is kept for :meth:`seal`: torch would replace it by one of its own, about a wrong position.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._checksum, self._error = file, hashlib.sha256(), None

    @override
    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                self._file.write(data)
                self._checksum.update(data)
            except OSError as error:
                self._error = error
        return len(data)

    @override
    def tell(self) -> int:
        return self._file.tell()

    def seal(self, *, durable: bool = True) -> None:
        """Write the checksum, and with ``durable`` wait for the disk.

        Raises:
            OSError: the first of all writes that failed.
        """
        self.write(_seal(self._checksum))
        if self._error is not None:
            raise self._error
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())


def _is_sealed(path: Path) -> bool:
    """Whether a file ends with the checksum of its bytes."""
    checksum = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size - _SIZE
        for begin in range(0, size, _CHUNK):
            checksum.update(file.read(min(_CHUNK, size - begin)))
        return file.read() == _seal(checksum)


def _seal(checksum: Any) -> bytes:
    return _SEAL + checksum.hexdigest().encode()
