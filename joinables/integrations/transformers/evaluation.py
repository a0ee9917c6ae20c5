"""Evaluating uneven streams: :func:`evaluate_streams`, around ``Trainer.evaluation_loop``.

All ranks run the same steps. What is gathered in each has the rows of ranks with data, and none of dummies, so the loss
is the mean over the batches of all ranks, as it is in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from join import Join
from join.batch import samples_in
from joinables.integrations.accelerate.gather import gathering_rows
from joinables.modules import replaced


def evaluate_streams(
    trainer: Any, batches: Any, group: dist.ProcessGroup | None, evaluate: Callable[[Iterator[Any]], Any]
) -> Any:
    """What ``evaluate`` returns of this rank's batches and, after these, as many dummies as needed.

    Args:
        trainer: a ``transformers.Trainer``.
        batches: those of this rank.
        group: all ranks, and no ``Join`` block is open on it.
        evaluate: the Trainer's own loop.
    """
    samples = torch.tensor(0)

    def counted() -> Iterator[Any]:
        for batch in join.iterate(batches, dummy="last"):
            samples.add_(0 if join.shadowing else samples_in(batch))
            yield batch

    accelerator = trainer.accelerator
    with Join([], process_group=group) as join:
        with (
            gathering_rows(accelerator, join, lambda: join.shadowing),
            replaced(trainer, "gather_function", accelerator.gather_for_metrics),
            replaced(trainer.args, "average_tokens_across_devices", False),  # each batch has its own mean
        ):
            output = evaluate(counted())
        join.collective.all_reduce(samples).wait()
    return output._replace(num_samples=int(samples))
