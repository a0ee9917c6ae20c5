"""Files that exist as a whole or not at all (:func:`replacing`), and temporary folders (:func:`temporary_folder`).

A file is written under a random name in the folder, and then renamed. If two processes write the same file at the same
time, the file of the last one stays, whole. The random name is created only if it is free. So no other user can put a
link in the way.

A killed process leaves its file or folder. No later process removes it: a name does not show whether the process still
runs, and in a shared folder, other users may create such names as well.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import torch


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, survives: bool = False) -> Generator[BinaryIO]:
    """Return the context of a new file that replaces ``path`` at the end, unless the body raises.

    Args:
        path: The file. If it is a link, the link is replaced, and its target stays.
        mode: The permissions of the file, before the umask.
        survives: Whether the file is on the disk at the end of the context, even if the machine loses its power.

    Raises:
        OSError: If the file cannot be written; its ``filename`` is ``path``. The old file stays.
        ValueError: If ``path`` is a folder, a device or a pipe.
    """
    if path.exists() and not path.is_file():
        raise ValueError(
            f"The path {str(path)!r} is a folder, a device or a pipe, which a file cannot replace. Pass the path of a"
            " file. [J580]"
        )
    part = path.with_name(f".joinables-{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            if survives:
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and error.errno:
            error.filename = str(path)  # it has no name, or the name of the part
        raise
    if survives:
        with suppress(OSError), ExitStack() as stack:  # some file systems cannot write a folder by itself
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            os.fsync(folder)


def free_path(folder: Path, name: str, is_taken: Callable[[Path], bool] = Path.exists) -> str:
    """Return the path of a checkpoint called ``name``, with ``-v1`` or so if that one is taken."""
    paths = (folder / f"{name}{f'-v{version}' if version else ''}.ckpt" for version in count())
    return str(next(path for path in paths if not is_taken(path)))


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return the context of a folder that only this user can open."""
    return tempfile.TemporaryDirectory(prefix="joinables-", ignore_cleanup_errors=True)


def save(value: Any, write: Callable[[Any], object]) -> None:
    """Write ``value`` by ``torch.save``.

    Args:
        value: The object.
        write: The function that writes some bytes.

    Raises:
        OSError: If ``write`` raises it. torch by itself would raise another error, about a wrong position.
    """
    failed: list[OSError] = []

    def write_or_keep_error(data: Any) -> int:
        try:
            write(data)
        except OSError as error:
            failed.append(error)
        return len(data)

    torch.save(value, cast("Any", SimpleNamespace(write=write_or_keep_error, flush=lambda: None)))
    if failed:
        raise failed[0]
