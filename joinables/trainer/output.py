"""Output of the processes that a launcher starts: :func:`begin` in each process.

If several ranks write, each line begins with the rank. A line is written when it is complete, or flushed. So lines of
different ranks do not mix, and a process that is killed loses no complete line. Only the streams of Python are
replaced, without pipes and threads: rank 0 still writes to the terminal, and output of native code has no rank. Text
after a carriage return has none either, since it is a picture of a progress bar, which may be as wide as the terminal.

A warning that several ranks have is shown by the first of them. The ranks agree on the first through symbolic links in
the folder of the launch, since creating a link either succeeds with its content or fails.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import warnings
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_LINE = re.compile(r"\r?[^\r\n]+")

_screens: list[TextIO] = []


def screen() -> TextIO:
    """Return the stream for a person who looks: stderr, or the former stderr if :func:`begin` has replaced it."""
    return _screens[-1] if _screens else sys.stderr


def begin(rank: int, ranks: int, shared: Path) -> None:
    """Have this process write as ``rank``.

    Args:
        rank: The rank.
        ranks: The number of ranks.
        shared: A folder of the launch.
    """
    _screens.append(sys.stderr)
    loggers: list[Any] = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers: list[Any] = [handler for each in loggers for handler in getattr(each, "handlers", ())]
    for name in ("stdout", "stderr"):
        if (before := getattr(sys, name)) is not None:  # the process that has started this one has closed it
            setattr(sys, name, after := _Lines(before, f"[rank {rank}] " if ranks > 1 else ""))
            for handler in handlers:
                if getattr(handler, "stream", None) is before:
                    handler.setStream(after)
    _show_once(rank, shared)


class _Lines:
    """Text stream that puts a prefix before each line, and writes complete lines to another stream.

    Args:
        stream: The stream that receives the lines.
        prefix: The prefix.
    """

    def __init__(self, stream: Any, prefix: str) -> None:
        self._stream, self._prefix, self._is_within_line = stream, prefix, False
        self._parts: deque[str] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._parts.append(text)
        if "\n" in text or "\r" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        parts: list[str] = []
        with suppress(IndexError):  # several threads may write
            while True:
                parts.append(self._parts.popleft())
        if text := "".join(parts):
            self._stream.write(_LINE.sub(self._numbered, text))
            self._is_within_line = text[-1] not in "\r\n"
        self._stream.flush()

    def _numbered(self, line: re.Match[str]) -> str:
        is_first = line[0][0] != "\r" and (line.start() > 0 or not self._is_within_line)
        return self._prefix * is_first + line[0]


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
