"""Files that are written whole or not at all: :func:`check_folder` and :func:`whole_file`."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


def check_folder(path: Path) -> None:
    """Raise a ``FileNotFoundError`` if there is no folder for ``path``."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: there is no folder {str(path.parent)!r}; make it first [J099]")


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """The name of a file to write to; it becomes ``path`` when the context ends, and is removed after an exception.

    So nobody ever sees half a file, even if all ranks write it.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
