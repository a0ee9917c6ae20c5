"""The one message of the protocol: a few counters in one whole number, summed over all ranks.

Every rank, active or joined, contributes 0 or 1 to every counter; the sums are all that anyone needs to know. The
number of counters depends on the bursts in the list and not on the number of ranks::

    ACTIVE, LEADER, FAILED, STOPPING, FRESH,  then, for each burst,  announced, *flags

``ACTIVE`` counts the ranks that announce. ``LEADER`` is 1 while the rank that leads is among them. ``FAILED`` counts
the ranks that leave with an exception, ``STOPPING`` the exhausted ones under ``throw_on_early_termination``, ``FRESH``
the ranks for which this is the first header after their last input. A burst's ``announced`` counts the ranks that
announce it: anything but 0 or ``ACTIVE`` means that the ranks have diverged.

A counter has as many bits as the world size, so sums never run over: those of a DDP module are 63 bits at most up to 31
ranks. That matters: on gloo, the cost of a small all-reduce grows with its elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ACTIVE, LEADER, FAILED, STOPPING, FRESH = range(5)
_FIXED = 5


@dataclass(frozen=True)
class Header:
    """One summed header, read by name. Headers repeat, so what is read of one is kept.

    Attributes:
        counts: the counters.
        offsets: where each burst's section starts.
    """

    counts: Sequence[int]
    offsets: Sequence[int]

    @cached_property
    def active(self) -> int:
        """How many ranks announced."""
        return self.counts[ACTIVE]

    @cached_property
    def leader_alive(self) -> bool:
        """Whether the leading rank announced."""
        return self.counts[LEADER] > 0

    @cached_property
    def failed(self) -> int:
        """How many ranks left with an exception."""
        return self.counts[FAILED]

    @cached_property
    def stopping(self) -> bool:
        """Whether an exhausted rank ends the block for all."""
        return self.counts[STOPPING] > 0

    @cached_property
    def fresh(self) -> int:
        """How many ranks had just run out of inputs."""
        return self.counts[FRESH]

    def flags(self, index: int) -> Sequence[int]:
        """How many ranks set each flag of burst ``index``."""
        ends = (*self.offsets[1:], len(self.counts))
        return self.counts[self.offsets[index] + 1 : ends[index]]

    @cached_property
    def announcements(self) -> dict[int, int]:
        """The bursts that were announced, by index, and by how many ranks each."""
        return {index: self.counts[at] for index, at in enumerate(self.offsets) if self.counts[at]}

    @cached_property
    def diverged(self) -> bool:
        """Whether active ranks announced different bursts."""
        return any(count != self.active for count in self.announcements.values())

    @property
    def looping(self) -> int:
        """How many active ranks announced no burst, where others did: they begin a loop in lockstep."""
        return self.active - sum(self.announcements.values())


class HeaderCode:
    """Packs and unpacks headers.

    Args:
        flag_counts: for each burst that can be announced, how many flags it has.
        world_size: the number of ranks.
    """

    def __init__(self, flag_counts: Sequence[int], world_size: int) -> None:
        self.offsets: list[int] = []
        fields = _FIXED
        for flag_count in flag_counts:
            self.offsets.append(fields)
            fields += 1 + flag_count
        self.fields = fields
        self._size = world_size.bit_length()
        self.bits = fields * self._size
        """Size of a header in bits."""
        self._unpacked: dict[int, Header] = {}

    def pack(self, fields: Sequence[int]) -> int:
        """This rank's contribution: the fields that it sets to 1."""
        number = 0
        for field in fields:
            number |= 1 << self._size * field
        return number

    def unpack(self, total: int) -> Header:
        """Read the sum of what all ranks contributed."""
        header = self._unpacked.get(total)
        if header is None:
            mask = (1 << self._size) - 1
            counts = [total >> self._size * field & mask for field in range(self.fields)]
            header = self._unpacked[total] = Header(counts, self.offsets)
        return header
