"""The mean that one reduction makes, with all that is known of it: :class:`Mean`.

DDP divides the sum over ranks by the world size W. Every mean is a multiple of this quotient, and counts the last
result (:class:`LastResult`) so often that the new result contains it once. S is the sum of the weights, n the number of
contributors, u the unit of the weights (``join.scaling``)::

    where                 mean                                        multiple     a rank counts the last result
    -----                 ----                                        --------     -----------------------------
    a loop                with scaled losses, or over all ranks; any  1            once, on dummies too
                          mean in a step in which all ranks have
                          data, or none
                          otherwise, while a rank has no data         W / n        once, on dummies 0 times
    a plain block         over all ranks                              1            W / n times
                          over contributors: divide_by_initial_       W / n        once
                          world_size=False
                          weighted, by join.weight                    u * W / S    w / u times, w the sum of this rank's
                                                                                   weights in the window

A mean lives from the forward or backward that chooses it to the end of the reduction. In a plain block, joined ranks
find in the header which one it is (``GradientSync.flags``).

The source of n and S is:

- A header that is sent when the backward begins counts the contributors.
- A header that is sent in the forward cannot show whether a backward follows. Then n is summed next to the buckets. S
  always is.
- In a loop over ``Join.iterate`` nothing is sent, since all ranks know how many ranks have data, the lowest of them,
  and the sum of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from join.collectives import Sum
from join.joinable import Burst
from join.protocol.channel import Channel
from joinables.ddp.window import Window

ANNOUNCED, WITH_BUFFERS, CONTRIBUTES, WEIGHTED = range(4)
"""The counts of a reduction in a header. All but the first are flags: it announces the buffers too, this rank
contributes, weights are summed."""


@dataclass(slots=True, eq=False)
class Mean:
    """The mean of one reduction.

    Attributes:
        channel: The channel of the block.
        burst: The burst that announces the reduction.
        multiple: The multiple of the quotient; ``None`` if :meth:`factor` finds it.
        times: How many times this rank counts the last result; ``None`` if :meth:`count` finds it.
        weighted: Whether weights are summed. ``Join.scale`` has multiplied the losses by ``weight / unit`` then.
        with_buffers: Whether the header was sent in the forward, and announces the buffers too.
        window: The window of the reduction, once it is closed.
        unit: The unit of the weights.
    """

    channel: Channel
    burst: Burst
    multiple: float | None = 1.0
    times: float | None = 1.0
    weighted: bool = False
    with_buffers: bool = False
    window: Window = field(init=False)
    unit: float = 1.0
    _sum: Sum[float] | None = field(default=None, init=False)

    def count(self, window: Window) -> float:
        """Return how many times this rank counts the last result.

        Args:
            window: The window of this rank.
        """
        if self.times is not None:
            return self.times
        if self.weighted:
            return (window.weight or 0.0) / self.channel.scaling.unit
        return self.channel.collective.world_size / self.channel.headers.counts(self.burst)[CONTRIBUTES]

    def begin(self, window: Window) -> None:
        """Start the sum of n or S.

        Args:
            window: The window of this rank, which has its summand.
        """
        summand = float(window.backwards > 0)
        if self.weighted:
            self.unit, summand = self.channel.scaling.unit, window.weight or 0.0
        self._sum = self.channel.sums.sum_float(summand)

    def factor(self) -> float:
        """Return the multiple of the quotient, and wait for the sum of n or S if it was started; called once."""
        if self.multiple is not None:
            return self.multiple
        channel, world_size = self.channel, self.channel.collective.world_size
        if self._sum is None:
            return world_size / (channel.headers.counts(self.burst)[CONTRIBUTES] or world_size)
        what = "sums weights" if self.weighted else "sums contributors"
        mean = channel.guard.wait(self._sum, what, self._sum.total) / world_size
        if self.weighted:
            channel.scaling.learn(mean, len(channel.roster.backwards))
        return self.unit / mean if mean else 1.0
