"""Which mean a reduction makes of the ranks' gradients: :class:`Mean`, for DDP modules and replayed ones alike."""

from __future__ import annotations

from collections.abc import Callable


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
        self._awaits: Callable[[], float] | None = None
        self._sum: float | None = None

    @property
    def scales(self) -> bool:
        """Whether the mean may be another one than that over all ranks."""
        return self.weighted or not self.over_all_ranks

    def begin(self, parts: Callable[[], float] | None) -> None:
        """A reduction begins.

        Args:
            parts: waits for the sum under way: of the ranks' weights if ``weighted``, else the number of ranks that
                contribute; ``None`` where all ranks know that number.
        """
        self._awaits, self._sum = parts, None

    def parts(self, contributors: Callable[[], float]) -> float:
        """The sum of weights, or the number of contributors; awaited.

        Args:
            contributors: how many ranks contribute; called where :meth:`begin` did not sum them.
        """
        if self._awaits is not None:
            self._sum, self._awaits = self._awaits(), None
        return contributors() if self._sum is None else self._sum

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
            raise ValueError(
                "join.weight is 0 on all ranks at once, so their gradients have no mean; give one of them a weight"
                " above 0 [J140]"
            )
        return world_size / parts if parts else 1.0
