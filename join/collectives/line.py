"""Operations that have been started (:class:`Work`), and :class:`Line` for small numbers of all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

import torch
from typing_extensions import override

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)

MESSAGES, SUMS = range(2)
"""Numbers of the lines of a group: for the messages of the protocol, and for sums between the collectives of bursts."""


class Work(Protocol):
    """A collective that has been started. ``torch.distributed.Work`` is one.

    Once it is done, a method that returns its result raises RuntimeError if it has failed, as ``wait`` does.
    """

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Block until the operation is done.

        Raises:
            RuntimeError: If ``timeout`` expires first. You may then wait again.
        """
        ...

    def is_completed(self) -> bool:
        """Return whether the operation is done."""
        ...


class Sum(Work, Protocol[V_co]):
    """A sum over all ranks that has been started: of numbers, or of bytes, which are listed in rank order."""

    nbytes: int
    """Number of bytes that each rank sends."""

    def total(self) -> V_co:
        """Return the sum, once the operation is done. It is equal on all ranks to the last bit."""
        ...

    def get_future(self) -> torch.futures.Future[None]:
        """Wait for the operation, and return a future that is done, as ``torch.distributed.Work`` has one."""
        self.wait()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


class Finished(Sum[V], Generic[V]):
    """Operation that is done, such as one of a single rank. It makes no tensor: a loop sends one in each step."""

    nbytes = 0

    def __init__(self, value: V) -> None:
        self._value = value

    @override
    def wait(self, timeout: timedelta | None = None, /) -> bool:
        return True

    @override
    def is_completed(self) -> bool:
        return True

    @override
    def total(self) -> V:
        return self._value


DONE = Finished(0)
"""An operation that is done. All ranks and callers share it."""


class Line(ABC):
    """Sequence of operations over the ranks of a group, in one order on all of them.

    Each operation is done before the next one is started, apart from one that is read late.
    """

    @abstractmethod
    def sum(self, number: int, bits: int) -> Sum[int]:
        """Start summing a number over all ranks.

        Args:
            number: The number of this rank. Neither it nor the sum is negative.
            bits: The largest number of bits that the sum may have; equal on all ranks.
        """

    @abstractmethod
    def sum_float(self, number: float) -> Sum[float]:
        """Start summing a floating-point number of 64 bits over all ranks."""

    @abstractmethod
    def gather(self, data: bytes) -> Sum[list[bytes]]:
        """Start gathering a few bytes from each rank, equally many from each."""
