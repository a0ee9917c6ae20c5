"""Facts that outlive a block: :class:`Memory`, with the open :class:`Window` of a module.

The window lives in the memory from its first backward on. So a window that one block leaves open needs no hand-over to
the next block. The memory is not on the module, which belongs to the user, and lives as long as the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from join.collectives._torch_private import Writes, are_zero, writes_to
from joinables.ddp.kept import Kept


def have_none(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether no parameter has a gradient, as after ``zero_grad``."""
    for parameter in parameters:
        if parameter.grad is not None:
            break
    else:
        return True
    return False


@dataclass(slots=True)
class Window:
    """The backwards since the last reduction, for example under ``no_sync``. Each reduction begins a new window.

    Attributes:
        backwards: The number of backwards whose gradients no reduction has included yet. The window is open if there
            are any.
        is_earlier: Whether an earlier block has left the window open, and this block has not run a backward yet.
        weight: The sum of the weights of this rank's backwards in plain blocks; ``None`` if they have no weights.
        unit: The unit of these weights (``join.scaling``) in the block of the last backward.
        number: The number of the accumulation window in a loop over ``Join.iterate``; 0 in a plain block, and after a
            reduction until the next backward.
        with_dummies: Whether a rank had no data in one of the backwards in such a loop.
        writes: The writes to each gradient by the end of the last backward; empty before it.
        kept: The last result, as the gradients contained it before the first backward.
    """

    backwards: int = 0
    is_earlier: bool = False
    weight: float | None = None
    unit: float = 1.0
    number: int = 0
    with_dummies: bool = False
    writes: Writes = field(default_factory=Writes)
    kept: Kept = field(default_factory=Kept)

    def was_zeroed(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether ``zero_grad`` was called since the last backward.

        It sets gradients to ``None``, or writes 0 to them. Gradients of 0 do not show a call without a write, because a
        batch may produce them.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        is_written = self.writes and self.writes != writes_to(gradients)
        return not gradients or (bool(is_written) and are_zero(gradients))


@dataclass(slots=True)
class Memory:
    """Memory of one module.

    Attributes:
        window: The current window, which may be open.
        buffer_shapes: The shapes of the buffers at their last synchronisation, which are the same on all ranks. The
            present shapes may differ, since one rank may evaluate between blocks.
        arrivals: How often the gradient of each parameter arrives in a backward of a ``static_graph`` module; ``None``
            if its first backward has not run in a block.
    """

    window: Window = field(default_factory=Window)
    buffer_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    arrivals: list[int] | None = None


_memories: WeakKeyDictionary[DistributedDataParallel, Memory] = WeakKeyDictionary()


def memory_of(ddp: DistributedDataParallel) -> Memory:
    """Return the memory of a module, which is new if no block has listed the module."""
    return _memories.setdefault(ddp, Memory())
