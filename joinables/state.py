"""Adapter for objects that have state but no collectives: :class:`State`.

Optimizers, LR schedulers, GradScalers, EMA copies: anything with ``state_dict`` and ``load_state_dict``. It issues no
collective in the loop. A rank that ran out early has stale state; when the block ends, it loads the last joiner's.
Tensors are sent as flat buffers, the rest of the state dict is pickled.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from typing_extensions import override

from join.errors import described
from join.joinable import Block
from join.transfer import broadcast_tree
from joinables._torch.optimizers import has_stepped, mark_stepped
from joinables.adapter import Silent


class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Any:
        """The state, as nested containers of tensors and picklable values."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


class State(Silent):
    """Brings an object's state up to date when the block ends, on ranks that ran out early.

    Args:
        stateful: the object.
    """

    def __init__(self, stateful: Stateful) -> None:
        super().__init__(stateful)
        self._stateful = stateful
        self._steps = 0

    @property
    @override
    def own_steps(self) -> int:
        return self._steps

    @override
    def attach(self, join: Block) -> None:
        super().attach(join)
        self._steps, self._channel = 0, join.channel
        if isinstance(self._stateful, torch.optim.Optimizer):
            self._handles = [self._stateful.register_step_pre_hook(self._before_step)]

    @override
    def detach(self) -> None:
        super().detach()
        del self._channel

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._channel.is_in_loop_body:
            self._channel.scaling.check_step(self.join_name, self._channel.step)
        self._steps += 1

    @override
    def synchronise(self, source: int) -> None:
        collective = self._collective
        state, error, stepped = None, "", has_stepped(self._stateful)
        if collective.rank == source:
            try:
                state = self._stateful.state_dict()
            except Exception as failure:
                error = (
                    f"rank {source} has no state of {self.join_name}: {described(failure)}; mend its state_dict [J163]"
                )
        state, error, stepped = broadcast_tree(collective, (state, error, stepped), source)
        if error:
            raise RuntimeError(error)
        if collective.rank != source:
            self._stateful.load_state_dict(state)
            if stepped and isinstance(self._stateful, torch.optim.Optimizer):
                mark_stepped(self._stateful)
