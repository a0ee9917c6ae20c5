""":class:`Collective` over a ``torch.distributed.ProcessGroup``: :class:`TorchCollective`.

CPU tensors need a CPU backend. If a group has none (NCCL alone), a gloo group of the same ranks is made for it, once
per group. So nothing in this package waits for a CUDA stream, and an active rank's step has no additional host
synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from typing_extensions import override

from join.collectives import shared_memory
from join.collectives._torch_private import (
    Aside,
    abort_on_devices,
    close_connections,
    for_small_messages,
    has_cpu_backend,
    issued_counter_of,
    let_go_before_exit,
    limit,
    never_destroy,
    never_destroy_at_exit,
    store_of,
    timeout_of,
)
from join.collectives.base import MESSAGES, Collective, Kept, Line, ReduceOp, Work, as_bytes, check_op
from join.collectives.board import Board, StoreBoard
from join.collectives.shared_memory import Lane, Segment, SharedBoard, SharedMemoryLine
from join.collectives.timeouts import TIMEOUTS

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclass
class _Shared:
    """State that all collectives of one process group have in common, one after the other."""

    timeout: float
    """Seconds that an operation may take, by the group's own limit."""
    companion: TorchCollective | None = None
    has_tried: bool = False
    """Whether the ranks have tried to share memory."""
    segment: Segment | None = None
    """Memory that all ranks share; ``None`` if not all ranks can reach it."""
    kept: Kept = field(default_factory=Kept)
    lanes: dict[int, Lane] = field(default_factory=dict[int, Lane])
    """Lanes of the shared memory that are in use, by the number of their line."""


_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()

of_group: WeakValueDictionary[dist.ProcessGroup, TorchCollective] = WeakValueDictionary()
"""Collective of each process group. A group must not outlive its user's last reference to it, so the references are
weak.
"""


class TorchCollective(Collective):
    """Ranks of a process group, which belongs to its creator.

    Args:
        group: The process group. :func:`join.collectives.collective_of` returns its collective.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self._cpu_group = group if has_cpu_backend(group) else None
        self._shared = _shared.setdefault(group, _Shared(timeout_of(group).total_seconds()))
        self._kept = self._shared.kept
        let_go_before_exit(group)

    def _group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        if tensor.is_cpu and self._cpu_group is not None:
            return self._cpu_group
        # The companion serves for CPU tensors, because each gloo group connects all ranks with all.
        return self.companion().group if tensor.is_cpu else self.group

    @override
    def companion(self) -> TorchCollective:
        # The companion carries CPU tensors only, whatever the backend of the group.
        if self._shared.companion is None:
            ranks, limit = distributed_c10d.get_process_group_ranks(self.group), self._shared.timeout
            make = partial(dist.new_group, ranks, timedelta(seconds=limit), "gloo", use_local_synchronization=True)
            with for_small_messages():
                self.finish(making := Aside(make, or_here=True))
            self._shared.companion = TorchCollective(making.result)
        return self._shared.companion

    def _make_companion(self) -> None:
        """Make the companion on all ranks, or raise an error on all.

        Raises:
            RuntimeError: If a rank cannot make it.
        """
        failure: Exception | None = None
        try:
            self.companion()
        except RuntimeError as error:  # there may be no free file for its connections
            failure = error
        # By the group itself, whose connections break if a rank ends, unless it has no backend for the CPU.
        made = self.all_gather(torch.tensor([failure is None], device="cpu")) if self._cpu_group is not None else []
        if failure is not None:
            raise failure
        if lacking := ", ".join(f"rank {rank}" for rank, has_made in enumerate(made) if not has_made):
            raise RuntimeError(
                f"{lacking} cannot make the gloo group that carries the messages of Join. Read the exception there: it"
                " may have no free file (ulimit -n). Restart all ranks when that is mended. [J811]"
            )

    @override
    def line(self, number: int = MESSAGES) -> Line:
        shared, over_group = self._shared, partial(super().line, number)
        if not shared.has_tried:
            shared.segment = shared_memory.opened(self)  # before the vote, for a note of a rank that fails here
            if not self.reduce_boolean_decision(shared.segment is not None):
                shared.segment = None
                self._make_companion()
            shared.has_tried = True
        if shared.segment is None:
            return over_group()
        if number not in shared.lanes:
            shared.lanes[number] = Lane(shared.segment, number, shared.timeout)
        return SharedMemoryLine(shared.lanes[number], over_group)

    @override
    def board(self) -> Board:
        shared = self._shared
        if shared.segment is not None:
            return SharedBoard(shared.segment)
        return StoreBoard(self.rank, self.world_size, store_of(self.group))

    @override
    def issued_counter(self) -> Callable[[], int]:
        return issued_counter_of(self.group)

    @override
    def limit(self, timeout: timedelta) -> timedelta | None:
        return limit(self.group, timeout)

    @property
    @override
    def keeps_store(self) -> bool:
        return 0 in distributed_c10d.get_process_group_ranks(self.group)  # under a launcher, an agent beside rank 0

    @override
    def abort(self, *, connections: bool = False) -> bool:
        groups = [each.group for each in (self, self._shared.companion) if each is not None and connections]
        return abort_on_devices(TIMEOUTS.note, [partial(close_connections, group) for group in groups])

    @override
    def hold(self) -> None:
        if self._shared.companion is not None:
            never_destroy(self._shared.companion.group)
        never_destroy_at_exit(self.group)

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        # This is called at every step, and dist.all_reduce would add 10 us of Python to the group's own method.
        group = self._group_for(tensor)
        if op == "sum":
            return group.allreduce([tensor])
        check_op(op)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]  # pyright: ignore[reportAttributeAccessIssue]
        return group.allreduce([tensor], options)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_source(source)
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        group = self._group_for(tensor)
        return group.broadcast([tensor], options)

    @override
    def all_gather_into(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)
        # Tensors are sent as bytes, because gloo does not support every dtype.
        group = self._group_for(tensor)
        return group.allgather([[as_bytes(output) for output in outputs]], [as_bytes(tensor.contiguous())])
