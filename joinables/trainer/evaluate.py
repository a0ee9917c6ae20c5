"""Validation, test and prediction: :func:`evaluate`, :func:`predict`.

Each rank goes through its own batches without communicating, so nothing is shadowed; metrics are gathered at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from join.batch import map_tensors
from joinables.train_mode import keeping_modes
from joinables.trainer import rng
from joinables.trainer.data import distribute
from joinables.trainer.run import Run

_IN_HOOKS = {"validate": "validation", "test": "test", "predict": "predict"}


def evaluate(run: Run, loader: Any, stage: str) -> dict[str, float]:
    """Go through ``loader`` and return what was logged, over all ranks; ``stage`` is ``"validate"`` or ``"test"``."""
    with _evaluating(run.module), run.fresh_metrics():
        _go_through(run, local_loader(run, loader), stage)
        metrics = run.reduce_metrics()
        run.store.metrics.clear()
        _end(run, stage)
        return {**metrics, **run.reduce_metrics()}


def predict(run: Run, loader: Any) -> list[Any]:
    """Go through ``loader`` and return the outputs of all ranks, by batch, in the order of the data set.

    Where the trainer did not deal out the data, all outputs of rank 0 come first, then those of rank 1, and so on.
    """
    local = local_loader(run, loader)
    mine: list[Any] = []
    with _evaluating(run.module):
        _go_through(run, local, "predict", lambda output: mine.append(map_tensors(_kept, output)))
        parts: list[list[Any]] = run.collective.all_gather_object(mine)
        _end(run, "predict")
    if local is loader:
        return [output for part in parts for output in part]
    rounds = max(map(len, parts))
    return [part[index] for index in range(rounds) for part in parts if index < len(part)]


def local_loader(run: Run, loader: Any) -> Any:
    """This rank's part of a loader, in order; a loader that was dealt out already stays as it is."""
    return distribute(loader, run.rank, run.collective.world_size, 0, shuffle=False)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, in a storage of its own size: of a view, the whole storage would be kept and sent."""
    tensor = tensor.cpu()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def _go_through(run: Run, local: Any, stage: str, keep: Callable[[Any], object] | None = None) -> None:
    """Run the steps and hooks of an evaluation over this rank's batches; ``keep`` gets each step's output."""
    # No generator: in one, a step's StopIteration would become another error.
    module, name = run.module, _IN_HOOKS[stage]
    step = getattr(module, f"{name}_step")
    run.call("on_evaluation_start", stage)
    run.samples = 1  # a hook's values weigh the same on all ranks
    getattr(module, f"on_{name}_start")()
    getattr(module, f"on_{name}_epoch_start")()
    for index, batch in enumerate(rng.iterate(local)):
        batch = run.take(batch)
        getattr(module, f"on_{name}_batch_start")(batch, index)
        with run.autocast():
            output = step(batch, index)
        getattr(module, f"on_{name}_batch_end")(output, batch, index)
        run.call("on_evaluation_batch_end", output, batch, index, stage)
        if keep is not None:
            keep(output)
    run.samples = 1
    getattr(module, f"on_{name}_epoch_end")()


def _end(run: Run, stage: str) -> None:
    """Call the hooks of the end of an evaluation, whose metrics are reduced by now."""
    getattr(run.module, f"on_{_IN_HOOKS[stage]}_end")()
    run.call("on_evaluation_end", stage)


@contextmanager
def _evaluating(module: torch.nn.Module) -> Generator[None]:
    """Switch off grad and put the module into eval mode; afterwards, each part is back in its own mode."""
    with keeping_modes(module), torch.no_grad():
        module.eval()
        yield
