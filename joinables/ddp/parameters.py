"""Records for each parameter of a DDP module: :class:`Factors`, :class:`UsedParameters` and :class:`StaticGraph`.

*Unused parameters.* With ``find_unused_parameters`` a parameter that no rank used keeps its ``grad`` as it was, mostly
``None``, and the optimizer passes it by. In a loop over ``Join.iterate`` the ranks without data run the module on
dummies, and the reducer counts that as use. So the use by batches is counted here, and the rest is put back::

    rank with data                                 rank without data
    the reducer's all-reduces                      the same
    all-reduce (max) of the parameters it used     the same, of those it used while it had data

*Static graphs.* In its first backward, the reducer of a ``static_graph`` module counts how often each parameter's
gradient arrives; in every later one it waits for just as many arrivals. A rank that joins before its first batch has
counted nothing. So at the end of that first backward the ranks share the counts (one all-reduce, max), before the
reducer's own collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from join.collectives import Collective
from joinables._torch import autograd, reducer

_arrivals: weakref.WeakKeyDictionary[DistributedDataParallel, list[int]] = weakref.WeakKeyDictionary()


class Factors:
    """Multiplies the gradients that arrive at ``parameters``, in the few cases in which that is needed.

    By 0 if a batch counts for nothing, even if the gradient is NaN; and by what makes a part of the mean of the
    gradients that a comm hook is given.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._handles: dict[int, Any] = {}  # by the parameter's number
        self.factor = 1.0
        """What gradients are multiplied by."""

    def multiply_by(self, factor: float) -> None:
        """Multiply the gradients of the backwards that follow; by 1 no longer."""
        self.factor = factor
        if factor == 1.0:
            autograd.remove_hooks(self._handles)
            return
        autograd.hook_gradients(self._parameters, self._handles, lambda _: self._multiply)

    def _multiply(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # SyncBatchNorm says so for the zeros of an empty batch
            return None
        return gradient * self.factor if self.factor else torch.zeros_like(gradient)


class UsedParameters:
    """Counts which of a module's ``parameters``, in the reducer's order, batches used since the last reduction."""

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ddp, self._parameters = ddp, parameters
        self._handles: dict[int, Any] = {}  # by the parameter's number
        self.counts = False
        """Whether there is anything to count: not without ``find_unused_parameters``."""
        self.with_dummies = False
        """Whether a rank had no data in one of the backwards that are reduced now."""
        self._used = torch.zeros(len(parameters), dtype=torch.int64, device="cpu")
        self._absent: list[bool] = []

    def attach(self, join: Join) -> None:
        """Find out whether there is anything to count; called when a block is entered."""
        self._join = join
        self.counts = self._ddp.find_unused_parameters and not self._ddp.static_graph

    def detach(self) -> None:
        """Remove the hooks; called when the block is left."""
        autograd.remove_hooks(self._handles)
        del self._join

    def watch(self) -> None:
        """Hook into parameters before a forward, in a loop over ``Join.iterate``."""
        if self.counts:
            autograd.hook_gradients(self._parameters, self._handles, lambda index: partial(self._see, index))

    def _see(self, index: int, gradient: torch.Tensor) -> None:
        if self._handles and not self._join.channel.step.shadowing:
            self._used[index] = 1

    def begin_window(self) -> None:
        """Begin to count anew; called before the first backward since the last reduction, or since ``zero_grad``."""
        self._absent = [parameter.grad is None for parameter in self._parameters]
        self._used = torch.zeros(len(self._absent), dtype=torch.int64, device="cpu")

    def end_reduction(self) -> None:
        """Drop the gradients of parameters that only dummies used; called after a reduction."""
        self._join.collective.all_reduce(self._used, "max").wait()
        used = cast("list[int]", self._used.tolist())
        for parameter, is_used, absent in zip(self._parameters, used, self._absent, strict=True):
            if absent and not is_used:
                parameter.grad = None


class StaticGraph:
    """The arrivals of the gradients of a module's ``parameters``, which are in the reducer's order.

    Does nothing for a module without ``static_graph``.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ddp, self._parameters = ddp, parameters

    def check(self) -> None:
        """Make sure that a rank without data can learn the graph.

        Raises:
            ValueError: if the module's first backward has been run outside any block.
        """
        ddp = self._ddp
        if ddp.static_graph and not reducer.first_static_backward(ddp) and ddp not in _arrivals:
            raise ValueError(
                "the static_graph module has run its first backward outside a Join block, so a rank without data cannot"
                " know its graph; enter the first block before the first backward [J114]"
            )

    def watch(self, collective: Collective) -> None:
        """Called as a backward begins: if it is the first, count in it and share the counts at its end."""
        if not reducer.first_static_backward(self._ddp):
            return
        counts = [0] * len(self._parameters)

        def arrived(index: int, *_: Any) -> None:
            counts[index] += 1

        nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in self._parameters]
        handles: list[Any] = [node.register_hook(partial(arrived, i)) for i, node in enumerate(nodes)]

        def finish() -> None:
            for handle in handles:
                handle.remove()
            self._share(collective, counts)

        autograd.after_backward(finish)

    def learn(self, collective: Collective) -> list[int] | None:
        """Called before a shadowed backward: the arrivals it has to imitate; ``None`` is once for each parameter."""
        if reducer.first_static_backward(self._ddp):
            self._share(collective, [0] * len(self._parameters))
        return _arrivals.get(self._ddp)

    def _share(self, collective: Collective, arrivals: Sequence[int]) -> None:
        counts = torch.tensor(arrivals, device="cpu")
        collective.all_reduce(counts, "max").wait()
        _arrivals[self._ddp] = counts.tolist()
