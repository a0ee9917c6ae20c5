"""Output of the processes that a launcher starts: :func:`begin` in each process, :func:`create` before they start.

If several ranks write, each line begins with the rank. A line is written when it is complete, or flushed. So lines of
different ranks do not mix, and a process that is killed loses no complete line. Only the streams of Python are
replaced, without pipes and threads: rank 0 still writes to the terminal, and output of native code has no rank. Text
after a carriage return has none either, since it is a picture of a progress bar, which may be as wide as the terminal.

In a folder, each stream of each rank has a file of its own, which receives the output of native code too.

A warning that several ranks have is shown by the first of them. The ranks agree on the first through symbolic links in
the folder of the launch, since creating a link either succeeds with its content or fails.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import sys
import warnings
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import override

_STREAMS = {"stdout": 1, "stderr": 2}
_LINE = re.compile(r"\r?[^\r\n]+")

_screens: list[TextIO] = []


def screen() -> TextIO:
    """Return the stream for a person who looks: stderr, or the former stderr if :func:`begin` has replaced it."""
    return _screens[-1] if _screens else sys.stderr


def create(folder: Path, ranks: range) -> None:
    """Create the files of all ranks, unless an earlier run has created them, and print where they are.

    Raises:
        ValueError: If a file cannot be opened, or is a link.
    """
    paths = [_path(folder, rank, name) for rank in ranks for name in _STREAMS]
    is_new = not paths[0].exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            os.close(_open(path, os.O_CREAT))
    except OSError as error:
        raise ValueError(
            f"worker_logs={str(folder)!r} cannot hold the output of {len(ranks)} ranks: {error}. Pass a folder in which"
            " you may write, and remove links from it. [J710]"
        ) from error
    if is_new:
        print(f"The output of the ranks is in {_path(folder, ranks[0], '*')}, and so on.", file=sys.stderr, flush=True)


def begin(rank: int, ranks: int, shared: Path, folder: Path | None) -> None:
    """Have this process write as ``rank``.

    Args:
        rank: The rank.
        ranks: The number of ranks.
        shared: A folder of the launch.
        folder: The folder with the files of the streams; ``None`` to write where this process writes already.
    """
    for name, number in _STREAMS.items():
        before: Any = getattr(sys, name)
        if name == "stderr":
            _screens.append(before if folder is None else os.fdopen(os.dup(number), "w"))
        if folder is not None:
            os.dup2(_open(_path(folder, rank, name)), number)
            after: Any = os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        elif before is not None:
            lines: Any = _Lines(before, f"[rank {rank}] " if ranks > 1 else "")
            after = io.TextIOWrapper(lines, lines.encoding, getattr(before, "errors", None), line_buffering=True)
        else:  # the process that has started this one has closed it
            continue
        setattr(sys, name, after)
        loggers: list[Any] = [logging.root, *logging.root.manager.loggerDict.values()]
        for handler in chain(*(getattr(each, "handlers", ()) for each in loggers)):
            if getattr(handler, "stream", None) is before:
                handler.setStream(after)
    _show_once(rank, shared)


def _path(folder: Path, rank: int, name: str) -> Path:
    return folder / f"rank-{rank}-{name}.log"


def _open(path: Path, flags: int = 0) -> int:
    """Open a file to append to it; not a link, nor a pipe without a reader."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o666)


class _Lines(io.RawIOBase):
    """Binary layer of a text stream, which puts a prefix before each line.

    Args:
        stream: The text stream that receives the lines.
        prefix: The prefix.
    """

    def __init__(self, stream: Any, prefix: str) -> None:
        self._stream, self._prefix, self._is_within_line = stream, prefix, False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    @override
    def writable(self) -> bool:
        return True

    @override
    def isatty(self) -> bool:
        return self._stream.isatty()

    @override
    def fileno(self) -> int:
        return self._stream.fileno()

    @override
    def write(self, data: Any) -> int:
        text = bytes(data).decode(self.encoding, "backslashreplace")

        def numbered(line: re.Match[str]) -> str:
            is_first = line[0][0] != "\r" and (line.start() > 0 or not self._is_within_line)
            return self._prefix * is_first + line[0]

        self._stream.write(_LINE.sub(numbered, text))
        self._stream.flush()
        self._is_within_line = text[-1:] not in ("\r", "\n")
        return len(data)


def _show_once(rank: int, shared: Path) -> None:
    """Have this process show no warning that another rank has shown.

    The loggers of this library need no such filter, since one rank logs for all.
    """
    show: Any = warnings.showwarning

    def show_first(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        warning = repr((str(message), category.__qualname__, filename, lineno))
        link, first = shared / f"shown-{hashlib.sha256(warning.encode()).hexdigest()}", str(rank)
        with suppress(OSError):  # the disk is full, or a process has outlived the launch
            with suppress(FileExistsError):
                link.symlink_to(first)
            first = os.readlink(link)
        if file is not None or first == str(rank):
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_first
