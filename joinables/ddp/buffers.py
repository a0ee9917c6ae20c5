"""The small bursts of a DDP module: :class:`BufferSync` and :class:`BucketRebuild`, on :class:`DDPBurst`.

When each of them comes, and the order of collectives, is told in ``joinables.ddp``.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join.joinable import Block, BurstState
from join.transfer import broadcast_tensors
from joinables._torch import reducer
from joinables.adapter import Announcing


class DDPBurst(Announcing):
    """What the bursts of a DDP module have in common: the module they stand for."""

    what: ClassVar[str]

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp)
        self._ddp = ddp

    @property
    @override
    def join_name(self) -> str:
        module = cast("torch.nn.Module", self._ddp.module)
        return f"{self.what} of DistributedDataParallel({type(module).__name__})"


class BufferSync(DDPBurst):
    """The broadcast of buffers (BatchNorm's statistics) in a synchronised forward.

    They come from the rank that led in this module's last burst, the lowest that was active then. When it has run out
    of inputs, it still broadcasts what it had after its last forward; the rank that leads from then on was active in
    that step. Each module remembers it: one that is called after another finds that this one has a new leader. Not so
    where buffers are synchronised after the forward that changes them (``forward_is_over`` of the module says so):
    there the header is awaited, and the lowest rank that is active in the step itself leads.
    """

    what = "the buffer broadcast"
    tracks_leader = True

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp)
        self._after_forward = False  # a comm hook synchronises buffers after the forward, not before it
        self._are_new = False  # the forward has changed them by the time they are broadcast

    @override
    def attach(self, join: Block) -> None:
        super().attach(join)
        self._after_forward = reducer.syncs_buffers_after_forward(self._ddp)
        self._are_new = self._after_forward or getattr(cast("object", self._ddp.module), "forward_is_over", False)
        self._lead_by(join.channel.leader)

    @override
    def main_hook(self) -> None:
        self.state = BurstState.RUNNING
        # What this step's forward changed comes from a rank that took part in it; before the forward, the leader of the
        # step before still has what all have to start from.
        reducer.sync_buffers(self._ddp, self._channel.lead() if self._are_new else self._leader)
        self._channel.when_led(self._lead_by)
        self.state = BurstState.IDLE

    def _lead_by(self, leader: int) -> None:
        self._leader = leader

    @override
    def fulfil(self) -> None:
        self.main_hook()

    def announced(self) -> None:
        """Broadcast the buffers, whose header was sent; after the forward, if a comm hook asks for that."""
        self.state = BurstState.PENDING
        if not self._after_forward:
            self.main_hook()

    def forward_ended(self) -> None:
        """Broadcast buffers that had to wait for the end of the forward."""
        if self.state is BurstState.PENDING:
            self.main_hook()

    @override
    def synchronise(self, source: int) -> None:
        self.synchronise_own(source)

    @override
    def synchronise_own(self, source: int) -> None:
        broadcast_tensors(self._collective, reducer.buffers(self._ddp), source)


class BucketRebuild(DDPBurst):
    """The one rebuild of DDP's buckets in the order in which gradients arrive: two broadcasts from rank 0."""

    what = "the bucket rebuild"
    interjects = True
    due = False
    """On a joined rank: whether a backward has been shadowed after which the active ranks announce a rebuild."""
    pending = False
    """Whether DDP has still to rebuild this module's buckets, which it does once."""

    @override
    def attach(self, join: Block) -> None:
        super().attach(join)
        self.main_hook()  # pending from a backward before the block; the same on all ranks

    @override
    def main_hook(self) -> None:
        self.due = False
        self.state = BurstState.RUNNING
        reducer.rebuild_buckets(self._ddp)
        self.state = BurstState.IDLE
        self.pending = reducer.will_rebuild_buckets(self._ddp)

    def expect(self) -> None:
        """Expect a rebuild, if there is to be one; called when a backward was shadowed."""
        self.due = self.pending

    def run(self) -> None:
        """Announce and do the rebuild; called after a backward on an active rank."""
        self._channel.announce(self)
        self.main_hook()
