"""Registry of adapters: :func:`register_joinable`, and the look-up that turns a listed object into joinables.

The look-up goes through the classes of the object from the most specific class to ``object``, so an adapter for a
subclass takes precedence over an adapter for its base class. The package ``joinables`` has the adapters for PyTorch's
own objects, and for any other object with ``state_dict`` and ``load_state_dict``, which is joined as state; the first
look-up imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from join.joinable import Joinable

T = TypeVar("T")
Adapter = Callable[[Any], Joinable | Sequence[Joinable]]

_adapters: dict[type, Adapter] = {}


def register_joinable(cls: type[T], adapter: Callable[[T], Joinable | Sequence[Joinable]]) -> None:
    """Make ``Join`` accept objects of ``cls`` and its subclasses.

    Args:
        cls: The class. An adapter that was registered for it earlier is replaced.
        adapter: A function from the object to its joinable, or to several joinables in their order. It is called when a
            ``Join`` is built, and each time that it is entered. It must not modify the object; ``Joinable.attach`` may.
    """
    _adapters[cls] = adapter


def joinables_of(obj: Any) -> list[Joinable]:
    """Return the joinables of a listed object.

    Raises:
        TypeError: If ``obj`` cannot join.
    """
    if isinstance(obj, Joinable):
        return [obj]
    importlib.import_module("joinables")  # registers the adapters for torch's own objects, once
    cls = next(cls for cls in type(obj).__mro__ if cls in _adapters)
    is_state = all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))
    if cls is object and (isinstance(obj, type) or not is_state):
        kind = f"The class {obj.__qualname__}" if isinstance(obj, type) else f"A {type(obj).__qualname__} object"
        held = [name for name, value in getattr(obj, "__dict__", {}).items() if isinstance(value, torch.nn.Module)]
        hint = f" It holds a module in .{held[0]}. List that module instead, or do one of these." if held else ""
        raise TypeError(
            f"{kind} cannot join. It is not a Joinable, has no state_dict and load_state_dict, and has no registered"
            f" adapter.{hint} Remove it from the list, derive its class from join.Joinable, or call"
            f" join.register_joinable({type(obj).__name__}, adapter). [J096]"
        )
    adapted = _adapters[cls](obj)
    listed = [adapted] if isinstance(adapted, Joinable) else adapted
    if not (isinstance(listed, Sequence) and listed and all(isinstance(item, Joinable) for item in listed)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"The adapter registered for {type(obj).__qualname__} returned {adapted!r}. Return a Joinable or a list of"
            " Joinables from it. [J097]"
        )
    return list(listed)
