"""What can go wrong in launching, one class a cause; what ``fn`` itself raises is raised as it is.

All of them leave no process and no file behind.
"""

from __future__ import annotations

import signal

from typing_extensions import override


class LaunchError(RuntimeError):
    """Base of all errors of a launch: ``fn`` was not carried out on all ranks, or its result could not be had."""


class WorkerDied(LaunchError):
    """A worker ended without a word: killed, or by an exit of its own.

    Args:
        rank: the worker's rank.
        exit_code: as ``multiprocessing.Process.exitcode``: negative for a signal.
        returned: whether ``fn`` had returned on it.
        hint: what to do about it, if anything is known.
    """

    def __init__(self, rank: int, exit_code: int, returned: bool = False, hint: str = "") -> None:
        super().__init__(rank, exit_code, returned, hint)  # the arguments and not the text, so that it can be pickled
        self.rank, self.exit_code, self.returned, self.hint = rank, exit_code, returned, hint

    @property
    def signal(self) -> str | None:
        """The name of the signal that killed the worker, if one did."""
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:  # real-time signals have no name of their own
            return f"signal {-self.exit_code}"

    @override
    def __str__(self) -> str:
        if self.signal is not None:
            text = f"rank {self.rank} was killed by {self.signal}"
        else:
            when = "after fn had returned" if self.returned else "before it returned a result"
            text = f"rank {self.rank} exited with code {self.exit_code} {when}"
        return f"{text}. {self.hint}" if self.hint else text


class WorkerRaised(LaunchError):
    """A worker raised an exception that cannot be brought here; the message has its type and text, and the rank."""


class NotPicklable(LaunchError):
    """``fn``, an argument or the result cannot be pickled, and so cannot change processes; the message says which."""


class RemoteTraceback(Exception):
    """The traceback of a worker, as text: the ``__cause__`` of what a launch raises on its behalf."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    @override
    def __str__(self) -> str:
        return f"\n{self.args[0]}"
