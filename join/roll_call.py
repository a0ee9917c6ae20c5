"""One small number of every rank, known to all ranks: :class:`RollCall`.

One all-reduce of as few words as the numbers fit in: each rank fills its own bits and nobody else's, so the sum is a
concatenation. For 31 ranks and numbers up to 3 that is one word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from join.collectives import Collective, Work

_WORD_BITS = 62  # the sign stays free


class RollCall:
    """Calls the roll over and over, always through the same tensor.

    Args:
        collective: the ranks.
        largest: the largest number a rank may answer.
    """

    def __init__(self, collective: Collective, largest: int) -> None:
        self._collective = collective
        self._bits = largest.bit_length()
        self._per_word = _WORD_BITS // self._bits
        words = -(-collective.world_size // self._per_word)
        self._tensor = torch.zeros(words, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Size of one call in bytes."""
        return self._tensor.numel() * self._tensor.element_size()

    def call(self, mine: int, seconds: float | None = None) -> Work:
        """Start a call, to which this rank answers ``mine``; the one before must have been read.

        Args:
            mine: the answer.
            seconds: after how long the call is given up, if this rank does not wait for ever.
        """
        word, place = divmod(self._collective.rank, self._per_word)
        self._tensor.zero_()
        self._tensor[word] = mine << (self._bits * place)
        if seconds is not None:
            return self._collective.all_reduce_for(self._tensor, seconds)
        return self._collective.all_reduce(self._tensor)

    def answers(self) -> list[int]:
        """What each rank answered, by rank, after the call is done."""
        words = cast("list[int]", self._tensor.tolist())
        mask = (1 << self._bits) - 1
        places = (divmod(rank, self._per_word) for rank in range(self._collective.world_size))
        return [(words[word] >> (self._bits * place)) & mask for word, place in places]


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

    def are_ends(self, answers: Iterable[int]) -> list[bool]:
        """Which of the answers say that their ranks do not go on."""
        return [answer >= self._failed for answer in answers]
