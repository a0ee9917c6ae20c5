"""Files that are written whole or not at all: :func:`check_folder` and :func:`whole_file`."""

from __future__ import annotations

import fcntl
import glob
import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def check_folder(path: Path) -> None:
    """Raise a ``FileNotFoundError`` if there is no folder for ``path``."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: there is no folder {str(path.parent)!r}; make it first [J099]")


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Generator[BinaryIO]:
    """A file to write to; it becomes ``path`` when the context ends, and is removed after an exception.

    So nobody ever sees half a file, even if all ranks write it. A process that is killed meanwhile leaves
    ``.NAME.*.part`` beside it, which the next write to the same place removes; it is locked while its writer lives.

    Args:
        path: the file.
        durable: whether to wait for the disk, so that the file also survives a crash of the machine.

    Raises:
        OSError: if it cannot be written; its ``filename`` is ``path``.
    """
    _remove_leftovers(path)
    try:
        file, part = _create_part(path)
        try:
            with file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                part.replace(path)  # before it is closed, which unlocks it
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        if error.errno is not None:  # an error without a number has a text of its own, which this would replace
            error.filename = str(path)  # it has none, or that of the part
        raise


def _create_part(path: Path) -> tuple[BinaryIO, Path]:
    """Make a temporary file beside ``path``, open and locked; with usual permissions, unlike those of ``tempfile``."""
    while True:
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
        file = part.open("xb")
        with suppress(OSError):  # not all file systems have locks; there, nobody removes leftovers
            fcntl.flock(file, fcntl.LOCK_EX)
        if part.exists():
            return file, part
        file.close()  # another process has removed it before it was locked


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files beside ``path`` whose writers were killed."""
    # The pattern has no "*": that would take in the parts of a file that is called NAME.something.
    for part in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}.part"):
        # Another writer may hold its lock, or have renamed it by now.
        with suppress(OSError), part.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _sync_folder(folder: Path) -> None:
    """Wait for the disk, so that a rename in ``folder`` survives a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
