"""One small number of every rank, known to all ranks: :class:`RollCall`.

One sum of as few words as the numbers fit in: each rank fills its own bits and nobody else's, so the sum is a
concatenation. For 31 ranks and numbers up to 3 that is one word.
"""

from __future__ import annotations

from collections.abc import Iterable

from join.collectives import Collective, Line, Work

_WORD_BITS = 62  # the sign stays free


class RollCall:
    """Calls the roll over and over.

    Args:
        collective: the ranks.
        line: connects them.
        largest: the largest number a rank may answer.
    """

    def __init__(self, collective: Collective, line: Line, largest: int) -> None:
        self._rank, self._line = collective.rank, line
        self._bits = largest.bit_length()
        per_word = _WORD_BITS // self._bits
        self._places = [divmod(rank, per_word) for rank in range(collective.world_size)]
        self._words = self._places[-1][0] + 1
        self.nbytes = 8 * self._words
        """Size of one call in bytes."""
        self._last: list[int] = []  # words that were read, and what they say: they repeat
        self._answers: list[int] = []

    def call(self, mine: int, seconds: float | None = None) -> Work:
        """Start a call, to which this rank answers ``mine``; the one before must have been read.

        Args:
            mine: the answer.
            seconds: after how long the call is given up, if this rank does not wait for ever.
        """
        words = [0] * self._words
        word, place = self._places[self._rank]
        words[word] = mine << (self._bits * place)
        self._sum = self._line.sum(words, seconds)
        return self._sum

    def answers(self) -> list[int]:
        """What each rank answered, by rank, after the call is done."""
        words = self._sum.words()
        if words != self._last:
            mask = (1 << self._bits) - 1
            self._answers = [(words[word] >> (self._bits * place)) & mask for word, place in self._places]
            self._last = words
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
