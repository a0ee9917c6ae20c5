r"""Checkpoint files: :func:`write_checkpoint` and :func:`read_checkpoint`.

A file exists as a whole or not at all (``join.files``). It is one of ``torch.save``, which ``torch.load(path)`` reads,
followed by the checksum of all bytes before it: ``\nsha256 `` and 64 hexadecimal digits. Readers of zip archives and
pickles do not mind. Files without the right one are not read: it shows damage, not who wrote the file. Reading runs no
code (``weights_only``). What is in a checkpoint is described in ``joinables.trainer.checkpoints.snapshot``.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from typing_extensions import override

from join.files import whole_file


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
    with whole_file(path, durable=durable) as file:
        sealed = _SealedFile(file)
        torch.save(dict(state), cast("BinaryIO", sealed))
        sealed.seal()


def read_checkpoint(path: str | os.PathLike[str], *, trusted: bool = False) -> dict[str, Any]:
    """Read a file of :func:`write_checkpoint`; its tensors are on the CPU, mapped from the file and not copied.

    Args:
        path: the file.
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
        return torch.load(path, map_location="cpu", weights_only=not trusted, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"ckpt_path={str(path)!r} cannot be read as plain data and tensors: {error}; go on from another one [J199]"
        ) from error


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

    def seal(self) -> None:
        """Write the checksum.

        Raises:
            OSError: the first of all writes that failed.
        """
        self.write(_seal(self._checksum))
        if self._error is not None:
            raise self._error


def _is_sealed(path: Path) -> bool:
    """Whether a file ends with the checksum of its bytes."""
    checksum = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size - _SIZE
        for begin in range(0, size, _CHUNK):
            checksum.update(file.read(min(_CHUNK, size - begin)))
        return file.read() == _seal(checksum)


def _seal(checksum: Any) -> bytes:
    """The bytes that end a file with this checksum."""
    return _SEAL + checksum.hexdigest().encode()
