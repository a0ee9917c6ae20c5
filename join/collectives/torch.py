""":class:`Collective` over a ``torch.distributed.ProcessGroup``: :class:`TorchCollective`.

CPU tensors need a CPU backend. If a group has none (NCCL alone), a gloo group of the same ranks is made for it, once
per group. So nothing in this package waits for a CUDA stream, and an active rank's step has no additional host
synchronisation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import BackendConfig
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]
from typing_extensions import override

from join.collectives import messages, shared_memory
from join.collectives._torch_private import (
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
from join.collectives.base import HEADERS, Line, ReduceOp, Work, as_bytes, check_op
from join.collectives.board import Board, OwnStore, StoreBoard
from join.collectives.messages import Mesh, MessageLine
from join.collectives.shared_memory import Lane, Segment, SharedBoard, SharedMemoryLine
from join.collectives.store import StoreCollective, fresh_store, host_of
from join.collectives.timeouts import TIMEOUTS

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclass
class _Shared:
    """State that all collectives of one process group have in common, one after the other."""

    timeout: float
    """Seconds that an operation may take, by the group's own limit."""
    blocks: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of the blocks to come."""
    companion: TorchCollective | None = None
    has_tried: bool = False
    """Whether the ranks have tried to connect through shared memory and, failing that, by messages."""
    segment: Segment | None = None
    """Shared memory that connects the ranks; ``None`` if not all ranks can reach it."""
    mesh: Mesh | None = None
    """Connections between ranks that share no memory; ``None`` if not all ranks can be reached."""
    own_store: OwnStore | None = None
    """Connection to the store that the boards of all blocks use."""
    agreed: dict[int, Any] = field(default_factory=dict[int, Any])
    """Results on which the ranks agreed in earlier blocks."""
    lanes: dict[int, Lane] = field(default_factory=dict[int, Lane])
    """Lanes of the shared memory that are in use, by the number of their line."""


_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()

of_group: WeakValueDictionary[dist.ProcessGroup, TorchCollective] = WeakValueDictionary()
"""Collective of each process group. A group must not outlive its user's last reference to it, so the references are
weak.
"""


class TorchCollective(StoreCollective):
    """Ranks of a process group.

    Args:
        group: An existing process group; :func:`join.collectives.collective_of` returns its collective. The collective
            is then set up from the start. The group belongs to its creator, and ``teardown`` does not destroy it. By
            default, ``setup`` creates the default group, or uses the existing one.
        backend: The backend of the default group, as for ``torch.distributed.init_process_group``.
        store: The store of the default group. By default, the environment variables ``MASTER_ADDR`` and ``MASTER_PORT``
            say where the ranks meet.
        timeout: The time limit of the default group.

    Raises:
        ValueError: If ``group`` is passed together with another argument.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        backend: str | None = None,
        store: dist.Store | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        if group is not None and not (backend is store is timeout is None):
            raise ValueError(
                "TorchCollective was called with group and with backend, store or timeout, which are for the default"
                " group that setup() creates. Remove group, or remove the other arguments. [J046]"
            )
        self._backend, self._given_store, self._timeout = backend, store, timeout
        self._group: dist.ProcessGroup | None = None
        self._last_group: dist.ProcessGroup | None = None
        self._cpu_group: dist.ProcessGroup | None = None
        self._borrowed, self._made = group is not None, False
        if group is not None:
            self._connect(group, group.rank(), group.size())

    def _connect(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self._take_place(rank, world_size, group.rank(), group.size())
        self._group = group
        self._cpu_group = group if has_cpu_backend(group) else None
        self._shared = _shared.setdefault(group, _Shared(timeout_of(group).total_seconds()))
        self._agreed, self._blocks = self._shared.agreed, self._shared.blocks
        let_go_before_exit(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: If the collective is not set up.
        """
        if self._group is None:
            self._check_is_set_up()
        assert self._group is not None
        return self._group

    @override
    def setup(self, rank: int, world_size: int) -> None:
        self._check_setup(rank, world_size)
        if not dist.is_initialized():
            store = self._given_store
            if store is None:
                timeout = {} if self._timeout is None else {"timeout": self._timeout}
                store, _, _ = next(rendezvous("env://", rank, world_size, **timeout))
            # The store of torchrun outlives each setup, and the keys of an earlier setup must not count for this one.
            store = fresh_store(store, rank, world_size)
            dist.init_process_group(self._backend, store=store, rank=rank, world_size=world_size, timeout=self._timeout)
            self._made = True
        default = dist.group.WORLD
        assert default is not None
        if self._backend is not None and not self._made:
            existing = dist.get_backend_config(default)
            if str(BackendConfig(cast("dist.Backend", dist.Backend(self._backend)))) != existing:
                raise RuntimeError(
                    f"backend={self._backend!r} contradicts the default group, whose backend is {existing}. Remove"
                    " backend from TorchCollective(...). [J048]"
                )
        self._connect(default, rank, world_size)

    @override
    def teardown(self) -> None:
        if self._borrowed or self._group is None:
            return
        if of_group.get(self._group) is self:
            del of_group[self._group]
        # The group is kept until the next teardown. One of its threads may still be clearing the callback of a comm
        # hook, and that thread must not free the group.
        self._last_group, self.is_set_up = self._group, False
        self._group = self._cpu_group = None
        if self._made:
            self._made = False
            dist.destroy_process_group()

    def _group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        if tensor.is_cpu and self._cpu_group is not None:
            return self._cpu_group
        group = self.group  # checks that the collective is set up
        # The companion serves for CPU tensors, because each gloo group connects all ranks with all.
        return self.companion().group if tensor.is_cpu else group

    @override
    def companion(self) -> TorchCollective:
        # The companion carries CPU tensors only, whatever the backend of the group.
        if self._shared.companion is None:
            ranks, limit = distributed_c10d.get_process_group_ranks(self.group), self._shared.timeout
            with for_small_messages():
                group: Any = dist.new_group(ranks, timedelta(seconds=limit), "gloo", use_local_synchronization=True)
            self._shared.companion = TorchCollective(group)
        return self._shared.companion

    @override
    def connect(self, limit: float | None = None) -> None:
        shared = self._shared
        if not shared.has_tried:
            shared.segment = shared_memory.connect(self)
            if shared.segment is None:
                shared.mesh = messages.connect(self, shared.timeout, limit, host_of(self._store))
                if shared.mesh is not None:
                    weakref.finalize(self.group, shared.mesh.close)
            shared.has_tried = True

    @override
    def line(self, number: int = HEADERS) -> Line:
        self.connect()
        shared = self._shared
        over_group = partial(super().line, number)
        if shared.segment is None:
            return over_group() if shared.mesh is None else MessageLine(shared.mesh, number)
        if number not in shared.lanes:
            shared.lanes[number] = Lane(shared.segment, number, shared.timeout)
        return SharedMemoryLine(shared.lanes[number], over_group)

    @override
    def board(self) -> Board:
        shared = self._shared
        if shared.segment is not None:
            return SharedBoard(shared.segment)
        if shared.own_store is None:
            shared.own_store = OwnStore(self._store)
        return StoreBoard(self.rank, self.world_size, shared.own_store)

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
        for collective in (self, self._shared.companion):
            if collective is not None and connections:
                close_connections(collective.group)
        return abort_on_devices(TIMEOUTS.note)

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

    @property
    @override
    def _store(self) -> dist.Store:
        return store_of(self.group)
