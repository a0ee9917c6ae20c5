"""Current block and current step of a trainer's loops: :class:`Blocks`.

At most one block is open at a time, since loops over ``Join.iterate`` do not nest: a training block is closed before a
validation begins, and another is opened for the next training step::

    rank with data                                     rank without data
    --------------                                     -----------------
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
    """Current block of a trainer, if any, and an iterator over the batches of this rank and its dummies.

    Args:
        weigh: The weight of a training batch in gradients and logged means: ``"samples"``, ``"equal"`` or a function. A
            batch of an evaluation weighs its number of samples, or the same as every other with ``"equal"``.

    Raises:
        ValueError: If ``weigh`` is none of these.
    """

    def __init__(self, weigh: str | Callable[[Any], float]) -> None:
        if not (callable(weigh) or weigh in ("samples", "equal")):
            raise ValueError(
                f"{weigh=} is not a known weight. Pass 'samples', 'equal' or a function of a batch. [J123]"
            )
        self._weigh = weigh if callable(weigh) else samples_in if weigh == "samples" else None
        self._join: Join | None = None
        self._batches: Iterator[Any] = iter(())
        self.trains = False
        """Whether a block is open in which the model trains."""
        # The current step outlives its block if a validation or a checkpoint closes the block in the middle of it.
        self.is_dummy = False
        """Whether the current step has no batch of this rank."""
        self.weight = 1.0
        """The weight of the current batch: 0 for a dummy, and 1 outside any step."""
        self.in_step = False
        """Whether a step runs or logs a value: reduced values are then weighted as its batch is."""

    def begin(self, join: Join, batches: Iterable[Any], *, trains: bool, window: int = 1) -> None:
        """Close the block that is open, open another, and begin a loop in it.

        Args:
            join: The new block.
            batches: This rank's batches.
            trains: Whether the model trains in the block.
            window: The number of batches whose gradients one optimizer step averages.
        """
        self.close()
        self._join, self.trains = join.open(), trains
        weigh = self._weigh if trains or self._weigh is None else samples_in
        self._batches = iter(join.iterate(batches, dummy="last", weigh=weigh, window=window))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Begin a step and return its batch; close the block if all ranks are out of data."""
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
        """Scale a loss of the current step by the weight of its batch."""
        assert self._join is not None
        return self._join.scale(loss)

    def end_step(self, vote: bool) -> bool:
        """End a step of training: all ranks meet, since Lightning broadcasts next, and hangs if a rank is missing.

        Returns:
            Whether any rank votes.
        """
        self.in_step = False
        return self._join is not None and self.trains and cast("Lockstep", self._join.channel.place.loop).meet(vote)

    @property
    def is_last_step(self) -> bool:
        """Whether this step is the last of the loop, on all ranks."""
        return self._join is not None and self._join.is_last_step

    @property
    def is_in_window(self) -> bool:
        """Whether more batches follow in the current accumulation window."""
        return self._join is not None and not self._join.ends_window

    def end(self) -> None:
        """Close the block and forget the current step; called when the loop ends."""
        self.close()
        self.in_step, self.is_dummy, self.weight = False, False, 1.0

    def close(self, error: BaseException | None = None) -> None:
        """Close the open block, if any, on all ranks at the same step.

        Args:
            error: The exception that ended the trainer's run, if any.
        """
        while error is None and self.is_in_window:  # the trainer has stopped within the window
            next(self._batches)
        join, self._join, self.trains = self._join, None, False
        if join is not None:
            join.close(error)
