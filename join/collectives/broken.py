"""Detection of collectives that broke because another rank is gone, or cannot be reached: :func:`is_broken`.

No other module of this package interprets the texts of a backend's exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch.distributed as dist

# Gloo raises RuntimeError and has no exception class. The text begins with the place in gloo's source, in brackets.
# Then it says that the peer closed or reset a connection, or that gloo's own time limit has expired. Once one operation
# has taken too long, later operations on the same connection raise a text without a place.
_GLOO = re.compile(r"\[\S*/gloo/\S+:\d+\]|Application timeout caused pair closure")
# Ranks of a companion connect with each other on first use. The text names the address that did not answer.
_UNREACHABLE = re.compile(r"connecting: |SO_ERROR")
# Horovod raises it for each operation once the process of a rank has ended, or a rank has shut Horovod down.
_HOROVODS = "HorovodInternalError"
_DEPTH = 8  # the length of the chain of exceptions that is searched


class BrokenCollective(RuntimeError):
    """Exception for an operation of this package's own collectives that cannot complete.

    Args:
        text: The reason.
        ranks: The ranks that are known to be gone.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


def timed_out(awaited: str, seconds: float) -> RuntimeError:
    """Return the error of a wait for something that has taken longer than ``seconds``."""
    return RuntimeError(
        f"Waiting for {awaited} timed out after {seconds:g} s. Call the same operation on all ranks, or pass a longer"
        " timeout. [J039]"
    )


def is_broken(error: BaseException, *, stores: bool = True) -> bool:
    """Return whether ``error`` comes from a collective that another rank has left, or was raised because of one.

    Args:
        error: The exception.
        stores: Whether an exception of a store counts, too.
    """
    for cause in _causes(error):
        is_of_library = type(cause) is RuntimeError and _GLOO.search(str(cause)) is not None
        is_of_library |= type(cause).__name__ == _HOROVODS  # its class is known only where Horovod is installed
        if is_of_library or isinstance(cause, BrokenCollective) or (stores and isinstance(cause, dist.DistError)):
            return True
    return False


def is_unreachable(error: BaseException) -> bool:
    """Return whether ``error`` says that two ranks, both of which may be alive, cannot connect with each other."""
    return any(is_broken(cause, stores=False) and _UNREACHABLE.search(str(cause)) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_DEPTH):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
