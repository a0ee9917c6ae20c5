"""Attributes of optimizers and modules that are equal on all ranks after a block, if they were before it.

These are parts for ``join.held``, which copies and compares them. An optimizer may count its steps in an attribute, or
keep momentum in a list or in an object of its own: :func:`parts_of_optimizer` returns all its attributes, and those of
the objects in them. A module may count its forwards: :func:`parts_of_module` returns its numbers, flags and texts, and
its extra state. :func:`kept_attributes` undoes what a forward that raised has written.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from enum import Enum
from functools import cache, partial
from itertools import chain, islice, zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch

from join.collectives._torch_private import pytree
from join.held import CONTAINERS, LARGEST, PLAIN, Holder, Part, is_larger

_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""Attributes of every module, such as ``training``, which the loop sets."""
_OBJECTS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.nn.Module)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, partial)
_VALUES = (torch.Tensor, Enum, type, dict, *CONTAINERS)
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
_MOST_PARTS = 100
_MUTABLE = (dict, OrderedDict, defaultdict, list, deque, set)


@cache
def _of_optimizers() -> frozenset[str]:
    """Return attributes of every optimizer: hooks, settings, and values that are copied in another way, as its state.

    The import of torch.optim does not do what its first optimizer does: import the compiler.
    """
    return frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.empty(0, device="cpu"))], lr=0.1)))


def parts_of_optimizer(optimizer: Any, name: str, parameters: list[torch.nn.Parameter]) -> list[Part]:
    """Return the attributes of an optimizer or a wrapper of one, and of the objects in them, as parts.

    Args:
        optimizer: The optimizer.
        name: Its name, for texts.
        parameters: Its parameters, which are no state of its own.
    """
    parts, objects, seen = list[Part](), deque([(name, optimizer)]), {id(optimizer)}
    of_id = {id(parameter): parameter for parameter in parameters}
    while objects and len(parts) < _MOST_PARTS:
        name, obj = objects.popleft()
        values: dict[str, Any] = {}
        for key, value in cast("dict[str, Any]", getattr(obj, "__dict__", {})).items():
            if type(value) in PLAIN:
                values[key] = value
            elif key not in _of_optimizers() and not isinstance(value, _CODE):
                if _holds_any(value, of_id):
                    if type(value) is not dict:
                        continue  # ids, which are each rank's own
                    held = cast("dict[Any, Any]", value)
                    value = _ById(
                        {of_id.get(each, each) if type(each) is int else each: state for each, state in held.items()}
                    )
                inside = list(_objects_in(value))
                values[key] = Holder(value) if inside else value
                for number, each in enumerate(inside):
                    if id(each) not in seen and not isinstance(each, torch.nn.Module):
                        seen.add(id(each))
                        objects.append((f"{name}.{key}" if each is value else f"{name}.{key}[{number}]", each))
        parts.append(Part(name, values, partial(_load, obj), partial(_known_of, optimizer, parameters)))
    return parts


def _holds_any(value: Any, of_id: Mapping[int, Any]) -> bool:
    """Return whether a container has the ``id`` of a parameter as an element or a key."""
    if not isinstance(value, (dict, *CONTAINERS)) or 16 * len(cast("Any", value)) > LARGEST:
        return False
    return any(type(each) is int and each in of_id for each in cast("Iterable[Any]", value))


class _ById(dict[Any, Any]):
    """Values by the ``id`` of a parameter, which is another one on each rank, so that the parameter is in its place."""


def _load(obj: Any, values: Mapping[str, Any]) -> None:
    """Set attributes of an object, past a ``__setattr__`` of its own."""
    for name, value in values.items():
        if isinstance(value, _ById):
            value = {id(key) if isinstance(key, torch.Tensor) else key: each for key, each in value.items()}
        vars(obj)[name] = _into(vars(obj).get(name), value)


def _into(own: Any, value: Any) -> Any:
    """Return a value, in the containers and generators of the old one, which other code may hold, too."""
    if type(own) is not type(value):
        return value
    if isinstance(own, dict):
        held = cast("dict[Any, Any]", own)
        items = {key: _into(held.get(key), each) for key, each in value.items()}
        held.clear()
        held.update(items)
    elif isinstance(own, (list, deque)):
        values = cast("list[Any]", own)
        items = [_into(*pair) for pair in zip_longest(islice(values, len(value)), value)]
        values.clear()
        values.extend(items)
    elif isinstance(own, torch.Generator):
        own.set_state(value.get_state())
    else:
        return value
    return cast("Any", own)


def _known_of(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the parameters and the tensors of their state, which attributes may contain, too."""
    state = cast("Mapping[Any, Any]", getattr(optimizer, "state", {}))
    leaves = pytree.tree_leaves([state[parameter] for parameter in parameters if parameter in state])
    return [*parameters, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]


def _inside(value: Any) -> Iterator[Any]:
    """Yield a value, and the values in its containers; nothing if they take more than 1 MiB, as endless ones do."""
    values = [] if is_larger(value, LARGEST) else [value]
    while values:
        each = values.pop()
        yield each
        if isinstance(each, (dict, *CONTAINERS)):
            values += cast("Iterable[Any]", each.values() if isinstance(each, dict) else each)


def _objects_in(value: Any) -> Iterator[Any]:
    """Yield the objects with attributes in a value, which is one, or a container."""
    for each in _inside(value):
        is_own = type(each).__module__.partition(".")[0] not in _LIBRARIES
        if isinstance(each, _OBJECTS) or (is_own and hasattr(each, "__dict__") and not isinstance(each, _VALUES)):
            yield each


def parts_of_module(module: torch.nn.Module, name: str) -> Iterator[Part]:
    """Yield the numbers, flags and texts in attributes of a module, and its extra state, as parts.

    Args:
        module: The module.
        name: Its name, for texts.
    """
    library = cast("Any", sys.modules.get("torchmetrics"))
    for path, part in cast("Iterator[tuple[str, torch.nn.Module]]", module.named_modules()):
        if library is not None and isinstance(part, library.Metric):
            continue  # each rank counts its own batches there
        own = f"{name}.{path}" if path else name
        values = {key: value for key, value in vars(part).items() if type(value) in PLAIN and key not in _OF_MODULES}
        if values:
            yield Part(own, values, partial(_load, part))
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            try:
                extra: Any = part.get_extra_state()
            except Exception:  # it has none yet
                continue
            yield Part(own, {"extra state": extra}, partial(_load_extra, part))


def kept_attributes(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that restores the attributes of a module and its parts, and the containers in them.

    Tensors that are written in place, containers over 1 MiB, and objects of other classes stay as they are.
    """
    kept, containers = list[tuple[torch.nn.Module, dict[str, Any]]](), dict[int, tuple[Any, Any]]()
    for part in module.modules():
        held = {key: value for key, value in vars(part).items() if key not in _OF_MODULES or type(value) in PLAIN}
        kept.append((part, held))
        for each in chain.from_iterable(map(_inside, held.values())):
            if type(each) in _MUTABLE:
                containers[id(each)] = each, copy(each)

    def restore() -> None:
        for part, values in kept:
            for key in vars(part).keys() - values.keys() - _OF_MODULES:
                del vars(part)[key]
            vars(part).update(values)
        for each, before in containers.values():
            each.clear()
            (each.extend if isinstance(each, (list, deque)) else each.update)(before)

    return restore


def _load_extra(part: torch.nn.Module, values: Mapping[str, Any]) -> None:
    part.set_extra_state(values["extra state"])
