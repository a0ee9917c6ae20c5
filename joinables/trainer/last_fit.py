"""What the next fit of a trainer goes on from: :class:`LastFit`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from join.collectives._torch_private import pytree
from joinables.trainer.callbacks.base import Callback
from joinables.trainer.loops.collective_calls import Counters
from joinables.trainer.module import TrainModule
from joinables.trainer.result import Result


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

    def begin(self, module: TrainModule) -> None:
        """Forget the last fit; the next one is the first of ``module``."""
        self.counters, self.state, self._module = Counters(), None, weakref.ref(module)

    def end(self, result: Result) -> None:
        """Keep the result of a fit; tensors are copied, since they may lie in a file that is removed."""
        self.counters.load_state_dict({"epochs": result.epochs, "global_step": result.global_step})
        if result.state is not None:
            kept = {name: value for name, value in result.state.items() if name != "module"}
            self.state = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, kept)

    def reset_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Give callbacks back the states that they had before their first fit."""
        for each in callbacks:
            if each.state_key in self._first_states:
                each.load_state_dict(copy.deepcopy(self._first_states[each.state_key]))

    def remember_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Keep the states of callbacks that have their first fit before them."""
        for each in callbacks:
            if each.state_key not in self._first_states:
                self._first_states[each.state_key] = copy.deepcopy(each.state_dict())

    def __getstate__(self) -> dict[str, Any]:
        # Another process gets the state through a file, and does not need the rest.
        return {"counters": self.counters, "state": None, "_module": None, "_first_states": {}}
