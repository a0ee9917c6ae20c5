"""Registry of adapters: :func:`register_joinable`, and the look-up that turns a listed object into joinables.

The look-up goes through the classes of the object from the most specific class to ``object``, so an adapter for a
subclass takes precedence over an adapter for its base class. The package ``joinables`` has the adapters for PyTorch's
own objects, and for any other object with ``state_dict`` and ``load_state_dict``, which is joined as state; the first
look-up imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import MemberDescriptorType
from typing import Any, TypeVar

from join.collectives._torch_private import pytree
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
    if cls is object and not _has_state(obj):
        kind, own = ("The class", obj) if isinstance(obj, type) else ("An object of type", type(obj))
        held = " and ".join(_held_in(obj))
        hint = f" List its {held} instead, or do one of these." if held else ""
        raise TypeError(
            f"{kind} {own.__qualname__} cannot join. It is not a Joinable, has no state_dict and"
            f" load_state_dict, and has no registered adapter.{hint} Remove it from the list, derive its class from"
            f" join.Joinable, or call join.register_joinable({own.__name__}, adapter). [J096]"
        )
    adapted = _adapters[cls](obj)
    listed = [adapted] if isinstance(adapted, Joinable) else adapted
    if not (isinstance(listed, Sequence) and listed and all(isinstance(item, Joinable) for item in listed)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"The adapter registered for {type(obj).__qualname__} returned {adapted!r}. Return a Joinable or a list of"
            " Joinables from it. [J097]"
        )
    return list(listed)


def _has_state(obj: Any) -> bool:
    methods = (getattr(obj, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(obj, type) and all(map(callable, methods))


def _held_in(obj: Any) -> list[str]:
    """Return the places of objects with state in attributes of ``obj``: ``.ema``, or ``.models[0]``."""
    kinds = [item for cls in type(obj).__mro__ for item in vars(cls).items()]
    slots = [name for name, kind in kinds if isinstance(kind, MemberDescriptorType)]
    attributes = {name: getattr(obj, name, None) for name in (*slots, *getattr(obj, "__dict__", ()))}
    leaves = {name: pytree.tree_flatten_with_path(value)[0] for name, value in attributes.items()}
    return [f".{name}{pytree.keystr(path)}" for name in leaves for path, leaf in leaves[name] if _has_state(leaf)]
