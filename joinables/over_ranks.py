"""Numbers over all ranks, outside the loop: :class:`Mean`, after a plain block, and :func:`steps`, before a block."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from typing_extensions import override

from join import Join, JoinError, ProtocolError
from join.arguments import checked_number
from join.collectives import SingleCollective, collective_of
from join.errors import described
from join.joinable import OnGroup
from join.mean import mean_over_ranks
from join.options import Options, check_loader
from join.read_ahead import length_of


class Mean(OnGroup):
    """Weighted mean over the samples of all ranks, such as the mean loss of an epoch.

    List it in a block. In the block it communicates nothing, and each rank updates it with its own batches, as often as
    it likes. When the block ends, the sums of all ranks are added, and :meth:`compute` returns the same mean on all
    ranks. It ignores dummy batches of ``Join.iterate``.

    Without :meth:`reset`, a later block continues with the samples of the earlier ones. Outside a block, and in a block
    with ``enable=False``, it is the mean of this rank only.

    Example::

        mean_loss = Mean()
        with Join([model, optimizer, mean_loss], divide_by_initial_world_size=False):
            for x, y in loader:
                loss = train_step(x, y)
                mean_loss.update(loss, len(x))
        print(mean_loss.compute())
    """

    communicates: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__(None)
        self._join: Join | None = None  # while its block is open
        self.reset()

    def update(self, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add the mean over a batch. If ``value`` is on an accelerator, the host does not wait for it.

        Args:
            value: A number, or a tensor with one element.
            weight: The number of samples or tokens that ``value`` is the mean of. With a weight of 0 the value is
                ignored, even if it is NaN.

        Raises:
            TypeError: If an argument is something else.
            ValueError: If ``weight`` is negative or not finite.
        """
        if self._join is not None and self._join.shadowing:
            return
        if not isinstance(value, Real) and getattr(value, "numel", int)() != 1:
            raise TypeError(
                f"Mean.update got {value!r}, which is not a number. Pass the mean over the batch, and make a Mean for"
                " each value. [J681]"
            )
        if number := checked_number("weight", weight):
            own = value.detach().double().reshape(()) if isinstance(value, torch.Tensor) else value
            self._sum, self._weight, self._merged = self._sum + own * number, self._weight + number, None

    def compute(self) -> float:
        """Return the mean over all ranks, after a block and until the next update; otherwise the mean of this rank.

        It is NaN if there are no samples.
        """
        if self._merged is not None:
            return self._merged
        return float(self._sum) / self._weight if self._weight else math.nan

    def reset(self) -> None:
        """Forget all values."""
        self._sum: float | torch.Tensor = 0.0
        self._weight = 0.0
        self._merged: float | None = None  # the mean over all ranks

    @override
    def attach(self, join: Any) -> None:
        self._join, self._merged = join, None

    @override
    def detach(self) -> None:
        self._join = None

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        assert self._join is not None
        self._merged = mean_over_ranks(self._join.collective, self.compute(), self._weight)


def steps(loader: Iterable[Any], window: int | Literal["all"] = 1, process_group: Any = None) -> int:
    """Return the number of optimizer steps of a loop in which ranks may have different numbers of batches.

    It is the same on all ranks: the largest number of batches of a rank, divided by ``window`` and rounded up. Build
    learning rate schedules and progress bars from it, because ``len(loader)`` differs between ranks. Call it on all
    ranks, before the block.

    Example::

        steps = joinables.steps(loader)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * steps)

    Args:
        loader: The batches of this rank, with a length.
        window: The number of batches whose gradients one optimizer step averages, as in :meth:`Join.iterate`.
        process_group: The process group; ``None`` is the default group, or this process alone without one.

    Raises:
        TypeError: On all ranks, if the loader of a rank has no length. If ``window`` is not an integer.
        ValueError: If ``window`` is less than 1.
        ProtocolError: If another rank passed a wrong argument, or a different ``window``.
        JoinError: In a block.
    """
    collective = collective_of(process_group) if dist.is_initialized() else SingleCollective()
    if Join.is_open_on(collective):
        raise JoinError(
            "joinables.steps was called in a block, but the ranks of a block can be at different places. Call it before"
            " the block. [J682]"
        )
    problem = None
    try:
        check_loader(loader)
        Options("all", "empty", 1, None, window, False)  # checks the window
        own = f"window={window}", length_of(loader)
    except Exception as error:
        own, problem = (described(error), None), error
    ranks: list[Any] = collective.all_gather_object(own, plain=True)  # even with a problem, since others wait for it
    if problem is not None:
        raise problem
    calls, lengths = zip(*ranks, strict=True)
    if len(set(calls)) > 1:
        ranks_of = {call: [rank for rank, other in enumerate(calls) if other == call] for call in calls}
        texts = "; ".join(f"ranks {ranks_of[call]}: {call}" for call in ranks_of)
        raise ProtocolError(
            f"Ranks called joinables.steps differently: {texts}. Pass a loader and the same window on all ranks. [J738]"
        )
    if None in lengths:
        raise TypeError(
            "The number of steps is unknown because the loader of a rank has no length. Pass loaders with a length, or"
            " build the schedule from a number of steps of your own. [J683]"
        )
    return -(-max(lengths) // (window if window != "all" else max(*lengths, 1)))
