"""Every private API of autograd that this package calls, each with what it stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

_engine: Any = Variable._execution_engine


def after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is under way has computed all gradients.

    Stands in for a public end-of-backward hook. Callbacks run in the order in which they were queued; a callback may
    queue another, which runs after all that were queued before.
    """
    _engine.queue_callback(callback)


def after_reduction(callback: Callable[[], None]) -> None:
    """As :func:`after_backward`, but after what reducers have queued by the end of the backward pass."""
    _engine.queue_callback(partial(_engine.queue_callback, callback))


_NO_HANDLE = -1  # in the place of the number of a handle; these are not negative


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Have ``hook`` called with the gradient of a tensor that requires one; the handle, or ``None``.

    Stands in for ``Tensor.register_hook``, whose handle costs 15 us where a step has emptied the caches. Where a module
    has computed the tensor nobody needs one, since the hook goes with the graph.
    """
    if tensor.is_leaf or tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
        return tensor.register_hook(hook)
    tensor._backward_hooks = OrderedDict({_NO_HANDLE: hook})
    tensor.grad_fn._register_hook_dict(tensor)  # pyright: ignore[reportOptionalMemberAccess]
    return None


backward_under_way: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that is under way on this thread, -1 outside one. Stands in for asking for it."""


def in_backward() -> bool:
    """Whether a backward pass is under way on this thread: a checkpointed module runs its forward again in there."""
    return backward_under_way() != -1


def writes(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to in place. Stands in for asking whether it was zeroed since."""
    return tensor._version
