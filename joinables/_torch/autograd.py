"""Every private API of autograd that this package calls, each with what it stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from join.collectives._torch_private import after_backward


def after_reduction(callback: Callable[[], None]) -> None:
    """As :func:`after_backward`, but after what reducers have queued by the end of the backward pass."""
    after_backward(partial(after_backward, callback))


backward_under_way: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that is under way on this thread, -1 outside one. Stands in for asking for it."""


def in_backward() -> bool:
    """Whether a backward pass is under way on this thread: a checkpointed module runs its forward again in there."""
    return backward_under_way() != -1


def gradient_writes(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The id of each gradient and how often it was written to in place, for a comparison later.

    Stands in for asking whether ``zero_grad`` or a backward has changed it since.
    """
    gradients = (parameter.grad for parameter in parameters)
    return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]


def hook_gradients(
    parameters: Sequence[torch.Tensor],
    handles: dict[int, Any],
    hook_of: Callable[[int], Callable[[torch.Tensor], torch.Tensor | None]],
) -> None:
    """Register hooks for the gradients of those parameters that have none yet: some are frozen for some backwards.

    Args:
        parameters: a module's.
        handles: of earlier hooks, by the parameter's number; new ones are added.
        hook_of: makes the hook of the parameter with this number.
    """
    if len(handles) < len(parameters):
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad and index not in handles:
                handles[index] = parameter.register_hook(hook_of(index))


def remove_hooks(handles: dict[int, Any]) -> None:
    """Remove hooks, and forget their handles."""
    for handle in handles.values():
        handle.remove()
    handles.clear()


def accumulators(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """The nodes of the graph that accumulate the gradients of parameters, but for those that are frozen."""
    return [
        torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad
    ]


def will_run(nodes: Sequence[Any]) -> bool:
    """Whether the backward pass under way runs any of these accumulators; in ``torch.autograd.grad`` it does not.

    Stands in for asking for it in public, as ``torch.autograd.graph.register_multi_grad_hook`` does.
    """
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # one is of a parameter whose gradient torch.autograd.grad is asked for
        return False


def once_before(nodes: Sequence[Any], hook: Callable[[], None]) -> None:
    """Call ``hook`` before the first of these nodes runs, if one does in the backward pass that is under way."""
    handles: list[Any] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    def run(*_: Any) -> None:
        if handles:
            remove()
            hook()

    handles += [node.register_prehook(run) for node in nodes]
    after_backward(remove)
