"""Private APIs of autograd that this package calls.

A docstring says what the private API replaces: a public API that torch lacks, or that is too slow.
"""

# Private names are missing from torch's type stubs, or have no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from join.collectives._torch_private import after_backward, backward_under_way


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread.

    A checkpointed module runs its forward again inside a backward.
    """
    return backward_under_way() != -1


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
