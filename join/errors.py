"""What can go wrong inside a :class:`join.Join` block, one class a cause.

A rank that raises leaves its block with its own exception, at once. Every other rank ends with :class:`PeerError`,
which names the first cause: where it waits for the others, or, from inside a collective, when the process of that rank
has ended. An operation may be half done on the process group then: let the exceptions end the processes, and restart
from a checkpoint. Only after :class:`EarlyTerminationError` the group works.
"""

from __future__ import annotations


class JoinError(RuntimeError):
    """Base of all errors of this package: a ``Join`` block could not be carried out as written."""


def described(error: BaseException) -> str:
    """The class of an exception, and its text if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Have the traceback of an exception say something more; from Python 3.11 on."""
    add = getattr(error, "add_note", None)
    if add is not None:
        add(note)


class EarlyTerminationError(JoinError):
    """A rank ran out of inputs under ``throw_on_early_termination=True``; raised on every rank at the same step.

    The process group works afterwards.
    """


class PeerError(JoinError):
    """Another rank failed inside the block; the message has its rank, and its exception's class and text.

    Attributes:
        rank: the rank that failed first, as far as it is known.
    """

    rank: int | None = None


class ProtocolError(JoinError):
    """What ranks do does not fit together: they announced different things, or one left out what others run."""


class JoinTimeoutError(JoinError):
    """A rank did not come within ``timeout`` seconds; the message says who announced what."""
