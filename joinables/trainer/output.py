"""Output of the processes that a launcher starts: :func:`begin` in each process.

If several ranks write, each line begins with the rank. A line is written when it is complete, or flushed. So lines of
different ranks do not mix, and a process that is killed loses no complete line. Only the streams of Python are
replaced, without pipes and threads: rank 0 still writes to the terminal, and output of native code has no rank. A bar
that begins with a carriage return has none either, since it may be as wide as the terminal.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import deque
from contextlib import suppress
from typing import Any

_BEGIN = re.compile(r"^(?=[^\r\n])", re.MULTILINE)


def begin(rank: int, ranks: int) -> None:
    """Have this process write as ``rank``.

    Args:
        rank: The rank.
        ranks: The number of ranks.
    """
    loggers: list[Any] = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers: list[Any] = [handler for each in loggers for handler in getattr(each, "handlers", ())]
    for name in ("stdout", "stderr"):
        if (before := getattr(sys, name)) is not None:  # the process that has started this one has closed it
            setattr(sys, name, after := _Lines(before, f"[rank {rank}] " if ranks > 1 else ""))
            for handler in handlers:
                if getattr(handler, "stream", None) is before:
                    handler.setStream(after)


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
            lines = _BEGIN.sub(self._prefix, text)
            self._stream.write(lines.removeprefix(self._prefix) if self._is_within_line else lines)
            self._is_within_line = text[-1] not in "\r\n"
        self._stream.flush()
