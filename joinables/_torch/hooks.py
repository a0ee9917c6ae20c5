"""A forward hook that is not copied along with its module: :class:`ModuleHook`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from joinables._torch.compiler import call_uncompiled, compiler_under_way, not_compiled
from joinables.stand_in import StandIn


class ModuleHook(StandIn):
    """A module hook of which a copy does nothing: a copy of the module is in no block.

    Args:
        call: what the hook does; ``torch.compile`` leaves it alone.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(_do_nothing)
        self._call = call

    @not_compiled
    def __call__(self, *args: Any) -> Any:
        """Do it."""
        return self._call(*args) if compiler_under_way() is None else call_uncompiled(self._call, *args)


def _do_nothing(*_: Any) -> None:
    return None
