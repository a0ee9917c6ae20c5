"""Temporary folders that a killed process does not leave for ever: :func:`temporary_folder`.

The process that makes a folder holds a lock on a file in it; the system frees the lock when the process ends, however
it ends. Before another folder is made, those of this user and this machine whose lock is free are removed. A folder
without a lock file is left alone (not all file systems have locks), and so is one from before the last reboot.
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
    """The name of the lock file: that of this boot of this machine; other machines may not see the lock."""
    return "lock-" + Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _tidy(parent: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # It may be gone by now, or another process may be at it.
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue  # an administrator could, but should not
            with (folder / _lock_name()).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
