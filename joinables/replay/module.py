"""What a replayed module's forward and backward have in common: :class:`ReplayedModule`, :class:`Pass`, their base.

How a module is replayed is told in ``joinables.replay``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from joinables.adapter import Announcing
from joinables.replay.dry_run import DryRun, Example
from joinables.replay.reductions import reduction_of
from joinables.sharding import group_of

REMEMBERED = 62
"""How many forwards back a backward can go through: bits of a word."""

agreed_runs: weakref.WeakKeyDictionary[torch.nn.Module, DryRun] = weakref.WeakKeyDictionary()
"""How ranks without data run a module, as agreed on all ranks in an earlier block."""


class ReplayedModule:
    """A module, what reduces its gradients, and how ranks without data run it."""

    def __init__(self, module: torch.nn.Module, example: Example | None, process_group: Any) -> None:
        self.module = module
        self.reduction = reduction_of(module)
        parameter = next(module.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        if process_group is None and isinstance(module, DistributedDataParallel):
            process_group = cast("Any", module).process_group
        if process_group is None:
            process_group = group_of(self.reduction.parameters, type(module).__name__)
        self.process_group = process_group
        agreed = agreed_runs.get(module)
        self.dry_run = agreed if agreed and agreed.example is example else DryRun(self.device, example)


class Graph:
    """Is held by hooks in the autograd graph of one forward only: once it is freed, no backward of that can come."""


@dataclass(eq=False)
class Pass:
    """A forward with grad.

    Attributes:
        outputs: its outputs that require grad. Those of a real forward, on an active rank, are held only until its
            backward or the next forward begins: how long its graph lives is up to the user.
        graph: of a real forward, what lives as long as its graph; ``None`` for a replayed one.
        on_dummy: whether it ran on a dummy of a loop over ``Join.iterate``.
        done: whether a backward has gone through it.
    """

    outputs: list[torch.Tensor]
    graph: weakref.ref[Graph] | None = None
    on_dummy: bool = False
    done: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether its autograd graph is alive, on an active rank."""
        return self.graph is not None and self.graph() is not None


class ReplayedBurst(Announcing):
    """A module's forward or backward."""

    what: ClassVar[str]

    def __init__(self, module: ReplayedModule) -> None:
        super().__init__(module.module)
        self._of, self._reduction = module, module.reduction

    @property
    @override
    def join_name(self) -> str:
        return f"the {self.what} of {type(self._of.module).__name__}"

    @property
    @override
    def join_device(self) -> torch.device:
        return self._of.device

    @property
    @override
    def join_process_group(self) -> Any:
        return self._of.process_group
