"""Which mean a reduction makes of the ranks' gradients: :class:`Mean`, for DDP modules and replayed ones alike."""

from __future__ import annotations

from collections.abc import Callable

import torch

from join.collectives import Collective, Work


class Mean:
    """Turns what DDP and FSDP reduce, the sum over ranks divided by their number, into the mean that was asked for.

    The mean over all ranks is that already. The mean over contributors is that times ``world_size / contributors``, and
    the weighted mean is that times ``world_size / sum of weights``, where each gradient was multiplied by its weight.

    Args:
        over_all_ranks: whether to divide by the number of ranks where there are no weights
            (``divide_by_initial_world_size``).
    """

    def __init__(self, *, over_all_ranks: bool = True) -> None:
        self.over_all_ranks = over_all_ranks
        self.weighted = False
        """Whether the reduction under way, or to come, makes the weighted mean."""
        self._sum: tuple[torch.Tensor, Work] | None = None

    @property
    def scales(self) -> bool:
        """Whether the mean may be another one than that over all ranks."""
        return self.weighted or not self.over_all_ranks

    def begin(self, collective: Collective, mine: float | None) -> None:
        """A reduction begins.

        Args:
            collective: the group.
            mine: the sum of this rank's weights, or 1 if it contributes, to be summed over the ranks (one all-reduce,
                awaited by :meth:`parts`); ``None`` where all ranks know the number of contributors.
        """
        self._sum = None
        if mine is not None:
            total = torch.tensor(mine, dtype=torch.float64)
            self._sum = total, collective.all_reduce(total)

    def parts(self, contributors: Callable[[], float]) -> float:
        """The sum of weights, or the number of contributors; awaited.

        Args:
            contributors: how many ranks contribute; called where :meth:`begin` did not sum them.
        """
        if self._sum is None:
            return contributors()
        total, work = self._sum
        work.wait()
        return total.item()

    def factor(self, world_size: int, contributors: Callable[[], float]) -> float:
        """What to multiply the reduction's result by; 1 if nobody contributed.

        Args:
            world_size: how many ranks the group has.
            contributors: as in :meth:`parts`.

        Raises:
            ValueError: on all ranks, if their weights are all 0.
        """
        parts = self.parts(contributors)
        if self.weighted and parts == 0:
            raise ValueError("join.weight is 0 on all ranks at once, so their gradients have no mean")
        return world_size / parts if parts else 1.0
