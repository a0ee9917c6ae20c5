"""What adapters do to modules and other objects of users: functions replaced for a while, modes, tensors, gradients.

A :class:`Replacement` takes the place of a function of an object while that is in a block; :func:`replaced` sets any
attribute for a while; :func:`keeping_modes` restores the training or eval mode of a module's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, cast

import torch

from join.batch import tensors_in
from join.collectives._torch_private import pytree
from join.transfer import Inbox
from joinables._torch.objects import call_uncompiled, compiler_under_way, not_compiled


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


@contextmanager
def keeping_modes(module: torch.nn.Module) -> Generator[None]:
    """A context after which each part of ``module`` is in the mode that it was in before."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def tensors_with_grad(tree: Any) -> list[torch.Tensor]:
    """All tensors that require grad in nested containers, mappings and dataclasses."""
    return [tensor for tensor in tensors_in(tree) if tensor.requires_grad]


def hides_tensors(tree: Any) -> bool:
    """Whether the containers hold an object of unknown class, which may hold tensors."""
    plain = (torch.Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    leaves = pytree.tree_leaves(tree)
    return any(not (leaf is None or isinstance(leaf, plain) or is_dataclass(leaf)) for leaf in leaves)


def adopt_gradients(
    inbox: Inbox, parameters: Sequence[torch.nn.Parameter], present: Sequence[bool], sent: Any, *, keeps: bool
) -> None:
    """Let parameters receive the gradients of another rank; in place where they fit: they may be views of buckets.

    Args:
        inbox: receives them.
        parameters: the same on all ranks.
        present: which of them have a gradient on that rank; others have none afterwards.
        sent: the skeleton of these gradients; empty if they are still to be reduced there: they are 0 here, then.
        keeps: whether this rank leaves its gradients alone.
    """
    if keeps:
        inbox.fill(sent, keeps=True)
        return
    there = [(each, each.grad) for each, is_there in zip(parameters, present, strict=True) if is_there]
    # Of another dtype as a hook leaves it that compresses.
    own = [torch.zeros_like(each) if held is None or held.dtype != each.dtype else held for each, held in there]
    gradients = iter(inbox.fill(sent, own) if sent else [gradient.zero_() for gradient in own])
    for parameter, is_there in zip(parameters, present, strict=True):
        parameter.grad = next(gradients) if is_there else None
