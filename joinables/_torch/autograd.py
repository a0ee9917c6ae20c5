"""Private APIs of autograd that this package calls.

A docstring says what the private API replaces: a public API that torch lacks, or that is too slow.
"""

# Private names are missing from torch's type stubs, or have no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from join.collectives._torch_private import after_backward

backward_under_way: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that runs on this thread, or -1. Replaces a public query."""


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread.

    A checkpointed module runs its forward again inside a backward.
    """
    return backward_under_way() != -1


def gradient_writes(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the id of each gradient and the number of its in-place writes, for a later comparison.

    Replaces a query for changes of a gradient by ``zero_grad`` or a backward.
    """
    gradients = (parameter.grad for parameter in parameters)
    return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]


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


@contextmanager
def thawed(parameters: Iterable[torch.Tensor]) -> Generator[None]:
    """Let frozen parameters require grad for the duration of a context."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def accumulators(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes of the graph that accumulate the gradients of parameters, which may be frozen for now."""
    with thawed(parameters):
        return [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]


will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the current backward pass runs an accumulator; ``torch.autograd.grad`` runs none.

Replaces a public query, which ``torch.autograd.graph.register_multi_grad_hook`` makes in the same way. It raises
RuntimeError if ``torch.autograd.grad`` computes the gradient of the parameter.
"""


def once_before(nodes: Sequence[Any], hook: Callable[[], None]) -> None:
    """Call ``hook`` before the first of these nodes runs, if one of them runs in the current backward pass."""
    handles: dict[int, Any] = {}

    def run(*_: Any) -> None:
        if handles:
            remove_hooks(handles)
            hook()

    handles.update(enumerate(node.register_prehook(run) for node in nodes))
    after_backward(partial(remove_hooks, handles))
