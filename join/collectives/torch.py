"""A :class:`Collective` over a ``torch.distributed.ProcessGroup``.

CPU tensors need a CPU backend. A group without one (NCCL alone) gets a gloo group of the same ranks beside it, made
once per group: so a header never waits for a CUDA stream, and no host synchronisation enters an active rank's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from typing_extensions import override

from join.collectives.base import Collective, ReduceOp, Work

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclass
class _Shared:
    """What all collectives of one group have in common, over time."""

    blocks: int = 0
    cpu_group: dist.ProcessGroup | None = None


_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()


class TorchCollective(Collective):
    """The ranks of a process group; get one with :func:`join.collectives.collective_of`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._shared = _shared.setdefault(group, _Shared())

    @property
    @override
    def rank(self) -> int:
        return self.group.rank()

    @property
    @override
    def world_size(self) -> int:
        return self.group.size()

    @cached_property
    def _cpu_group(self) -> dist.ProcessGroup:
        if "cpu:" in dist.get_backend_config(self.group):
            return self.group
        if self._shared.cpu_group is None:
            ranks = distributed_c10d.get_process_group_ranks(self.group)
            made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self._shared.cpu_group = cast("dist.ProcessGroup", made)
        return self._shared.cpu_group

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self._cpu_group if tensor.device.type == "cpu" else self.group

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        # The group's own method: dist.all_reduce adds 10 us of Python to a call that is made at every step.
        group = self._group_of(tensor)
        if op == "sum":
            return group.allreduce([tensor])
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]  # pyright: ignore[reportAttributeAccessIssue]
        return group.allreduce([tensor], options)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._group_of(tensor).broadcast([tensor], options)

    @override
    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    @override
    def get(self, key: str) -> str:
        return self._store.get(key).decode()

    @override
    def check(self, key: str) -> bool:
        return self._store.check([key])

    @override
    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    @override
    def next_block(self) -> int:
        self._shared.blocks += 1
        return self._shared.blocks

    @property
    def _store(self) -> dist.Store:
        return self.group.get_group_store()
