"""What takes the place of a function of an object while that is in a block: :class:`Replacement` and its kinds.

:func:`replaced` sets any attribute for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from joinables._torch.compiler import call_uncompiled, compiler_under_way, not_compiled


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Generator[None]:
    """Set an attribute of an object for the duration of a context, and restore the object afterwards."""
    own = cast("dict[str, Any]", vars(target))
    has_own, before = name in own, own.get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if has_own:
            setattr(target, name, before)
        else:
            delattr(target, name)


class Replacement:
    """Takes the place of a function of an object. A copy of the object, or one that was pickled, has the original.

    Args:
        original: the function.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _unchanged, (self.original,)


class CallInstead(Replacement):
    """Calls ``call`` instead of the original."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        super().__init__(original)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``call``."""
        return self._call(*args, **kwargs)


class ModuleHook(Replacement):
    """A module hook that runs ``call``, which ``torch.compile`` leaves alone. Copies of the module have an idle one."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(_do_nothing)
        self._call = call

    @not_compiled
    def __call__(self, *args: Any) -> Any:
        """Run ``call``."""
        return self._call(*args) if compiler_under_way() is None else call_uncompiled(self._call, *args)


def _do_nothing(*_: Any) -> None:
    return None


def _unchanged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original. Pickle and copy call this, which rebinds a method to the copy of its object."""
    return original
