"""Temporary folders that a killed process does not leave for ever: :func:`temporary_folder`.

Whoever makes one holds a lock in it as long as it lives; the system frees the lock, however that ends. Before another
one is made, those of this user and this machine that are no longer locked are removed. A folder without such a lock is
left alone, as where the file system has none, and so is one of before the machine was started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "joinables-"


@contextmanager
def temporary_folder() -> Generator[Path]:
    """Make a folder for the files of one run, which is removed at the end."""
    _tidy(Path(tempfile.gettempdir()))
    folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
    path = Path(folder.name)
    with (path / "lock.part").open("xb") as file, folder:  # it is locked until it is gone
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(file.name, path / _lock_name())  # nobody finds it before it is locked
        yield path


def _lock_name() -> str:
    """The lock's, on this machine: over a network, others may not see that it is held."""
    return "lock-" + Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _tidy(parent: Path) -> None:
    """Remove the folders whose makers were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # It may be gone by now, or another process may be at it.
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue  # an administrator could, but should not
            with (folder / _lock_name()).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
