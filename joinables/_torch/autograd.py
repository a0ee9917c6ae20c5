"""Private APIs of autograd that this package calls.

A docstring says what the private API replaces: a public API that torch lacks, or that is too slow.
"""

# Private names are missing from torch's type stubs, or have no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from join.collectives._torch_private import after_backward, backward_under_way


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread.

    A checkpointed module runs its forward again inside a backward.
    """
    return backward_under_way() != -1


def differentiated_collective(group: Any) -> str:
    """Return the name of a collective on a process group through which the current backward passes; ``""`` without one.

    Finds the collectives of ``torch.distributed.nn`` and the functional collectives that pass gradients to other ranks.
    Replaces a query for the tensors at which a backward began: they are read from the frame of
    ``torch.autograd.backward``, which is in another thread if this one belongs to a device.
    """
    nodes = [tensor.grad_fn for tensor in _roots() if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        function = getattr(node, "_forward_cls", None)
        if function is not None and function.__module__ == "torch.distributed.nn.functional":
            if (node.group or dist.group.WORLD) is group:
                return function.__name__.removeprefix("_")
        elif getattr(node, "group_name", None) == group.group_name:
            return node.name()
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                nodes.append(before)
    return ""


def _roots() -> list[torch.Tensor]:
    others = sys._current_frames()
    del others[threading.get_ident()]  # a frame that refers to itself would keep its variables
    for innermost in (sys._getframe(1), *others.values()):
        frame: Any = innermost
        while frame is not None:
            if frame.f_code is torch.autograd.backward.__code__:
                tensors = frame.f_locals["tensors"]
                return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            frame = frame.f_back
    return []


def hook_gradients(
    parameters: Sequence[torch.Tensor],
    handles: dict[int, Any],
    hook_of: Callable[[int], Callable[[torch.Tensor], torch.Tensor | None]],
) -> None:
    """Register hooks for the gradients of parameters that have none. Parameters may be frozen in some backwards.

    Args:
        parameters: The parameters of a module.
        handles: The handles of earlier hooks, by the number of the parameter. New handles are added.
        hook_of: Returns the hook for the parameter of a number.
    """
    for index, parameter in enumerate(parameters):
        if parameter.requires_grad and index not in handles:
            handles[index] = parameter.register_hook(hook_of(index))


def remove_hooks(handles: dict[int, Any]) -> None:
    """Remove hooks, and clear their handles."""
    for handle in handles.values():
        handle.remove()
    handles.clear()


def once_before(nodes: Sequence[Any], hook: Callable[[], None]) -> None:
    """Call ``hook`` before the first of these nodes runs, if one of them runs in the current backward pass."""
    handles: dict[int, Any] = {}

    def run(*_: Any) -> None:
        if handles:
            remove_hooks(handles)
            hook()

    handles.update(enumerate(node.register_prehook(run) for node in nodes))
    after_backward(partial(remove_hooks, handles))
