"""Temporary changes that adapters make to users' objects: functions, attributes, modes and gradients.

An :class:`Uncopied` is called in place of a function, or as a hook, while its object is in a block. :func:`replaced`
sets any attribute for a while, and :func:`with_methods` any method. :func:`keeping_modes` restores the training or eval
mode of a module's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any, cast

import torch

from join.batch import tensors_in
from join.collectives._torch_private import pytree


def with_methods(obj: Any, methods: Mapping[str, Any]) -> Callable[[], None]:
    """Give one object methods of its own, such as ``__len__``, and return the function that undoes this.

    Raises:
        TypeError: If the class of the object cannot be changed.
    """
    kind = cast("Any", type(obj))
    set_class = partial(vars(object)["__class__"].__set__, obj)  # some objects have a property of this name
    try:
        set_class(type(kind.__name__, (kind,), dict(methods)))
    except TypeError:
        raise TypeError(
            f"An object of type {kind.__name__} cannot get {' and '.join(methods)} of its own. Pass one of a class"
            " that is written in Python, such as a torch.utils.data.DataLoader. [J764]"
        ) from None
    return partial(set_class, kind)


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Generator[None]:
    """Set an attribute of an object for the duration of a context, and restore it afterwards."""
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


class Uncopied:
    """Callable in an object that is in a block. A copy of the object, or an unpickled one, has the original instead."""

    original: Any
    """The function that a copy has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchanged, (self.original,)


class CallInstead(Uncopied, partial[Any]):
    """Callable that passes the original, its own first argument, to another function, before all other arguments."""

    original = property(lambda self: self.args[0])


def _do_nothing(*_: Any) -> None:
    return None


class ModuleHook(Uncopied, partial[Any]):
    """Module hook that calls a function. In a copy of the module, the hook does nothing.

    The function should be :func:`~join.collectives._torch_private.uncompiled`.
    """

    original = staticmethod(_do_nothing)


def _unchanged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original. Pickle and copy call this function, and so bind a method to the copy of its object."""
    return original


@contextmanager
def keeping_modes(module: torch.nn.Module) -> Generator[None]:
    """Restore the mode of each part of ``module`` after a context."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def synchronised_norms(module: torch.nn.Module) -> dict[str, torch.nn.SyncBatchNorm]:
    """Return the SyncBatchNorm layers in ``module``, by name."""
    parts = cast("Iterator[tuple[str, torch.nn.Module]]", module.named_modules())
    return {name: part for name, part in parts if isinstance(part, torch.nn.SyncBatchNorm)}


def zero_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return 0 in the type and on the device of ``like``; a backward, even of NaN, gives ``tensor`` gradients of 0."""
    return tensor.flatten()[:0].sum().to(like)


def tensors_with_grad(tree: Any) -> list[torch.Tensor]:
    """Return all tensors that require grad in nested containers, mappings and dataclasses."""
    return [tensor for tensor in tensors_in(tree) if tensor.requires_grad]


def hides_tensors(tree: Any) -> bool:
    """Return whether the containers hold an object of an unknown class, which may hold tensors."""
    plain = (torch.Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    leaves = pytree.tree_leaves(tree)
    return any(not (leaf is None or isinstance(leaf, plain) or is_dataclass(leaf)) for leaf in leaves)
