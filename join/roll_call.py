"""One small number of every rank, known to all ranks: :class:`RollCall`.

One all-reduce of as few words as the numbers fit in: each rank fills its own bits and nobody else's, so the sum is a
concatenation. For 31 ranks and numbers up to 3 that is one word.
"""

from __future__ import annotations

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

    def call(self, mine: int) -> Work:
        """Start a call, to which this rank answers ``mine``; the one before must have been read."""
        word, place = divmod(self._collective.rank, self._per_word)
        self._tensor.zero_()
        self._tensor[word] = mine << (self._bits * place)
        return self._collective.all_reduce(self._tensor)

    def answers(self) -> list[int]:
        """What each rank answered, by rank, after the call is done."""
        words = cast("list[int]", self._tensor.tolist())
        mask = (1 << self._bits) - 1
        places = (divmod(rank, self._per_word) for rank in range(self._collective.world_size))
        return [(words[word] >> (self._bits * place)) & mask for word, place in places]
