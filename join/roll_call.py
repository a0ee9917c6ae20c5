"""One small number of every rank, known to all ranks: :class:`RollCall`.

One sum, of which each rank fills bits of its own, so that it is a concatenation: of 62 bits for 31 ranks and numbers up
to 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from join.collectives import Collective, Line, Sum


class RollCall:
    """Calls the roll over and over.

    Args:
        collective: the ranks.
        line: connects them.
        largest: the largest number a rank may answer.
    """

    def __init__(self, collective: Collective, line: Line, largest: int) -> None:
        self._line, self._size, self._world_size = line, largest.bit_length(), collective.world_size
        self._shift, self._bits = collective.rank * self._size, collective.world_size * self._size
        self._last = -1  # what was read, and what it says: that repeats
        self._answers: list[int] = []

    def call(self, mine: int, seconds: float | None = None) -> Sum:
        """Start a call, to which this rank answers ``mine``; the one before must have been read.

        Args:
            mine: the answer.
            seconds: after how long the call is given up, if this rank does not wait for ever.
        """
        self._sum = self._line.sum(mine << self._shift, self._bits, seconds)
        return self._sum

    def answers(self) -> list[int]:
        """What each rank answered, by rank, after the call is done."""
        total = self._sum.total()
        if total != self._last:
            mask = (1 << self._size) - 1
            self._answers = [total >> self._size * rank & mask for rank in range(self._world_size)]
            self._last = total
        return self._answers


class Answers:
    """What a rank may answer, as one number: how many batches it has for a window, or how it ended.

    Args:
        window: the most batches it may have.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._failed, self._left = window + 1, 2 * window + 2
        self.wrong = self.largest = 3 * window + 3
        """It had another number of batches than it declared."""

    def failed(self, step: int) -> int:
        """It raised after this many steps of the window."""
        return self._failed + min(step, self._window)

    def has_failed(self, answer: int) -> bool:
        """Whether an answer says so."""
        return self._failed <= answer < self._left

    def left(self, step: int) -> int:
        """It left the loop after this many steps of the window."""
        return self._left + min(step, self._window)

    def has_left(self, answer: int) -> bool:
        """Whether an answer says so."""
        return self._left <= answer < self.wrong

    def some_end(self, answers: Iterable[int]) -> bool:
        """Whether an answer says that its rank does not go on."""
        return max(answers) >= self._failed

    def all_end(self, answers: Iterable[int]) -> bool:
        """Whether all answers say so."""
        return min(answers) >= self._failed
