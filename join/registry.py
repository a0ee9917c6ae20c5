"""How an object becomes joinables: :func:`register_joinable` and the look-up behind ``Join``'s first argument.

The look-up goes through the classes of the object from the most specific to ``object``, so an adapter for a subclass
wins over one for its base. What no class adapter takes, and has ``state_dict`` and ``load_state_dict``, is state.
The adapters for torch's own objects live elsewhere (``joinables``), and are loaded on the first look-up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from join.joinable import Joinable

T = TypeVar("T")
Adapter = Callable[[Any], Joinable | Sequence[Joinable]]

_adapters: dict[type, Adapter] = {}
_state_adapter: list[Adapter] = []


def register_joinable(cls: type[T], adapter: Callable[[T], Joinable | Sequence[Joinable]]) -> None:
    """Make objects of ``cls`` and its subclasses acceptable to ``Join``.

    Args:
        cls: the class; an adapter that was registered for it before is replaced.
        adapter: called with the object on building a ``Join``, and each time that it is entered; returns the joinable,
            or several in their order, that stand for it. It must not modify the object: that is for
            ``Joinable.attach``.

    Raises:
        TypeError: if ``cls`` is not a class or ``adapter`` cannot be called.
    """
    if not isinstance(cls, type):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"cls={cls!r} is not a class; give a class [J094]")
    if not callable(adapter):
        raise TypeError(
            f"adapter={adapter!r} cannot be called; give a function from the object to its joinables [J095]"
        )
    _adapters[cls] = adapter


def register_state_adapter(adapter: Adapter) -> None:
    """Set what stands for objects that only have ``state_dict`` and ``load_state_dict``."""
    _state_adapter[:] = [adapter]


def joinables_of(obj: Any) -> list[Joinable]:
    """Return the joinables that stand for ``obj``.

    Raises:
        TypeError: if ``obj`` cannot join.
    """
    if isinstance(obj, Joinable):
        return [obj]
    importlib.import_module("joinables")  # registers the adapters for torch's own objects, once
    adapter = next((_adapters[cls] for cls in type(obj).__mro__ if cls in _adapters), None)
    is_state = all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))
    if adapter is None and is_state and not isinstance(obj, type):
        adapter = _state_adapter[0]
    if adapter is None:
        kind = f"the class {obj.__qualname__}" if isinstance(obj, type) else f"a {type(obj).__qualname__} object"
        raise TypeError(
            f"{kind} cannot join: it is no Joinable, has no state_dict and load_state_dict, and no adapter is"
            f" registered for it. Derive it from join.Joinable, or call join.register_joinable({type(obj).__name__},"
            " adapter) [J096]"
        )
    adapted = adapter(obj)
    listed = [adapted] if isinstance(adapted, Joinable) else adapted
    if not (isinstance(listed, Sequence) and listed and all(isinstance(item, Joinable) for item in listed)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"the adapter registered for {type(obj).__qualname__} returned {adapted!r}; it must return a Joinable, or a"
            " list of them [J097]"
        )
    return list(listed)
