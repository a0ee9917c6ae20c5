"""The block that is open in a trainer's loops, if any, and the step under way: :class:`Blocks`.

At most one is open at a time, since loops over ``Join.iterate`` do not nest: a training block is closed before a
validation begins, and another is opened for the next training step::

    rank with data                                     rank without
    --------------                                     ------------
    the first step: the block opens                    the same
    each step: a batch                                 a dummy: its last batch, of weight 0
    a validation or a checkpoint: the block closes,    the same
      state is synchronised                            gets the state of a rank with data
    the next step: another opens                       the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from typing_extensions import Self

from join import Join
from join.batch import samples_in
from join.protocol.channel import Lockstep


class Blocks:
    """The block that is open in a trainer, if any; iterated over, it gives the batches of this rank, and dummies.

    Args:
        weigh: what a training batch counts in gradients and logged means: ``"samples"``, ``"equal"`` or a function. A
            batch of an evaluation counts its samples, or the same.

    Raises:
        ValueError: if ``weigh`` is none of these.
    """

    def __init__(self, weigh: str | Callable[[Any], float]) -> None:
        if not (callable(weigh) or weigh in ("samples", "equal")):
            raise ValueError(f"weigh={weigh!r} must be 'samples', 'equal' or a function of a batch [J123]")
        self._weigh = weigh if callable(weigh) else samples_in if weigh == "samples" else None
        self._join: Join | None = None
        self._batches: Iterator[Any] = iter(())
        self.trains = False
        """Whether a block is open that has what is trained."""
        # The step under way outlives its block, which a validation or a checkpoint closes in the middle of it.
        self.is_dummy = False
        """Whether the step under way has no batch of this rank's."""
        self.weight = 1.0
        """What its batch counts; 0 for a dummy, and outside any step the same on all ranks."""
        self.in_step = False
        """Whether a step is under way, or a value of it is logged: what is gathered then counts as its batch does."""

    def begin(self, join: Join, batches: Iterable[Any], *, trains: bool, window: int = 1) -> None:
        """Open a block in the place of the one that is open, and begin a loop in it.

        Args:
            join: the block.
            batches: this rank's.
            trains: whether the block has what is trained.
            window: the batches whose gradients one optimizer step averages.
        """
        self.close()
        self._join, self.trains = join.open(), trains
        weigh = self._weigh if trains or self._weigh is None else samples_in
        self._batches = iter(join.iterate(batches, dummy="last", weigh=weigh, window=window))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Begin a step; its batch. If all ranks have run out, the block is closed."""
        join = self._join
        assert join is not None
        try:
            batch = next(self._batches)
        except StopIteration:
            self.end()
            raise
        self.is_dummy, self.weight = join.shadowing, join.weight or 0.0
        return batch

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss of the step under way by what its batch counts."""
        assert self._join is not None
        return self._join.scale(loss)

    def end_step(self) -> None:
        """End a step; in a training, with all ranks: Lightning broadcasts next, and does not look who is there."""
        self.in_step = False
        if self._join is not None and self.trains:
            cast("Lockstep", self._join.channel.lockstep).meet()

    @property
    def is_last_step(self) -> bool:
        """Whether no other step follows in the loop, on any rank."""
        return self._join is not None and self._join.is_last_step

    @property
    def is_in_window(self) -> bool:
        """Whether other batches follow in the window of accumulation under way."""
        return self._join is not None and not self._join.ends_window

    def end(self) -> None:
        """Close the block, and forget the step under way; called when the loop is over."""
        self.close()
        self.in_step, self.is_dummy, self.weight = False, False, 1.0

    def close(self, error: BaseException | None = None) -> None:
        """Close the block that is open, if any, on all ranks at the same step.

        Args:
            error: what has ended the trainer's run, if that was an exception.
        """
        while error is None and self.is_in_window:  # the trainer has stopped there
            next(self._batches)
        join, self._join, self.trains = self._join, None, False
        if join is not None:
            join.close(error)
