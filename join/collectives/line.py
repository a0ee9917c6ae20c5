"""Lines, on which ranks sum a few whole numbers, as headers do: :class:`Line`, and :class:`GroupLine` over a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import torch
from typing_extensions import override

from join.collectives.work import Work

if TYPE_CHECKING:
    from join.collectives.base import Collective


class Sum(Work, Protocol):
    """A sum under way."""

    def words(self) -> list[int]:
        """The sums, once they are there."""
        ...


class Line(ABC):
    """Connects the ranks of a group for sums. One is under way at a time: each is done before the next is started."""

    keeps_notes: ClassVar[bool] = False
    """Whether ranks can read each other's notes."""

    @abstractmethod
    def sum(self, words: Sequence[int], seconds: float | None = None) -> Sum:
        """Start summing words of 63 bits over all ranks.

        Args:
            words: as many on all ranks; neither they nor their sums are negative.
            seconds: after how long a rank that leaves gives it up, so that it does not keep its process from ending;
                ``None`` if it does not.
        """

    def note(self, number: int, value: int) -> None:
        """Leave a note for the others, if the line keeps any; that of ``number`` is there for the next 30 or so.

        Args:
            number: counted from 1.
            value: at least 0, and less than 2 to the power of 62.
        """

    def noted(self, rank: int, number: int) -> int | None:
        """A rank's note of that number; ``None`` if it has left none yet."""
        return None

    def restart(self) -> None:
        """Take back this rank's notes, and what it gave to sums that others may not have come to; both count anew.

        All ranks call it where nothing is under way, and meet afterwards, before they use the line.
        """

    def lost(self) -> list[int]:
        """The ranks whose processes are gone, where a sum does not fail on account of them: they had given theirs."""
        return []


class GroupLine(Line):
    """Sums are all-reduces, in the order of everything else on their collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    @override
    def sum(self, words: Sequence[int], seconds: float | None = None) -> Sum:
        tensor = torch.tensor(words)
        if seconds is None:
            return _GroupSum(self._collective.all_reduce(tensor), tensor)
        return _GroupSum(self._collective.all_reduce_for(tensor, seconds), tensor)


class _GroupSum:
    """An all-reduce, and the tensor that it is of."""

    def __init__(self, work: Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor
        self.is_completed = work.is_completed

    def wait(self, *timeout: timedelta) -> bool:
        return self._work.wait(*timeout)

    def words(self) -> list[int]:
        return cast("list[int]", self._tensor.tolist())
