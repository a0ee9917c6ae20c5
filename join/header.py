"""The one message of the protocol: a small float64 vector that all ranks sum.

Every rank, active or joined, contributes to every header; the sum is all that anyone needs to know. Its size depends
on the number of bursts in the list and not on the number of ranks. Layout::

    [ACTIVE, LEADER, FAILED, STOPPING, FRESH]  then, for each burst,  [announced, *payload]

``ACTIVE`` counts the ranks that announce. ``LEADER`` is 1 while the rank that leads is among them. ``FAILED`` counts
the ranks that leave with an exception, ``STOPPING`` the exhausted ones under ``throw_on_early_termination``, ``FRESH``
the ranks for which this is the first header after their last input. A burst's ``announced`` counts the ranks that
announce it: anything but 0 or ``ACTIVE`` means that the ranks have diverged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from join.joinable import Burst

ACTIVE, LEADER, FAILED, STOPPING, FRESH = range(5)
_FIXED = 5
_CACHED = 64  # packed headers to keep


@dataclass(frozen=True)
class Header:
    """One summed header, read by name.

    Attributes:
        values: the summed vector.
        offsets: where each burst's section starts.
    """

    values: Sequence[float]
    offsets: Sequence[int]

    @property
    def active(self) -> int:
        """How many ranks announced."""
        return round(self.values[ACTIVE])

    @property
    def leader_alive(self) -> bool:
        """Whether the leading rank announced."""
        return self.values[LEADER] > 0

    @property
    def failed(self) -> int:
        """How many ranks left with an exception."""
        return round(self.values[FAILED])

    @property
    def stopping(self) -> bool:
        """Whether an exhausted rank ends the block for all."""
        return self.values[STOPPING] > 0

    @property
    def fresh(self) -> int:
        """How many ranks had just run out of inputs."""
        return round(self.values[FRESH])

    def payload(self, index: int, width: int) -> Sequence[float]:
        """The summed payload of burst ``index``."""
        start = self.offsets[index] + 1
        return self.values[start : start + width]

    @cached_property
    def announcements(self) -> dict[int, int]:
        """The bursts that were announced, by index, and by how many ranks each."""
        return {index: round(self.values[at]) for index, at in enumerate(self.offsets) if self.values[at]}

    @property
    def diverged(self) -> bool:
        """Whether active ranks announced different bursts."""
        return any(count != self.active for count in self.announcements.values())


class HeaderBuffer:
    """Packs and unpacks headers for a fixed list of bursts, always through the same tensor.

    A joinable that announces only because it comes first has no payload; it is ``None`` in the list.
    """

    def __init__(self, bursts: Sequence[Burst | None]) -> None:
        self.offsets: list[int] = []
        self._payloads: list[tuple[int, int, Burst]] = []
        size = _FIXED
        for index, burst in enumerate(bursts):
            self.offsets.append(size)
            if burst is not None and burst.payload_width:
                self._payloads.append((index, size + 1, burst))
                size += burst.payload_width
            size += 1
        self._zeros = [0.0] * size
        self._packed: dict[tuple[float, ...], torch.Tensor] = {}
        self.tensor = torch.zeros(size, dtype=torch.float64)

    @property
    def nbytes(self) -> int:
        """Size of one header in bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def pack(self, flags: Sequence[int], announcing: int | None) -> torch.Tensor:
        """Fill the tensor with this rank's contribution.

        Args:
            flags: which of the fixed fields this rank sets to 1.
            announcing: index of the burst this rank announces, if any.
        """
        values = self._zeros.copy()
        for field in flags:
            values[field] = 1.0
        if announcing is not None:
            values[self.offsets[announcing]] = 1.0
        for index, start, burst in self._payloads:
            values[start : start + burst.payload_width] = burst.payload(index == announcing)
        # Headers repeat, and a copy costs a fifth of making a tensor from a list.
        key = tuple(values)
        packed = self._packed.get(key)
        if packed is None:
            if len(self._packed) >= _CACHED:
                self._packed.clear()
            packed = self._packed[key] = torch.tensor(values, dtype=torch.float64)
        return self.tensor.copy_(packed)

    def unpack(self) -> Header:
        """Read the tensor, after the all-reduce is done."""
        return Header(cast("list[float]", self.tensor.tolist()), self.offsets)
