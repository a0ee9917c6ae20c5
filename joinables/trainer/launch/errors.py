"""What can go wrong in a launch, and how an exception gets from a worker to the parent process.

What ``fn`` raises on a worker is raised in the parent as it is, if it can be pickled; for everything else there is a
class of :class:`LaunchError` each. No launch that fails leaves a process or a file behind.

A worker writes an :class:`Account` of its exception, and the parent makes a :class:`Failure` of it. When one rank
fails, those that communicate with it fail too, often earlier; ``blame`` tells the cause from its consequences.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from typing_extensions import override

from join import JoinTimeoutError, PeerError
from join.collectives.broken import is_broken
from join.errors import add_note


class LaunchError(RuntimeError):
    """Base of all errors of a launch: ``fn`` was not carried out on all ranks, or its result could not be had."""


class WorkerDied(LaunchError):
    """A worker ended without a result or an exception: it was killed, or it exited by itself.

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
            #: SIGKILL comes when memory has run out (the kernel's log says so), or from who ended the job; SIGABRT and
            #: SIGSEGV come from native code, whose last words are in the output.
            text = f"rank {self.rank} was killed by {self.signal} [J214]"
        else:
            when = "after fn had returned" if self.returned else "before it returned a result"
            #: Something called sys.exit or os._exit on that rank; the output may say more.
            text = f"rank {self.rank} exited with code {self.exit_code} {when} [J215]"
        return f"{text}. {self.hint}" if self.hint else text


class WorkerRaised(LaunchError):
    """A worker raised an exception that cannot be pickled; the message has the rank, and its type and text."""


class NotPicklable(LaunchError):
    """``fn``, an argument or the result cannot be pickled for another process; the message says which."""


class RemoteTraceback(Exception):
    """The traceback of a worker, as text: the ``__cause__`` of the exception that a launch raises for that worker."""


# -- from worker to parent -------------------------------------------------------------------------------------------

OWN, ABORTED, OTHERS = 0, 1, 2
"""``blame``: the rank failed by itself; it aborted, as libraries do that lose peers; it failed because another did."""


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, as the parent sees it; failures with the lowest ``blame`` caused the others."""

    rank: int
    error: BaseException
    blame: int
    text: str


@dataclass(frozen=True)
class Account:
    """An exception as a worker writes it down: text, traceback, ``blame``, and the exception itself if it pickles."""

    text: str
    traceback: str
    blame: int
    pickled: bytes | None

    @staticmethod
    def of(error: BaseException) -> Account:
        """Write down ``error``, in the worker."""
        text = "".join(traceback.format_exception_only(error)).strip()
        is_of_others = isinstance(error, (PeerError, JoinTimeoutError)) or is_broken(error)
        trace = "".join(traceback.format_exception(error))
        return Account(text, trace, OTHERS if is_of_others else OWN, _pickled(error))

    def failure(self, rank: int) -> Failure:
        """Make an exception of it again, in the parent."""
        #: Its traceback is above. Give the exception's class an __init__ that its args can be handed to.
        error: BaseException = WorkerRaised(
            f"rank {rank} raised an exception that cannot be pickled: {self.text} [J216]"
        )
        if self.pickled is not None:
            try:
                error = _revived(self.pickled)
            except Exception as lost:  # its class cannot be imported here
                #: Its traceback is above. Have the class of the exception in a file that this process can import, too.
                error = WorkerRaised(
                    f"rank {rank} raised an exception that cannot be loaded here ({lost}): {self.text} [J217]"
                )
        error.__cause__ = RemoteTraceback(f"\non rank {rank}\n{self.traceback}")
        return Failure(rank, error, self.blame, self.text)


def raise_cause(failures: Sequence[Failure]) -> NoReturn:
    """Raise the failure that caused the others; of several such, the lowest rank's."""
    first, *others = sorted(failures, key=lambda failure: (failure.blame, failure.rank))
    if others:
        add_note(first.error, "; ".join(f"rank {other.rank} failed too: {other.text[:200]}" for other in others))
    raise first.error


def _pickled(error: BaseException) -> bytes | None:
    """The exception in a form that ``_revived`` can load, or ``None`` if there is none."""
    # An exception whose constructor does not take its args can be pickled but not loaded: then without calling that.
    for form in (error, (type(error), error.args, vars(error))):
        try:
            pickled = pickle.dumps(form)
            if type(_revived(pickled)) is type(error):
                return pickled
        except Exception:
            continue
    return None


def _revived(pickled: bytes) -> BaseException:
    """Load what ``_pickled`` has made of an exception."""
    form = pickle.loads(pickled)
    if not isinstance(form, tuple):
        return form
    cls, args, state = cast("tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]", form)
    error = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(state)
    return error
