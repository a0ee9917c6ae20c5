"""Facts that outlive a block: :class:`Memory`, with the open :class:`Window` of a module and its :class:`LastResult`.

The window is in the memory, not in the block's adapters. So a window that one block leaves open needs no hand-over to
the next block. The memory is not on the module, which belongs to the user, and lives as long as the module.

*The last result under new gradients* (:class:`LastResult`). DDP reduces the contents of ``grad``. Without
``zero_grad``, these include the result of the last reduction, on every rank that had data in it. The new mean must
contain that result once. The result goes through the reduction, so ranks end alike even if only some of them have
called ``zero_grad``, and joined ranks receive it. Each mean says how many times a rank has to count it
(``Mean.count``). If this may not be once, the window begins with a copy of it::

    micro-batch    copy of the last result, before the first backward of the window
                   grad = last result + own gradients, as without Join
    reduction      grad += (times - 1) * copy, then DDP's all-reduce
    afterwards     a parameter that no rank used: grad = copy

If the first backward of a window reduces, the copy is made only if ``times`` is not 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from join.collectives._torch_private import Writes, are_zero, writes_to
from joinables._torch import reducer


def have_none(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether no parameter has a gradient, as after ``zero_grad``."""
    for parameter in parameters:  # not by all(), whose generator costs a call for each parameter
        if parameter.grad is not None:
            break
    else:
        return True
    return False


class LastResult(dict[int, torch.Tensor]):
    """Copy of the last result, by index of the parameter; empty if no gradient contained it, or if no copy is needed.

    The methods take the parameters in the reducer's order.
    """

    @classmethod
    @torch.no_grad()
    def copy_of(cls, parameters: Sequence[torch.nn.Parameter]) -> LastResult:
        """Return a copy of the gradients, before a new gradient is added to them."""
        gradients = {index: p.grad for index, p in enumerate(parameters) if p.grad is not None}
        return cls(zip(gradients, reducer.copies_of(list(gradients.values())), strict=True))

    @torch.no_grad()
    def add(self, parameters: Sequence[torch.nn.Parameter], times: float) -> None:
        """Add the last result to the gradients, multiplied by ``times``."""
        gradients = {index: gradient for index in self if (gradient := parameters[index].grad) is not None}
        reducer.add_to(list(gradients.values()), [self[index] for index in gradients], times)

    @torch.no_grad()
    def restore(self, parameters: Sequence[torch.nn.Parameter], used: torch.Tensor) -> None:
        """Put the last result back where a reduction wrote nothing.

        Args:
            parameters: The parameters.
            used: Whether any rank used each parameter, of shape ``(number of parameters,)``. The reduction writes only
                the gradients of these.
        """
        for index, result in self.items():
            if (gradient := parameters[index].grad) is not None:
                gradient.copy_(torch.where(used[index].to(result.device), gradient, result))


@dataclass(slots=True)
class Window:
    """Backwards that no reduction has included, for example under ``no_sync``.

    A window ends with a reduction or with ``zero_grad``. In a loop over ``Join.iterate``, it must have ended before the
    next accumulation window begins (``Step.window``). An accumulation window may contain several of these windows.

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
        was_outside: Whether a backward in it ran outside of ``no_sync``, although its forward ran under it.
        sample: The sample of the parameters at the window's first backward in the current block, if this was in plain
            code; otherwise ``None``. Once it has changed, this rank has stepped on gradients of its own.
    """

    backwards: int = 0
    is_earlier: bool = False
    weight: float | None = None
    unit: float = 1.0
    number: int = 0
    with_dummies: bool = False
    writes: Writes = field(default_factory=Writes)
    kept: LastResult = field(default_factory=LastResult)
    was_outside: bool = False
    sample: Mapping[str, float] | None = None

    def was_zeroed(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether ``zero_grad`` was called since the last backward.

        It sets gradients to ``None``, or writes 0 to them. Zeros alone do not show a call, as a batch may produce
        them. A write is needed too.
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
        own: The sample of the parameters as the last block left them, if a step in it was on gradients that no
            reduction had included. While the sample is the same, the parameters may differ between ranks. In a block,
            the sample after such a step. ``None`` if there was none.
    """

    window: Window = field(default_factory=Window)
    buffer_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    own: Mapping[str, float] | None = None


_memories: WeakKeyDictionary[DistributedDataParallel, Memory] = WeakKeyDictionary()


def memory_of(ddp: DistributedDataParallel) -> Memory:
    """Return the memory of a module, which is new if no block has listed the module."""
    return _memories.setdefault(ddp, Memory())
