"""Evaluating uneven streams: :func:`in_step`, around ``Trainer.evaluation_loop``.

All ranks run the same steps. What is gathered in each has the rows of ranks with data, and none of dummies, so the loss
is the mean over the batches of all ranks, as it is in one process.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from join import Join
from join.batch import samples_in
from joinables.integrations.accelerate import gather_rows
from joinables.integrations.accelerate.gather import gathering_rows


class EvaluationLoader:
    """What ``Trainer.evaluation_loop`` iterates over: the batches of this rank and then dummies, as long as needed.

    Args:
        join: a block for this evaluation.
        batches: those of this rank.
    """

    def __init__(self, join: Join, batches: Any) -> None:
        self._join, self._batches = join, batches
        self._samples = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._join.iterate(self._batches, dummy="last"):
            self._samples += 0 if self._join.shadowing else samples_in(batch)
            yield batch

    def samples_of_all_ranks(self) -> int:
        """How many samples were evaluated; all ranks ask."""
        count = torch.tensor(self._samples)
        self._join.collective.all_reduce(count).wait()
        return int(count.item())


@contextmanager
def in_step(trainer: Any, batches: Any, group: dist.ProcessGroup | None) -> Generator[EvaluationLoader]:
    """What ``trainer`` evaluates by, for one loop.

    Args:
        trainer: a ``transformers.Trainer``.
        batches: those of this rank.
        group: all ranks, and no ``Join`` block is open on it.
    """
    gather, average = trainer.gather_function, trainer.args.average_tokens_across_devices
    with Join([], process_group=group) as join:
        trainer.gather_function = partial(gather_rows, join)
        trainer.args.average_tokens_across_devices = False  # each batch has its own mean
        try:
            with gathering_rows(trainer.accelerator, join, lambda: join.shadowing):
                yield EvaluationLoader(join, batches)
        finally:
            trainer.gather_function, trainer.args.average_tokens_across_devices = gather, average
