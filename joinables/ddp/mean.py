"""The means that a reduction can make, each a :class:`Mean`: the divisor of gradients. :class:`Means` chooses one.

DDP divides the sum over ranks by the world size W. Every mean is a multiple of this quotient, and counts the last
result (:class:`LastResult`) so often that the new result contains it once. S is the sum of the weights, n the number of
contributors, u the unit of the weights (``join.scaling``)::

    mean                  chosen if                                   multiple     a rank counts the last result
    ----                  ---------                                   --------     -----------------------------
    Mean                  a loop with scaled losses, or with the      1            once, on dummies too
                          mean over all ranks; any loop in a step
                          in which all ranks have data, or none
    OverRanksWithData     another loop, while a rank has no data      W / n        once
    OnDummy               the same, on a rank without data            W / n        0 times
    OverAllRanks          plain block                                 1            W / n times
    OverContributors      the same, divide_by_initial_world_size=     W / n        once
                          False
    Weighted              plain block with join.weight                u * W / S    w / u times, w the sum of this rank's
                                                                                   weights in the window

A new kind of mean is a class here, an instance in ``Means.attach``, and a branch of ``Means.choose``. In a plain block,
joined ranks must find it in the header too. That needs a branch of ``Means.agree``, and a flag of
``GradientSync.flags`` if none of its flags shows which mean it is.

The source of n and S is:

- A header that is sent when the backward begins counts the contributors.
- A header that is sent in the forward cannot show whether a backward follows. Then n is summed next to the buckets. S
  always is.
- In a loop over ``Join.iterate`` nothing is sent, since all ranks know how many ranks have data, the lowest of them,
  and the sum of the weights.
"""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from join.collectives import Sum
from join.joinable import Burst
from join.protocol.channel import Channel
from joinables.ddp.window import Window

ANNOUNCED, WITH_BUFFERS, CONTRIBUTES, WEIGHTED = range(4)
"""The counts of a reduction in a header. All but the first are flags: it announces the buffers too, this rank
contributes, weights are summed."""


class Mean:
    """The quotient as DDP leaves it, in a loop over ``Join.iterate``; base class of the other means.

    Args:
        channel: The channel of the block.
        burst: The burst that announces the reductions.
    """

    weighted: ClassVar[bool] = False
    """Whether weights are summed."""
    may_recount: ClassVar[bool] = False
    """Whether this rank may have to count the last result otherwise than once."""
    has_factor: ClassVar[bool] = False
    """Whether the mean is another multiple of the quotient than 1."""

    def __init__(self, channel: Channel, burst: Burst) -> None:
        self._channel, self._burst, self._world_size = channel, burst, channel.collective.world_size
        self.with_buffers = False
        """Whether the header was sent in the forward, and announces the buffers too."""
        self.in_parts = False
        """Whether gradients become parts of the mean before they are reduced."""
        self.window = Window()
        """The window of the last reduction."""

    def times(self, window: Window) -> float:
        """Return how many times this rank counts the last result.

        Args:
            window: The window of this rank.
        """
        return 1.0

    def begin(self, window: Window) -> None:
        """Start the sum of n or S, if it is needed and not known.

        Args:
            window: The window of this rank, which has its summand.
        """

    def factor(self) -> float:
        """Return the multiple of the quotient, and wait for the sum of n or S if needed; called once."""
        return 1.0


class OverRanksWithData(Mean):
    """Mean over the ranks with data, in a step of a loop in which other ranks have none."""

    has_factor = True

    @override
    def factor(self) -> float:
        return self._world_size / self._channel.place.step.contributors


class OnDummy(OverRanksWithData):
    """The same mean, on a rank without data."""

    may_recount = True

    @override
    def times(self, window: Window) -> float:
        return 0.0


class OverAllRanks(Mean):
    """Mean over all ranks in a plain block, in which joined ranks contribute nothing."""

    may_recount = True

    @override
    def times(self, window: Window) -> float:
        return self._world_size / self._channel.headers.counts(self._burst)[CONTRIBUTES]


class OverContributors(Mean):
    """Mean over the ranks that contribute, in a plain block."""

    has_factor = True
    _sum: Sum[float]

    @override
    def begin(self, window: Window) -> None:
        self._sum = self._channel.sums.sum_float(float(window.backwards > 0))

    @override
    def factor(self) -> float:
        if self.with_buffers:
            total = self._channel.guard.wait(self._sum, "sums contributors", self._sum.total)
        else:
            total = self._channel.headers.counts(self._burst)[CONTRIBUTES]
        return self._world_size / total if total else 1.0


class Weighted(OverContributors):
    """Weighted mean, in a plain block. ``Join.scale`` has multiplied the losses by ``weight / unit``."""

    weighted = True
    may_recount = True

    @override
    def times(self, window: Window) -> float:
        return (window.weight or 0.0) / self._channel.scaling.unit

    @override
    def begin(self, window: Window) -> None:
        self._unit = self._channel.scaling.unit
        self._sum = self._channel.sums.sum_float(window.weight or 0.0)

    @override
    def factor(self) -> float:
        mean_weight = self._channel.guard.wait(self._sum, "sums weights", self._sum.total) / self._world_size
        self._channel.scaling.learn(mean_weight, len(self._channel.roster.backwards))
        return self._unit / mean_weight if mean_weight else 1.0


class Means:
    """The means of one module in one block.

    Args:
        over_all_ranks: Whether gradients without weights are divided by the world size
            (``divide_by_initial_world_size``) instead of by the number of contributors.
    """

    def __init__(self, *, over_all_ranks: bool) -> None:
        self.over_all_ranks = over_all_ranks
        """Whether gradients without weights are divided by the world size."""

    def attach(self, channel: Channel, burst: Burst, *, has_comm_hook: bool) -> None:
        """Prepare for a block that is entered.

        Args:
            channel: The channel of the block.
            burst: The burst that announces the reductions.
            has_comm_hook: Whether gradients pass through a comm hook. It may round gradients, or carry errors over to
                the next step, so it receives parts of the weighted mean.
        """
        self._channel, self._burst = channel, burst
        self.scope = channel.roster.scopes[-1]
        """The block, which has the weight of a batch."""
        self._as_it_is, self._with_data = Mean(channel, burst), OverRanksWithData(channel, burst)
        self._on_dummy = OnDummy(channel, burst)
        self.unweighted = (OverAllRanks if self.over_all_ranks else OverContributors)(channel, burst)
        """The mean of a plain block without weights."""
        self._weighted = Weighted(channel, burst)
        self._weighted.in_parts = has_comm_hook
        self.agreed: Mean = self.unweighted
        """The last mean of a plain block that the headers of all active ranks agreed on."""

    def choose(self) -> Mean:
        """Return the mean of the current forward or backward."""
        channel, step = self._channel, self._channel.place.step
        if not step.in_loop:
            return self.unweighted if self.scope.weight is None else self._weighted
        if self.over_all_ranks or channel.scaling.in_use or not 0 < step.contributors < channel.collective.world_size:
            return self._as_it_is
        return self._on_dummy if step.is_dummy else self._with_data

    def agree(self) -> Mean:
        """Return the mean that active ranks announced in the last header of the burst, in a plain block.

        A joined rank calls this, and a rank that changes between weights and no weights. Other ranks need not wait for
        the header.

        Raises:
            ValueError: If some active ranks use weights and others do not.
        """
        counts = self._channel.headers.counts(self._burst)
        using, announced = counts[WEIGHTED], counts[ANNOUNCED]
        if using and using != announced:
            raise ValueError(
                f"join.weight is set on {using} ranks and not on {announced - using}. Set it on all ranks or on none."
                " [J277]"
            )
        self.agreed = self._weighted if using else self.unweighted
        self.agreed.with_buffers = counts[WITH_BUFFERS] > 0
        return self.agreed
