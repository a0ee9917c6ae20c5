"""Warnings about objects that a plain block should list: :class:`Unlisted`.

If ranks had different numbers of batches, an optimizer, scheduler or ``GradScaler`` that is not listed has made fewer
steps on some ranks than on others, and the block copies no state to it. The next steps of the ranks then differ. At the
end of such a block, the ranks on which the object was used warn. A hook of all optimizers sees each step, until the
optimizers that have stepped hold all parameters of the module.

In a loop over ``Join.iterate`` all ranks make all steps, so no state differs. But gradients of another module that is
not listed are means over all ranks, also over those with dummies, unless losses are scaled. So the first step of an
optimizer warns if it uses gradients that no listed object reduces.

An optimizer is covered if a listed optimizer has the same parameters, as a wrapper has those of the optimizer inside,
and ZeRO those of its shards. An optimizer without state, such as SGD without momentum, needs no listing. A scheduler is
missing if the learning rate of a scheduled optimizer has changed, and nothing in the list can have changed it.
"""

from __future__ import annotations

import inspect
import warnings
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from typing_extensions import override

from join import Join
from join.failure.wait import stack_of
from join.step_hook import after_step
from joinables._torch.autograd import variable_of
from joinables._torch.objects import is_scheduled
from joinables._torch.reducer import held_parameters
from joinables.adapter import Silent
from joinables.state import parameters_of, rate_of

_AT_END = 8  # stack level of the user's with statement
_AT_STEP = 5  # and of the call of an optimizer's step


class Unlisted(Silent):
    """Search for objects that train a DDP module in a block, and are not listed.

    Args:
        ddp: The module.
    """

    def __init__(self, ddp: torch.nn.Module) -> None:
        super().__init__(ddp, f"what trains {type(ddp).__name__}")

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self._is_uneven = False
        self._stepped = WeakKeyDictionary[torch.optim.Optimizer, str]()  # and the line that made the first step
        self._scalers = WeakSet[torch.amp.GradScaler]()
        self._unseen = set(map(id, held_parameters(self._target)))  # the parameters that no optimizer has stepped
        targets = [joinable.join_target for joinable in self._channel.roster.listed]
        self._listed = {id(target): target for target in targets}
        optimizers = [target for target in targets if isinstance(target, torch.optim.Optimizer)]
        self._rates = {id(optimizer): rate_of(optimizer.param_groups) for optimizer in optimizers}
        self._handles = [after_step.add(self._after_step)]

    @override
    def detach(self) -> None:
        super().detach()
        self._listed = {}

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._stepped:
            *_, line = stack_of(inspect.currentframe())
            self._stepped[optimizer] = line or "a line that is unknown"
            # Nothing but its caller shows that a scaler makes the step.
            scaler = variable_of(torch.amp.GradScaler.step, "self", inspect.currentframe())
            if scaler is not None:
                self._scalers.add(scaler)
            self._unseen.difference_update(map(id, parameters_of(optimizer)))
            if self._channel.place.step.in_loop and not self._channel.scaling.in_use:
                self._warn_of_unreduced(optimizer)
        if not self._unseen:
            self._handles[0].remove()

    def _warn_of_unreduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if an optimizer that trains the module also uses gradients that nothing in the list reduces."""
        modules = [target for target in self._listed.values() if isinstance(target, torch.nn.Module)]
        own, listed = set(map(id, held_parameters(self._target))), set(map(id, chain(*map(held_parameters, modules))))
        stepped = [each for each in parameters_of(optimizer) if each.grad is not None]
        others = [each for each in stepped if id(each) not in listed]
        if others and not own.isdisjoint(map(id, stepped)):
            warnings.warn(
                f"{type(optimizer).__name__} steps {len(others)} parameters of no listed module, the first of shape"
                f" {list(others[0].shape)}. In join.iterate, their gradients are wrong once a rank has no data: list"
                " their DistributedDataParallel module, too, or call join.scale(loss).backward().",
                stacklevel=_AT_STEP,
            )

    @override
    def exchange(self, source: int) -> None:
        self._is_uneven = True

    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        if self._is_uneven:
            own = set(map(id, held_parameters(self._target)))
            for optimizer in [each for each in self._stepped if own.intersection(map(id, parameters_of(each)))]:
                self._check(optimizer)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if an optimizer that trains the module, its scheduler or its scaler is not listed."""
        name, place, listed = type(optimizer).__name__, self._stepped[optimizer], self._listed.values()
        own: list[str] = []
        if id(optimizer) not in self._listed:
            covered = {id(parameter) for each in listed for parameter in parameters_of(each)}
            uncovered = [each for each in parameters_of(optimizer) if id(each) not in covered]
            stepped = {id(each) for each in uncovered if optimizer.state.get(each)}
            own = [name for name, each in self._target.named_parameters() if id(each) in stepped]
        if own:
            parameters = own[0] + f" and {len(own) - 1} more" * (len(own) > 1)
            target = type(self._target).__name__
            self._warn(f"{name} stepped the parameter {parameters} of {target} at {place}", "it is not listed", name)
        if any(id(scaler) not in self._listed and scaler.is_enabled() for scaler in self._scalers):
            self._warn(f"A GradScaler stepped {name} at {place}", "it is not listed", "GradScaler")
        has_changed = self._rates.get(id(optimizer)) not in (None, rate_of(optimizer.param_groups))
        if has_changed and is_scheduled(optimizer) and not any(map(_may_set_rates, listed)):
            unless = " A scheduler that steps once for all steps can instead step after the block."
            self._warn(f"The learning rate of {name} changed", "no scheduler is listed", "scheduler", unless)

    def _warn(self, event: str, problem: str, missing: str, unless: str = "") -> None:
        names = [*(type(each).__name__ for each in self._listed.values()), missing]
        verb = "may differ" if unless else "differs"
        warnings.warn(
            f"{event} in an uneven block, but {problem}. Its state now {verb} between ranks, which made different"
            f" numbers of steps, so later steps will differ, too.{unless} List it: Join([{', '.join(names)}]). [J891]",
            stacklevel=_AT_END,
        )


def _may_set_rates(obj: Any) -> bool:
    """Return whether a listed object may be what changes learning rates: a scheduler, or state of the user's own."""
    return not (isinstance(obj, (torch.nn.Module, torch.amp.GradScaler)) or hasattr(obj, "param_groups"))
