"""Something done before and after a module's forward: :class:`WrappedForward`."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch

from joinables._torch_reducer import compiler_under_way, not_compiled, uncompiled


class WrappedForward:
    """Stands in a module's ``forward`` until it is removed.

    Two forward hooks would do the same, but torch calls a module that has any in a slower way. In a training step,
    whose arithmetic has emptied the caches, that takes 25 us for each forward, more than all that is done here. A
    forward that is called directly is wrapped too, which passes hooks by.

    A copy of the module, or one that was pickled, has its own forward again.

    Args:
        module: whose ``forward`` it is.
        before: called before it. ``torch.compile`` leaves this alone, and ``after``.
        after: called with what it returned; not if it raised.
    """

    def __init__(self, module: torch.nn.Module, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._module, self._before, self._after = module, before, after
        self._forward: Callable[..., Any] = module.forward
        self._is_users = "forward" in vars(module)
        update_wrapper(self, self._forward)
        vars(module)["forward"] = self  # what ``setattr`` does with it, too, at ten times the cost
        self._is_open = True

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        if not self._is_open:
            return self._forward(*args, **kwargs)
        compiles = compiler_under_way() is not None
        uncompiled(self._before) if compiles else self._before()
        output = self._forward(*args, **kwargs)
        uncompiled(self._after, output) if compiles else self._after(output)
        return output

    def remove(self) -> None:
        """Give the module its own forward back. One that was put around this since then goes on to work."""
        self._is_open = False
        attributes = vars(self._module)
        if attributes.get("forward") is not self:
            return
        if self._is_users:
            attributes["forward"] = self._forward
        else:
            del attributes["forward"]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _given, (self._forward,)


def _given(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
