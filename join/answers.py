"""What a rank says in a roll call of a loop, as one number: :class:`Answers`."""

from __future__ import annotations

from collections.abc import Iterable

_BURST_BITS = 5  # for how many bursts a rank ran in a step: more are not told apart


class Answers:
    """How many batches a rank has for a window, or how it ended; and, packed with it, how many bursts it has run.

    Args:
        window: the most batches it may have.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._failed, self._left = window + 1, 2 * window + 2
        self.wrong = 3 * window + 3
        """It had another number of batches than it declared."""
        self._burst_bits = _BURST_BITS + (window - 1).bit_length()
        self._most_bursts = (1 << self._burst_bits) - 1
        self.largest = self.packed(self.wrong, self._most_bursts)
        """The largest packed number."""

    def packed(self, answer: int, bursts: int) -> int:
        """An answer, and how many bursts its rank has run since its last one."""
        most = self._most_bursts
        return answer << self._burst_bits | (bursts if bursts < most else most)

    def unpacked(self, packed: Iterable[int]) -> tuple[list[int], list[int]]:
        """The answers, and the numbers of bursts; one that is too large to be told is the largest that can."""
        return [each >> self._burst_bits for each in packed], [each & self._most_bursts for each in packed]

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
