"""An exception on its way from a worker to the parent: :class:`Account` there, :class:`Failure` here.

An exception may be impossible to pickle, or to load again; its text and its traceback can always be told. When one rank
fails, those that talk to it fail too, often earlier: ``blame`` tells the cause from its consequences.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from join import JoinTimeoutError, PeerError
from join.collectives.broken import is_broken
from joinables.trainer.launch.errors import RemoteTraceback, WorkerRaised

OWN, ABORTED, OTHERS = 0, 1, 2
"""Whose fault a failure is: the rank's own; perhaps another's, as of a library that aborts without peers; another's."""


@dataclass(frozen=True)
class Failure:
    """Why a rank did not do its part, as the parent sees it. The lowest ``blame`` is the cause of the others."""

    rank: int
    error: BaseException
    blame: int
    text: str
    cause: RemoteTraceback | None = None


@dataclass(frozen=True)
class Account:
    """What a worker tells of an exception: its text, where it was, whose fault it is, itself if it can be pickled."""

    text: str
    traceback: str
    blame: int
    pickled: bytes | None

    @staticmethod
    def of(error: BaseException) -> Account:
        """Tell of ``error``, in the worker."""
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return Account(text, told, _blame(error), _pickled(error))

    def failure(self, rank: int) -> Failure:
        """What became of ``rank``, in the parent."""
        error: BaseException = WorkerRaised(f"rank {rank} raised an exception that cannot be pickled: {self.text}")
        if self.pickled is not None:
            try:
                error = _revived(self.pickled)
            except Exception as lost:  # its class cannot be imported here
                error = WorkerRaised(
                    f"rank {rank} raised an exception that cannot be loaded here ({lost}): {self.text}"
                )
        return Failure(rank, error, self.blame, self.text, RemoteTraceback(f"on rank {rank}\n{self.traceback}"))


def raise_cause(failures: Sequence[Failure]) -> NoReturn:
    """Raise the failure that the others follow from, of several the lowest rank's."""
    first, *others = sorted(failures, key=lambda failure: (failure.blame, failure.rank))
    add_note = getattr(first.error, "add_note", None)  # Python 3.11
    if others and add_note is not None:
        add_note("; ".join(f"rank {other.rank} failed too: {other.text[:200]}" for other in others))
    raise first.error from first.cause


def _blame(error: BaseException) -> int:
    return OTHERS if isinstance(error, (PeerError, JoinTimeoutError)) or is_broken(error) else OWN


def _pickled(error: BaseException) -> bytes | None:
    # An exception whose constructor does not take its args is pickled and then cannot be loaded: go round it.
    for form in (error, (type(error), error.args, vars(error))):
        try:
            pickled = pickle.dumps(form)
            if type(_revived(pickled)) is type(error):
                return pickled
        except Exception:
            continue
    return None


def _revived(pickled: bytes) -> BaseException:
    form = pickle.loads(pickled)
    if not isinstance(form, tuple):
        return form
    cls, args, state = cast("tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]", form)
    error = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(state)
    return error
