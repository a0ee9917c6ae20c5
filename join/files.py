"""Files that are written whole or not at all: :func:`whole_file`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Generator[BinaryIO]:
    """A file to write to; it becomes ``path`` when the context ends, and is removed after an exception.

    So nobody ever sees half a file, even if all ranks write it. A process that is killed meanwhile leaves
    ``.NAME.*.part`` beside it.

    Args:
        path: the file.
        durable: whether to wait for the disk, so that the file also survives a crash of the machine.

    Raises:
        OSError: if it cannot be written; its ``filename`` is ``path``.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")  # with usual permissions, unlike those of tempfile
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)  # it has none, or that of the part
        raise
    if durable:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Wait for the disk, so that a rename in ``folder`` survives a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
