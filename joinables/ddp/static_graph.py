"""What a rank without data cannot know of a static graph: :class:`StaticGraph`.

In its first backward, the reducer of a ``static_graph`` module counts how often each parameter's gradient arrives; in
every later one it waits for just as many arrivals. A rank that joins before its first batch has counted nothing. So at
the end of that first backward the ranks share the counts (one all-reduce, max), before the reducer's own collectives.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from join.collectives import Collective
from joinables._torch import autograd, reducer

# Kept over blocks, and not on the module itself, which belongs to the user.
_arrivals: weakref.WeakKeyDictionary[DistributedDataParallel, list[int]] = weakref.WeakKeyDictionary()


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
        handles: list[Any] = [node.register_hook(functools.partial(arrived, i)) for i, node in enumerate(nodes)]

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

    def _share(self, collective: Collective, mine: list[int]) -> None:
        counts = torch.tensor(mine)
        collective.all_reduce(counts, "max").wait()
        _arrivals[self._ddp] = counts.tolist()
