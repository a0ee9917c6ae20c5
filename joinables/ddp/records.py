"""Data of the reductions of a DDP module: :class:`Window`, :class:`Reduction` and :class:`Memory`.

A :class:`Window` and a :class:`Reduction` are replaced as a whole when the next one begins. The :class:`Memory` lasts
from one block to the next. It is not on the module, which belongs to the user, and lives as long as the module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from join.collectives._torch_private import Writes
from join.collectives.base import FloatSum


@dataclass(slots=True)
class Window:
    """The backwards since the last reduction, for example under ``no_sync``. Each reduction begins a new window.

    Attributes:
        unreduced: Whether this rank has gradients that no reduction has included yet.
        weight: The sum of the weights of this rank's backwards in a plain block; ``None`` if they have no weights.
        unit: The unit of these weights (``join.scaling``) in the block of the last backward.
        number: The number of the accumulation window in a loop over ``Join.iterate``; 0 in a plain block,
            and after a reduction until the next backward.
        with_dummies: Whether a rank had no data in one of the backwards in such a loop.
        writes: The writes to each gradient by the end of the last backward; empty before it.
    """

    unreduced: bool = False
    weight: float | None = None
    unit: float = 1.0
    number: int = 0
    with_dummies: bool = False
    writes: Writes = field(default_factory=Writes)


@dataclass(slots=True)
class Reduction:
    """One reduction, from its announcement to the mean.

    Attributes:
        with_buffers: Whether its header announces the buffers too. The header is then sent in the forward, and does not
            show which ranks will run a backward.
        weighted: Whether it makes the weighted mean; in a plain block.
        unit: The unit of its weights (``join.scaling``).
        is_scaled: Whether its result is multiplied.
        has_parts: Whether the gradients are parts of the weighted mean before they are reduced.
        running_sum: The sum of the weights or the contributors, until it is known.
        total: The result of this sum.
        with_dummies: Whether use is counted (``UsedParameters``), and a rank had no data in one of the backwards.
    """

    with_buffers: bool = False
    weighted: bool = False
    unit: float = 1.0
    is_scaled: bool = False
    has_parts: bool = False
    running_sum: FloatSum | None = None
    total: float | None = None
    with_dummies: bool = False


@dataclass(slots=True)
class Memory:
    """Memory of one module.

    Attributes:
        open_window: The window that the last block left unreduced, until the next backward; ``None`` without one.
        taken_out: The parts of the last result that were taken out of the gradients during this window, and put back.
        may_have_result: Whether the gradients may contain the result of the last reduction.
        buffer_shapes: The shapes of the buffers at their last synchronisation, which are the same on all ranks. The
            present shapes may differ, since one rank may evaluate between blocks.
        arrivals: How often the gradient of each parameter arrives in a backward of a ``static_graph`` module; ``None``
            if its first backward has not run in a block.
    """

    open_window: Window | None = None
    taken_out: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    may_have_result: bool = True
    buffer_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    arrivals: list[int] | None = None


_memories: WeakKeyDictionary[DistributedDataParallel, Memory] = WeakKeyDictionary()


def memory_of(ddp: DistributedDataParallel) -> Memory:
    """Return the memory of a module, which is new if no block has listed the module."""
    return _memories.setdefault(ddp, Memory())
