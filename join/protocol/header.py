"""The one message of the protocol: a few counters in one whole number, summed over all ranks.

Every rank, active or joined, contributes 0 or 1 to every counter; the sums are all that anyone needs to know. The
number of counters depends on the bursts in the list and not on the number of ranks::

    ACTIVE, LEADER, STOPPING, FRESH,  then, for each burst,  announced, *flags

``ACTIVE`` counts the ranks that announce. ``LEADER`` is 1 while the rank that leads is among them. ``STOPPING`` counts
the exhausted ranks under ``throw_on_early_termination``, ``FRESH`` those for which this is the first header after their
last input. A burst's ``announced`` counts the ranks that announce it: anything but 0 or ``ACTIVE`` means that the ranks
have diverged.

A counter has as many bits as the world size, so sums never run over: those of a DDP module are 63 bits at most up to 31
ranks. That matters: on gloo, the cost of a small all-reduce grows with its elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

ACTIVE, LEADER, STOPPING, FRESH = range(4)
_FIXED = 4


class Header:
    """One summed header, read by name.

    Args:
        counts: the counters.
        offsets: where each burst's section starts.

    Attributes:
        active: how many ranks announced.
        leader_alive: whether the leading rank announced.
        stopping: whether an exhausted rank ends the block for all.
        fresh: how many ranks had just run out of inputs.
        announcements: the bursts that were announced, by index, and by how many ranks each.
        diverged: whether active ranks announced different bursts.
    """

    def __init__(self, counts: Sequence[int], offsets: Sequence[int]) -> None:
        self.counts, self._offsets = counts, offsets
        self.active, leaders, stopping, self.fresh = counts[:_FIXED]
        self.leader_alive, self.stopping = leaders > 0, stopping > 0
        self.announcements = {index: counts[at] for index, at in enumerate(offsets) if counts[at]}
        self.diverged = not {self.active}.issuperset(self.announcements.values())

    def flags(self, index: int) -> Sequence[int]:
        """How many ranks set each flag of burst ``index``."""
        ends = (*self._offsets[1:], len(self.counts))
        return self.counts[self._offsets[index] + 1 : ends[index]]


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
        # Headers repeat, step by step, so what was made of them is kept: it is half of what reading one costs.
        self.unpack = cache(self._unpack)

    def pack(self, fields: Sequence[int]) -> int:
        """This rank's contribution: the fields that it sets to 1."""
        number = 0
        for field in fields:
            number |= 1 << self._size * field
        return number

    def _unpack(self, total: int) -> Header:
        """Read the sum of what all ranks contributed."""
        mask = (1 << self._size) - 1
        return Header([total >> self._size * field & mask for field in range(self.fields)], self.offsets)
