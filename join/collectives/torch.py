""":class:`Collective` over a ``torch.distributed.ProcessGroup``: :class:`TorchCollective`.

CPU tensors need a CPU backend. If a group has none (NCCL alone), a gloo group of the same ranks is made for it, once
per group. So nothing in this package waits for a CUDA stream, and an active rank's step has no additional host
synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from typing_extensions import override

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
from join.collectives.base import Collective, Kept, ReduceOp, as_bytes, check_op
from join.collectives.board import Board, StoreBoard
from join.collectives.line import Work
from join.collectives.timeouts import TIMEOUTS

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


_kept: WeakKeyDictionary[dist.ProcessGroup, Kept] = WeakKeyDictionary()
"""Facts that all collectives of one process group have in common, one after the other."""

of_group: WeakValueDictionary[dist.ProcessGroup, TorchCollective] = WeakValueDictionary()
"""Collective of each process group. A group must not outlive its user's last reference to it, so the references are
weak.
"""


class TorchCollective(Collective):
    """Ranks of a process group, which belongs to its creator. So they are connected before ``setup`` already.

    Args:
        group: The process group. :func:`join.collectives.collective_of` returns its collective.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world_size = group, group.rank(), group.size()
        self._cpu_group = group if has_cpu_backend(group) else None
        self.kept = _kept.setdefault(group, Kept(timeout_of(group).total_seconds()))
        let_go_before_exit(group)

    def _group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        if tensor.is_cpu and self._cpu_group is not None:
            return self._cpu_group
        # The companion serves for CPU tensors, because each gloo group connects all ranks with all.
        return self.companion().group if tensor.is_cpu else self.group

    @override
    def teardown(self) -> None:
        """Do nothing, since the group and its connections belong to its creator."""

    @override
    def companion(self) -> TorchCollective:
        # The companion carries CPU tensors only, whatever the backend of the group.
        if self.kept.companion is None:
            ranks, limit = distributed_c10d.get_process_group_ranks(self.group), self.kept.timeout
            make = partial(dist.new_group, ranks, timedelta(seconds=limit), "gloo", use_local_synchronization=True)
            with for_small_messages():
                self.finish(making := Aside(make, or_here=True))
            self.kept.companion = TorchCollective(making.result)
        return self.kept.companion

    @override
    def connect(self) -> None:
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
        made = self.all_gather_object(failure is None, plain=True) if self._cpu_group is not None else []
        if failure is not None:
            raise failure
        if lacking := ", ".join(f"rank {rank}" for rank, has_made in enumerate(made) if not has_made):
            raise RuntimeError(
                f"{lacking} cannot make the gloo group that carries the messages of Join. Read the exception there: it"
                " may have no free file (ulimit -n). Restart all ranks when that is mended. [J811]"
            )

    @override
    def board(self) -> Board:
        if self.kept.segment is not None:
            return super().board()
        # Under a launcher, an agent beside rank 0 keeps the store.
        of_ranks = 0 in distributed_c10d.get_process_group_ranks(self.group)
        return StoreBoard(self.rank, self.world_size, store_of(self.group), of_ranks=of_ranks)

    @override
    def issued_counter(self) -> Callable[[], int]:
        return issued_counter_of(self.group)

    @override
    def limit(self, timeout: timedelta) -> timedelta | None:
        return limit(self.group, timeout)

    @override
    def abort(self, *, connections: bool = False) -> bool:
        groups = [each.group for each in (self, self.kept.companion) if each is not None and connections]
        return abort_on_devices(TIMEOUTS.note, [partial(close_connections, group) for group in groups])

    @override
    def hold(self) -> None:
        if self.kept.companion is not None:
            never_destroy(self.kept.companion.group)
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
    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)
        # Tensors are sent as bytes, because gloo does not support every dtype.
        group = self._group_for(tensor)
        return group.allgather([[as_bytes(output) for output in outputs]], [as_bytes(tensor.contiguous())])
