"""Something done before and after a module's forward: :func:`around_forward`, by a :class:`WrappedForward` or hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, cast

import torch

from joinables._torch.hooks import ModuleHook
from joinables._torch.reducer import call_uncompiled, compiler_under_way, has_forward_hooks, not_compiled


def around_forward(module: torch.nn.Module, before: Callable[[], None], after: Callable[[Any], None]) -> list[Any]:
    """See to it that ``before`` is called before each forward of ``module``, and ``after`` with what it returned.

    Torch calls a module that has forward hooks in a slower way: in a training step, whose arithmetic has emptied the
    caches, that takes 25 us for each forward, more than all that is done here. So the forward is wrapped, unless there
    are hooks already, which are then between ``before`` and ``after``. ``torch.compile`` leaves both alone.

    Returns:
        Handles, each with a method ``remove``.
    """
    if not has_forward_hooks(module):
        return [WrappedForward(module, before, after)]

    def enters(*_: Any) -> None:
        before()

    def returns(module: torch.nn.Module, args: Any, output: Any) -> None:
        after(output)

    first, last = cast("Any", ModuleHook(enters)), cast("Any", ModuleHook(returns))
    return [module.register_forward_pre_hook(first, prepend=True), module.register_forward_hook(last)]


class WrappedForward:
    """Stands in a module's ``forward`` until it is removed.

    A copy of the module, or one that was pickled, has its own forward again.

    Args:
        module: whose ``forward`` it is.
        before: called before the forward.
        after: called with what it returned; not if it raised.
    """

    def __init__(self, module: torch.nn.Module, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._module, self._before, self._after = module, before, after
        self._forward: Callable[..., Any] = module.forward
        self._was_attribute = "forward" in vars(module)  # of the module itself: the user's
        self._passes = False  # nothing is to be done: it was removed, or the forward calls itself
        update_wrapper(self, self._forward, updated=())
        vars(module)["forward"] = self  # what ``setattr`` does with it, too, at ten times the cost

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        if self._passes:
            return self._forward(*args, **kwargs)
        self._passes = True
        try:
            if compiler_under_way() is None:
                self._before()
                output = self._forward(*args, **kwargs)
                self._after(output)
            else:
                call_uncompiled(self._before)
                output = self._forward(*args, **kwargs)
                call_uncompiled(self._after, output)
        finally:
            self._passes = False
        return output

    def remove(self) -> None:
        """Give the module its own forward back. One that was put around this since then goes on to work."""
        self._passes = True
        attributes = vars(self._module)
        if attributes.get("forward") is not self:
            return
        if self._was_attribute:
            attributes["forward"] = self._forward
        else:
            del attributes["forward"]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return own_forward, (self._forward,)


def own_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What a copy has: a copy of the forward, which is a method of the copied module if it was one of the module."""
    return forward
