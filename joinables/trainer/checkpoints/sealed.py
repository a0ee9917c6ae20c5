r"""Files that end with the checksum of all bytes before it: :class:`SealedFile` and :func:`is_sealed`.

The end is ``\nsha256 `` and 64 hexadecimal digits. What reads zip archives, as ``torch.load`` does, or pickles does not
mind what follows them. It shows damage, not who wrote the file.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any, BinaryIO

from typing_extensions import override

_SEAL = b"\nsha256 "
_SIZE = len(_SEAL) + 2 * hashlib.sha256().digest_size
_CHUNK = 1 << 20  # bytes that are read at once


class SealedFile(io.RawIOBase):
    """What torch writes to ``file``, whose checksum is computed on the way; closing it does not close ``file``.

    An error is kept for :meth:`seal`: torch would replace it by one of its own, of a wrong position.
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
        """Write the end, and wait for the disk if it is to outlive a crash of the machine.

        Raises:
            OSError: the first of all writes, if one failed.
        """
        self.write(_seal(self._checksum))
        if self._error is not None:
            raise self._error
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())


def is_sealed(path: Path) -> bool:
    """Whether the bytes of a file are those that were written."""
    checksum = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size - _SIZE
        for begin in range(0, size, _CHUNK):
            checksum.update(file.read(min(_CHUNK, size - begin)))
        return file.read() == _seal(checksum)


def _seal(checksum: Any) -> bytes:
    return _SEAL + checksum.hexdigest().encode()
