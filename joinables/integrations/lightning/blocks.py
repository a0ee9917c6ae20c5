"""Blocks that are opened and closed by a trainer's loops: :class:`Blocks`, and the step under way, :class:`Step`.

At most one is open at a time, since loops over ``Join.iterate`` do not nest: a training block is closed before a
validation begins, and another is opened for the next training step::

    rank with data                                     rank without
    --------------                                     ------------
    the first step: the block opens                    the same
    each step: a batch                                 a dummy
    a validation or a checkpoint: the block closes,    the same
      state is synchronised                            gets the state of a rank with data
    the next step: another opens                       the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from join import Join
from join.batch import samples_in


@dataclass(frozen=True)
class Step:
    """One step of a loop, on this rank."""

    is_dummy: bool = False
    """Whether it has no batch of this rank's."""
    weight: float = 1.0
    """What its batch counts; 0 for a dummy."""


OUTSIDE = Step()
"""Outside any loop: each rank counts the same."""

WEIGHS: dict[str, Callable[[Any], float]] = {"samples": samples_in, "equal": lambda batch: 1.0}


class Loop:
    """One loop in a block of its own.

    Args:
        join: the block, which is opened.
        batches: this rank's.
        trains: whether the block has what is trained.
    """

    def __init__(self, join: Join, batches: Iterable[Any], *, trains: bool) -> None:
        self._join, self.trains = join.open(), trains
        self._steps: Iterator[Any] = join.iterate(batches)
        self.is_last_step = False
        """Whether no other step follows, on any rank."""

    def next(self) -> tuple[Any, bool]:
        """Begin a step: its batch, and whether that is a dummy.

        Raises:
            StopIteration: if all ranks have run out.
        """
        batch = next(self._steps)
        self.is_last_step = self._join.is_last_step
        return batch, self._join.shadowing

    def weigh(self, weight: float) -> None:
        """The gradients of this step weigh as much."""
        self._join.weight = weight

    def close(self, error: BaseException | None = None) -> None:
        """Close the block.

        Args:
            error: what has ended the loop, if that was an exception.
        """
        if error is None and self.is_last_step:
            next(self._steps, None)  # which ends the loop as one that was not left early
        self._join.close(error)


class Blocks:
    """The block that is open in a trainer, if any.

    Args:
        weigh: what a training batch counts in gradients and logged means: ``"samples"``, ``"equal"`` or a function. A
            batch of an evaluation counts its samples, or the same.

    Raises:
        ValueError: if ``weigh`` is none of these.
    """

    def __init__(self, weigh: str | Callable[[Any], float]) -> None:
        if not (callable(weigh) or weigh in WEIGHS):
            raise ValueError(f"weigh={weigh!r} must be 'samples', 'equal' or a function of a batch [J123]")
        self._weigh = weigh if callable(weigh) else WEIGHS[weigh]
        self._weigh_evaluated = samples_in if callable(weigh) else WEIGHS[weigh]
        self._weighs_gradients = weigh != "equal"
        self._loop: Loop | None = None
        self.step = OUTSIDE
        """The step under way; it outlives its block, which a validation or a checkpoint closes in the middle of it."""

    @property
    def trains(self) -> bool:
        """Whether a block is open that has what is trained."""
        return self._loop is not None and self._loop.trains

    def begin(self, join: Join, batches: Iterable[Any], *, trains: bool) -> Loop:
        """Open a block and begin a loop in it; the arguments are those of :class:`Loop`."""
        self.close()
        self._loop = Loop(join, batches, trains=trains)
        return self._loop

    def is_open(self, loop: Loop | None) -> bool:
        """Whether ``loop`` goes on."""
        return loop is not None and loop is self._loop

    def next(self, loop: Loop) -> Any:
        """Begin a step of the loop; its batch.

        Raises:
            StopIteration: if all ranks have run out; the block is closed then.
        """
        try:
            batch, is_dummy = loop.next()
        except StopIteration:
            self.end()
            raise
        weigh = self._weigh if loop.trains else self._weigh_evaluated
        self.step = Step(is_dummy=True, weight=0.0) if is_dummy else Step(weight=weigh(batch))
        if loop.trains and self._weighs_gradients and not is_dummy:
            loop.weigh(self.step.weight)
        return batch

    def end(self) -> None:
        """The loop is over, and so is its last step."""
        self.close()
        self.step = OUTSIDE

    def close(self, error: BaseException | None = None) -> None:
        """Close the block that is open, if any, on all ranks at the same step.

        Args:
            error: what has ended the trainer's run, if that was an exception.
        """
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(error)
