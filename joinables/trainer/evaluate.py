"""Validation, test and prediction: :func:`evaluate`, :func:`predict`.

Nothing is shadowed here: each rank goes through its own batches without communicating, and metrics are gathered once.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from joinables.trainer import rng
from joinables.trainer.data import distribute
from joinables.trainer.run import Run

_STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


def evaluate(run: Run, loader: Any, stage: str) -> dict[str, float]:
    """Go through ``loader`` and return what was logged, over all ranks; ``stage`` is ``"validate"`` or ``"test"``."""
    name = {"validate": "validation", "test": "test"}[stage]
    with run.fresh_metrics() as store:
        run.samples = 1  # a hook's values weigh the same on all ranks
        getattr(run.module, f"on_{name}_epoch_start")()
        for _ in _outputs(run, _local(run, loader), stage):
            pass
        run.samples = 1
        getattr(run.module, f"on_{name}_epoch_end")()
        metrics = store.reduce(run.collective)
    run.trainer.metrics.update(metrics)
    run.call("on_evaluation_end", stage)
    return metrics


def predict(run: Run, loader: Any) -> list[Any]:
    """Go through ``loader`` and return the outputs of all ranks, by batch, in the order of the data set.

    They are in that order where the trainer deals out the data; otherwise each rank's come after the other's.
    """
    local = _local(run, loader)
    mine = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), list(_outputs(run, local, "predict")))
    parts: list[list[Any]] = run.collective.all_gather_object(mine)
    run.call("on_evaluation_end", "predict")
    if local is loader:
        return [output for part in parts for output in part]
    rounds = max(map(len, parts))
    return [part[index] for index in range(rounds) for part in parts if index < len(part)]


def _local(run: Run, loader: Any) -> Any:
    return distribute(loader, run.rank, run.collective.world_size, 0, shuffle=False)


def _outputs(run: Run, local: Any, stage: str) -> Generator[Any]:
    step = getattr(run.module, _STEPS[stage])
    run.call("on_evaluation_start", stage)
    with evaluating(run.module):
        for index, batch in enumerate(rng.iterate(local)):
            batch = run.take(batch)
            with run.precision.forward_context():
                output = step(batch, index)
            run.call("on_evaluation_batch_end", output, batch, index, stage)
            yield output


@contextmanager
def evaluating(module: torch.nn.Module) -> Generator[None]:
    """Without grad, and with all parts of the module in eval mode; each is put back into its own mode."""
    with keeping_modes(module), torch.no_grad():
        module.eval()
        yield


@contextmanager
def keeping_modes(module: torch.nn.Module) -> Generator[None]:
    """Put each part of the module back into its own mode at the end."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
