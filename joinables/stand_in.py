"""What stands in for a function of an object while that is in a block: :class:`StandIn`, :class:`Instead`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StandIn:
    """Stands in for a function of an object. A copy of the object, or one that was pickled, has the original.

    Args:
        original: the function.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _itself, (self.original,)


class Instead(StandIn):
    """Calls another function instead of the original."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        super().__init__(original)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._call(*args, **kwargs)


def _itself(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a copy has: the original, as a method of the copied object if it was one of the object."""
    return original
