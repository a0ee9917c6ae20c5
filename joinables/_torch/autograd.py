"""Private APIs of autograd that this package calls.

A docstring says what the private API replaces: a public API that torch lacks, or that is too slow.
"""

# Private names are missing from torch's type stubs, or have no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from join.collectives._torch_private import backward_under_way
from join.failure.wait import current_frames


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
    for node in nodes_of(_roots()):
        function = getattr(node, "_forward_cls", None)
        if function is not None and function.__module__ == "torch.distributed.nn.functional":
            if (node.group or dist.group.WORLD) is group:
                return function.__name__.removeprefix("_")
        elif getattr(node, "group_name", None) == group.group_name:
            return node.name()
    return ""


def _roots() -> list[torch.Tensor]:
    others = current_frames()
    del others[threading.get_ident()]  # a frame that refers to itself would keep its variables
    for frame in (sys._getframe(1), *others.values()):
        if (tensors := variable_of(torch.autograd.backward, "tensors", frame)) is not None:
            return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return []


def variable_of(function: Any, name: str, frame: FrameType | None) -> Any:
    """Return a variable of the innermost call of a function among a frame and its callers; ``None`` without one.

    Only the variables of that call are read, since a frame keeps the variables that were read.
    """
    while frame is not None:
        if frame.f_code is function.__code__:
            return frame.f_locals[name]
        frame = frame.f_back
    return None


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph of tensors that require grad, the nearest first."""
    nodes: list[Any] = [get_gradient_edge(tensor).node for tensor in tensors]
    seen = {None, *nodes}
    for node in nodes:  # the loop adds the nodes behind each node
        yield node
        behind = {function for function, _ in node.next_functions} - seen
        seen |= behind
        nodes += behind
