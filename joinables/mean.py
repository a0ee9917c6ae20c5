"""What a reduction makes of the ranks' gradients, of DDP modules and replayed ones alike.

:class:`Window` is what was accumulated since the last one, and :class:`Mean` which mean is made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Window:
    """The backwards since the last reduction (under ``no_sync``, say); replaced by a new one when that is over.

    Attributes:
        unreduced: whether this rank has gradients that no reduction has included yet.
        weighted: whether these are multiplied by ``join.weight``.
        weight: the sum of the weights of this rank's backwards.
        with_data: in a loop over ``Join.iterate``, the ranks that had data in one of the backwards, as a bit mask.
        with_dummies: in such a loop, whether a rank had no data in one of them.
    """

    unreduced: bool = False
    weighted: bool = False
    weight: float = 0.0
    with_data: int = 0
    with_dummies: bool = False


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

    def begin(self, divisor: Callable[[], float] | None) -> None:
        """Begin a reduction.

        Args:
            divisor: waits for the sum under way: of the ranks' weights if ``weighted``, else the number of ranks that
                contribute; ``None`` where all ranks know that number.
        """
        self._awaits, self._sum = divisor, None

    def wait(self) -> None:
        """Wait for the sum under way, if there is one: it must be over before the next one begins."""
        if self._awaits is not None:
            self._sum, self._awaits = self._awaits(), None

    def divisor(self, contributors: Callable[[], float]) -> float:
        """The sum of weights or contributors; ``contributors`` returns their number where :meth:`begin` sums none."""
        self.wait()
        return contributors() if self._sum is None else self._sum

    def factor(self, world_size: int, contributors: Callable[[], float]) -> float:
        """What to multiply the reduction's result by; 1 if nobody contributed. For ``contributors``: :meth:`divisor`.

        Raises:
            ValueError: on all ranks, if their weights are all 0.
        """
        divisor = self.divisor(contributors)
        if self.weighted and divisor == 0:
            raise ValueError(
                "join.weight is 0 on all ranks at once, so their gradients have no mean; give one of them a weight"
                " above 0 [J140]"
            )
        return world_size / divisor if divisor else 1.0
