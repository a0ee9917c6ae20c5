"""A :class:`Collective` over a ``torch.distributed.ProcessGroup``.

CPU tensors need a CPU backend. A group without one (NCCL alone) gets a gloo group of the same ranks beside it, made
once per group and connected where it is used: so nothing of this package waits for a CUDA stream, and no host
synchronisation enters an active rank's step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
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
    issued_on,
    let_go_before_exit,
    limit,
    never_destroy,
    never_destroy_at_exit,
    store_of,
    timeout_of,
)
from join.collectives.base import HEADERS, Line, ReduceOp, Work, as_bytes, check_op
from join.collectives.board import Board
from join.collectives.messages import Mesh, MessageLine
from join.collectives.shared_memory import Lane, Segment, SharedBoard, SharedMemoryLine
from join.collectives.store import StoreCollective, fresh_store
from join.collectives.timeouts import timeouts

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclass
class _Shared:
    """What all collectives of one group have in common, over time."""

    timeout: float
    """How many seconds an operation may take, by the group's own limit."""
    blocks: int = 0
    companion: TorchCollective | None = None
    has_tried: bool = False
    """Whether the ranks have tried to connect through shared memory, or else by messages."""
    segment: Segment | None = None
    """The shared memory that connects the ranks; ``None`` where not all can reach it."""
    mesh: Mesh | None = None
    """The connections between the ranks, where these share no memory; ``None`` if not all can be reached."""
    agreed: dict[int, Any] = field(default_factory=dict[int, Any])
    """What ranks have agreed on in earlier blocks."""
    lanes: dict[int, Lane] = field(default_factory=dict[int, Lane])
    """The lanes of the shared memory that are in use, by the number of their line."""


_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()

of_group: WeakValueDictionary[dist.ProcessGroup, TorchCollective] = WeakValueDictionary()
"""The collective that stands for a group. A group must not outlive its user's last reference to it, so this is weak."""


class TorchCollective(StoreCollective):
    """The ranks of a process group.

    Args:
        group: a group that exists; :func:`join.collectives.collective_of` finds its collective. It is set up from the
            start and belongs to whoever made it: ``teardown`` leaves it alone. Without, ``setup`` makes the default
            group, or takes it as it is where there is one.
        backend: for the default group, as for ``torch.distributed.init_process_group``.
        store: for the default group; without, the environment says where the ranks meet (``MASTER_ADDR`` and
            ``MASTER_PORT``).
        timeout: for the default group.

    Raises:
        ValueError: if a group is given and how to make one is said, too.
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
                "backend, store and timeout are for the default group that setup() makes: leave out group [J046]"
            )
        self._backend, self._given_store, self._timeout = backend, store, timeout
        self._group: dist.ProcessGroup | None = None
        self._last_group: dist.ProcessGroup | None = None
        self._borrowed, self._made = group is not None, False
        if group is not None:
            self._connect(group, group.rank(), group.size())

    def _connect(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self._take_place(rank, world_size, group.rank(), group.size())
        self._group = group
        self._shared = _shared.setdefault(group, _Shared(timeout_of(group).total_seconds()))
        let_go_before_exit(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: if the collective is not set up.
        """
        if self._group is None:
            raise RuntimeError(
                "TorchCollective is not set up: call setup(rank, world_size) first, or give it a group [J047]"
            )
        return self._group

    @override
    def _check_is_set_up(self) -> None:
        _ = self.group

    @override
    def setup(self, rank: int, world_size: int) -> None:
        self._check_setup(rank, world_size)
        if not dist.is_initialized():
            store = self._given_store
            if store is None:
                timeout = {} if self._timeout is None else {"timeout": self._timeout}
                store, _, _ = next(rendezvous("env://", rank, world_size, **timeout))
            # What an earlier setup left there must not be taken for this one's. torchrun's store outlives them all.
            store = fresh_store(store, rank, world_size)
            dist.init_process_group(self._backend, store=store, rank=rank, world_size=world_size, timeout=self._timeout)
            self._made = True
        default = dist.group.WORLD
        assert default is not None
        if self._backend is not None and not self._made:
            wanted = str(BackendConfig(cast("dist.Backend", dist.Backend(self._backend))))
            there = dist.get_backend_config(default)
            if wanted != there:
                raise RuntimeError(
                    f"backend={self._backend!r} contradicts the default group, whose backend is {there}; leave backend"
                    " out [J048]"
                )
        self._connect(default, rank, world_size)

    @override
    def teardown(self) -> None:
        if self._borrowed or self._group is None:
            return
        if of_group.get(self._group) is self:
            del of_group[self._group]
        # Kept until the next teardown: a thread of the group's own may still be clearing a comm hook's callback, and
        # must not be the one that frees the group.
        self._last_group, self._group, self.is_set_up = self._group, None, False
        vars(self).pop("_cpu_group", None)  # the cached property
        if self._made:
            self._made = False
            dist.destroy_process_group()

    @cached_property
    def _cpu_group(self) -> dist.ProcessGroup:
        # Without a CPU backend no one else sends CPU tensors there, and each gloo group connects all ranks with all.
        return self.group if "cpu:" in dist.get_backend_config(self.group) else self.companion().group

    @override
    def companion(self) -> TorchCollective:
        # For CPU tensors alone, whatever the group is for.
        if self._shared.companion is None:
            ranks, limit = distributed_c10d.get_process_group_ranks(self.group), self._shared.timeout
            with for_small_messages():
                group: Any = dist.new_group(ranks, timedelta(seconds=limit), "gloo", use_local_synchronization=True)
            self._shared.companion = TorchCollective(group)
        return self._shared.companion

    @override
    def line(self, number: int = HEADERS) -> Line:
        shared = self._shared
        if not shared.has_tried:
            shared.has_tried, shared.segment = True, shared_memory.connect(self)
            if shared.segment is None and (mesh := messages.connect(self, shared.timeout)) is not None:
                shared.mesh = mesh
                weakref.finalize(self.group, mesh.close)
        over_group = partial(super().line, number)
        if shared.segment is None:
            return over_group() if shared.mesh is None else MessageLine(shared.mesh, number)
        if number not in shared.lanes:
            shared.lanes[number] = Lane(shared.segment, number, shared.timeout)
        return SharedMemoryLine(shared.lanes[number], over_group)

    @override
    def board(self) -> Board:
        segment = self._shared.segment
        return super().board() if segment is None else SharedBoard(segment)

    @override
    def issued(self) -> int:
        return issued_on(self.group)

    @override
    def limit(self, timeout: timedelta) -> timedelta | None:
        return limit(self.group, timeout)

    @property
    @override
    def keeps_store(self) -> bool:
        return 0 in distributed_c10d.get_process_group_ranks(self.group)  # under a launcher, an agent beside rank 0

    @override
    def abort(self, *, connections: bool = False) -> bool:
        for each in (self, self._shared.companion):
            if each is not None and connections:
                close_connections(each.group)
        return abort_on_devices(timeouts().note)

    @override
    def hold(self) -> None:
        if self._shared.companion is not None:
            never_destroy(self._shared.companion.group)
        never_destroy_at_exit(self.group)

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        # The group's own method: dist.all_reduce adds 10 us of Python to a call that is made at every step.
        group = self._cpu_group if tensor.is_cpu else self.group
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
        group = self._cpu_group if tensor.is_cpu else self.group
        return group.broadcast([tensor], options)

    @override
    def all_gather_into(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)
        # As bytes, since gloo does not know every dtype and copying needs none.
        group = self._cpu_group if tensor.is_cpu else self.group
        return group.allgather([[as_bytes(output) for output in outputs]], [as_bytes(tensor.contiguous())])

    @property
    @override
    def agreed(self) -> dict[int, Any]:
        return self._shared.agreed

    @override
    def next_block(self) -> int:
        self._shared.blocks += 1
        return self._shared.blocks

    @property
    @override
    def _store(self) -> dist.Store:
        return store_of(self.group)
