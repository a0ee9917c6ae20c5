"""What can go wrong inside a :class:`join.Join` block, one class a cause.

A rank that raises leaves its block with its own exception, within seconds. Every other rank ends with
:class:`PeerError`, which names the first cause: at its next header, or, from inside a collective, when the process of
that rank has ended.
``group_is_usable`` of these errors says whether the process group works afterwards. It does where all ranks have
stopped at the same place, between two bursts of a plain block; the parameters may differ there, so go on from a
checkpoint. Anywhere else an operation may be half done: restart the processes.
"""

from __future__ import annotations


class JoinError(RuntimeError):
    """Base of all errors of this package: a ``Join`` block could not be carried out as written.

    Attributes:
        group_is_usable: whether the process group can be used afterwards.
    """

    group_is_usable: bool = True


def described(error: BaseException) -> str:
    """The class of an exception, and its text if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Have the traceback of an exception say something more; from Python 3.11 on."""
    add = getattr(error, "add_note", None)
    if add is not None:
        add(note)


class EarlyTerminationError(JoinError):
    """A rank ran out of inputs under ``throw_on_early_termination=True``; raised on every rank at the same step."""


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

    group_is_usable = False
