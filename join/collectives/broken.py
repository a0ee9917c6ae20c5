"""Whether an exception is a collective that has broken because another rank is gone: :func:`is_broken`.

Nothing else in this package looks at the texts of a backend.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.distributed as dist

# Gloo raises RuntimeError, with no class of its own. Its text begins with the place in gloo's source, in brackets; then
# comes that a connection was closed or reset by the peer, or that gloo's own time limit has passed.
# Once one operation has taken too long, those that follow on the same connection raise a text without a place.
_GLOO = re.compile(r"\[\S*/gloo/\S+:\d+\]|Application timeout caused pair closure")
_DEPTH = 8  # how far back the exceptions that led to another one are looked at


class BrokenCollective(RuntimeError):
    """An operation of one of this package's own collectives that cannot come to its end.

    Args:
        text: what has happened.
        ranks: those that are known to be gone.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


def is_broken(error: BaseException, *, stores: bool = True) -> bool:
    """Whether ``error`` is of a collective that another rank has left, or was raised because of one.

    Args:
        error: what was raised.
        stores: whether it may be of a store, too.
    """
    cause: BaseException | None = error
    for _ in range(_DEPTH):
        if cause is None:
            return False
        is_of_gloo = type(cause) is RuntimeError and _GLOO.search(str(cause)) is not None
        if is_of_gloo or isinstance(cause, BrokenCollective) or (stores and isinstance(cause, dist.DistError)):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
