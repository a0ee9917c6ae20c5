"""Optimizers that step a module's parameters and are not in the list: :class:`Unlisted`.

A rank that has run out of data makes no steps. It gets parameters from the last joiner, but not the state of an
optimizer that nobody has listed, and would step otherwise than the others from then on. That cannot be mended here; it
can be told.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from join import Join

# Anything else that is listed may hold the optimizer.
_HOLDS_NONE = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)


class Unlisted:
    """Looks out for them in one block: at the first step of each, and not in loops in lockstep, which all ranks make.

    Args:
        name: what the module is called.
        parameters: the module's.
    """

    def __init__(self, name: str, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._name, self._parameters = name, {id(parameter) for parameter in parameters}
        self.is_due = False
        """Whether :meth:`look` is to be called."""

    def attach(self, join: Join) -> None:
        """A block is entered."""
        self._channel = join.channel
        self._seen: list[torch.optim.Optimizer] = []
        self._found: list[str] = []
        self._handle: Any = None
        self.is_due = True

    def detach(self) -> None:
        """The block is left."""
        if self._handle is not None:
            self._handle.remove()
        self._seen = []
        del self._channel

    def look(self) -> None:
        """A backward begins: from now on look at steps, or cease to, so that they cost nothing more."""
        self.is_due = False
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._after_step)
        else:
            self._handle.remove()

    def warn(self) -> None:
        """Some ranks have made steps that others have not: tell of optimizers that they differ in now."""
        for kind in self._found:
            warnings.warn(
                f"{kind} steps parameters of {self._name} and is not in the list: ranks that ran out of data do not"
                " have the state that it has on others, and will step differently from now on. List it:"
                " Join([model, optimizer])",
                stacklevel=2,
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(each is optimizer for each in self._seen):  # the loop has come round
            self.is_due = True  # a hook cannot remove itself
            return
        self._seen.append(optimizer)
        if not self._channel.in_lockstep and self._has_state_of_its_own(optimizer):
            self._found.append(type(optimizer).__name__)

    def _has_state_of_its_own(self, optimizer: torch.optim.Optimizer) -> bool:
        listed = [member.joinable.join_target for scope in self._channel.scopes for member in scope.members]
        if not all(isinstance(each, _HOLDS_NONE) for each in listed):
            return False
        covered = {id(parameter) for each in listed for parameter in _stepped_by(each)}
        mine = [p for p in _stepped_by(optimizer) if id(p) in self._parameters and id(p) not in covered]
        states = [cast("dict[str, Any]", optimizer.state.get(parameter, {})) for parameter in mine]
        return any(isinstance(value, torch.Tensor) for state in states for value in state.values())


def _stepped_by(target: Any) -> list[torch.nn.Parameter]:
    if not isinstance(target, torch.optim.Optimizer):
        return []
    return [parameter for group in target.param_groups for parameter in group["params"]]
