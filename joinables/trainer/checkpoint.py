r"""Checkpoint files: :class:`FileCheckpointIO`, and the protocol of objects that write and read others.

A file exists as a whole or not at all. It is a file of ``torch.save``, which ``torch.load(path)`` reads, followed by
the checksum of all bytes before it: ``\nsha256 `` and 64 hexadecimal digits. Readers of zip archives and pickles ignore
this ending. Files without the right checksum are not read: the checksum shows damage, not the author of the file.
Reading runs no code (``weights_only``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from join.errors import described
from joinables.trainer.files import free_path, replacing, save

_SEAL = b"\nsha256 "
_SIZE = len(_SEAL) + 2 * hashlib.sha256().digest_size
_CHUNK = 1 << 20  # bytes in one read


def _load(descriptor: int) -> tuple[Any, str]:
    """Return the content of an open file of ``torch.save``, and the reason why it cannot be read, as a clause.

    Torch's own texts advise to read the file with its code, so none of them is shown or chained.
    """
    path = f"/proc/self/fd/{descriptor}"
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save compresses nothing, and megabytes can become gigabytes
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                return None, "it has compressed entries"
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


@runtime_checkable
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
        """Write ``checkpoint`` to ``path``; a process that is killed at any moment leaves the old file or the new one.

        If several processes write to the same path at the same time, the file of the last one stays, whole. A killed
        process may leave a file ``.joinables-*.part`` in the folder. No later write removes it.

        Args:
            checkpoint: Plain data and tensors.
            path: The file. Its folder is made.

        Raises:
            OSError: If the file cannot be written, with ``errno.ENOSPC`` if the disk is full. Its ``filename`` is
                ``path``, or the folder that could not be made. The old file stays, and no temporary file is left.
            TypeError: If it has other objects, which could be written, but not read again.
            ValueError: If ``path`` is a folder, a device or a pipe.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        checksum = hashlib.sha256()
        with replacing(Path(path), survives=True) as file:
            save(dict(checkpoint), lambda data: (file.write(data), checksum.update(data)))
            file.write(_SEAL + checksum.hexdigest().encode())
            file.flush()
            if unreadable := _load(file.fileno())[1]:
                raise TypeError(
                    f"The checkpoint has objects that cannot be read again: {unreadable}. Put only plain data and"
                    " tensors into it, from on_save_checkpoint and the callbacks' state_dict. [J200]"
                )

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Read a file of :meth:`save_checkpoint`; its tensors are on the CPU, mapped from the file and not copied.

        Args:
            path: The file.

        Raises:
            OSError: If it does not exist, or cannot be read.
            ValueError: If its bytes have changed since it was written, or if it is another kind of file. The exception
                has no cause or context of torch's.
        """
        checksum = hashlib.sha256()
        # The path might name another file in a moment, so everything is read from the file that is opened here.
        # Without O_NONBLOCK, opening a pipe would wait for its writer. Reads are buffered, since others may be short.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            size = status.st_size - _SIZE  # below 0 for a pipe or a device
            for begin in range(0, size, _CHUNK):
                checksum.update(file.read(min(_CHUNK, size - begin)))
            state, unreadable = dict[str, Any](), "it does not end with the checksum of its bytes"
            if stat.S_ISREG(status.st_mode) and file.read(_SIZE + 1) == _SEAL + checksum.hexdigest().encode():
                state, unreadable = _load(file.fileno())
            if unreadable:
                raise ValueError(
                    f"ckpt_path={str(path)!r} is not a checkpoint that a Trainer has written, or has changed since:"
                    f" {unreadable}. Resume from another checkpoint, or load weights of other files into the module"
                    " yourself. Allow the classes that your own callbacks save by torch.serialization.add_safe_globals."
                    " [J794]"
                )
            return state

    def remove_checkpoint(self, path: str) -> None:
        """Remove a file."""
        Path(path).unlink(missing_ok=True)


# -- the end of a fit -------------------------------------------------------------------------------------------------

# Hooks and states of users may raise after the last step, and hours of training must not depend on that.


def keep_trained(folder: Path, state: Mapping[str, Any]) -> str:
    """Write the weights of a snapshot, and return a sentence with their path, or with the reason why there is none."""
    path = free_path(folder, f"trained-epoch={state['epochs']}-step={state['global_step']}")
    # get_extra_state may have returned objects that cannot be written, or not be read again.
    tensors = {name: value.detach() for name, value in state["module"].items() if isinstance(value, torch.Tensor)}
    try:
        FileCheckpointIO().save_checkpoint({"module": tensors}, path)
    except Exception as error:
        return f"Its weights could not be saved: {described(error)}."
    return f"torch.load({path!r})['module'] returns the trained weights."
