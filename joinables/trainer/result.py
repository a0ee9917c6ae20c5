"""What a run comes back with (:class:`Result`), and what a trainer keeps of a fit for the next (:class:`LastFit`)."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from join import JoinReport
from join.collectives._torch_private import pytree
from joinables.trainer.callbacks.base import Callback
from joinables.trainer.loops.collective_calls import Counters
from joinables.trainer.module import TrainModule


@dataclass(frozen=True)
class Result:
    """One run's result; immutable, and the same whether the processes were started here or by a launcher.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        epochs: how many epochs were completed, over all fits.
        global_step: how many optimizer steps were made, over all fits.
        callback_metrics: the latest value of every metric.
        metrics: those of this validation or test.
        callbacks: the callbacks' states, by ``state_key``.
        best_model_path: the best checkpoint's file; empty if none was kept.
        best_model_score: its metric; ``None`` if none was monitored.
        predictions: of a prediction, the batches' outputs in the order of the data set.
        join_report: steps, shadowed steps and idle time by rank in the last epoch; ``None`` before any.
        stopped: whether a callback ended the fit.
        state: everything that a fit resumes from (``joinables.trainer.checkpoints.snapshot``), on its way to the
            trainer, which keeps it; ``None`` in what ``Trainer.fit`` returns.
    """

    stage: str
    epochs: int
    global_step: int
    callback_metrics: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    callbacks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    best_model_path: str = ""
    best_model_score: float | None = None
    predictions: tuple[Any, ...] | None = None
    join_report: JoinReport | None = None
    stopped: bool = False
    state: Mapping[str, Any] | None = None


class LastFit:
    """The last fit of a trainer: its module, how far it came, and the state from which the next one resumes.

    Attributes:
        counters: the optimizer steps and completed epochs over all fits of the module.
        state: as ``joinables.trainer.checkpoints.snapshot`` has it, without the weights, which the module itself has;
            on rank 0 only, and ``None`` before a fit has ended.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.state: dict[str, Any] | None = None
        self._module: weakref.ref[TrainModule] | None = None
        self._first_states: dict[str, Any] = {}  # of callbacks, by state_key

    @property
    def module(self) -> TrainModule | None:
        """The module, unless it is gone."""
        return None if self._module is None else self._module()

    def begin(self, module: TrainModule, callbacks: Sequence[Callback]) -> None:
        """Forget the last fit: the next is the first of ``module``, with callbacks as before their own first fit."""
        self.counters, self.state, self._module = Counters(), None, weakref.ref(module)
        for each in callbacks:
            if each.state_key in self._first_states:
                each.load_state_dict(copy.deepcopy(self._first_states[each.state_key]))

    def end(self, result: Result) -> None:
        """Keep the result of a fit; tensors are copied, since they may lie in a file that is removed."""
        self.counters.load_state_dict({"epochs": result.epochs, "global_step": result.global_step})
        if result.state is not None:
            kept = {name: value for name, value in result.state.items() if name != "module"}
            self.state = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, kept)

    def remember_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Keep the states of callbacks whose first fit is about to begin."""
        for each in callbacks:
            if each.state_key not in self._first_states:
                self._first_states[each.state_key] = copy.deepcopy(each.state_dict())

    def __getstate__(self) -> dict[str, Any]:
        # Another process gets the state through a file, and does not need the rest.
        return {"counters": self.counters, "state": None, "_module": None, "_first_states": {}}
