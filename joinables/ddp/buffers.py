"""The small bursts of a DDP module: :class:`BufferSync` and :class:`BucketRebuild`, on :class:`DDPBurst`.

The docstring of ``joinables.ddp`` shows their places in a step and the order of collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join, ProtocolError
from join.protocol.headers import SentHeader
from join.transfer import Exchange, broadcast_tree
from joinables._torch import reducer
from joinables.adapter import Announcing
from joinables.ddp.window import memory_of
from joinables.state import shapes_of


class DDPBurst(Announcing):
    """Base class of the bursts of a DDP module."""

    action: ClassVar[str]
    """The burst in words, for reports and errors."""
    breaks_in_time = True  # the process group has a time limit under ``timeout``

    def __init__(self, ddp: DistributedDataParallel) -> None:
        module = cast("torch.nn.Module", ddp.module)
        super().__init__(ddp, f"{self.action} of DistributedDataParallel({type(module).__name__})")
        self._ddp = ddp


class BufferSync(DDPBurst):
    """The broadcast of buffers (BatchNorm's statistics) in a synchronised forward.

    The rank that buffers come from is the lowest rank that was active in the forward which changed them last:

    - Before a synchronised forward, it is the leader of this module's last burst. If this rank is out of data now, it
      still broadcasts its buffers as its last forward left them. Each module remembers its own leader, since the module
      called before it may have found a new one in the same step.
    - Some buffers are synchronised after the forward that changes them (a comm hook may ask for it, and the forward of
      a ``LossGate`` follows that of the trained module). Then the header is awaited, and it is the leader of this step.
    - A forward under ``no_sync`` broadcasts nothing, but changes the buffers of the lowest rank with data. In a loop
      over ``Join.iterate`` all ranks know this rank. When it is a new one, they broadcast the buffers at the beginning
      of the step, and the new one continues with them. With a buffer comm hook of the user's, they do not, since the
      hook decides where buffers come from.

    A forward may change the shape of a buffer (a cache of masks that grows). An active rank whose buffers changed says
    so in the header, and waits for the header. If the buffers changed on all active ranks, all ranks copy the leader's
    buffers with their shapes. Otherwise the ranks that know of the change raise. In a loop over ``Join.iterate`` all
    ranks may change shapes alike while all have data, as with DDP alone. A rank raises if it changes them while another
    rank has a dummy.
    """

    action = "the buffer broadcast"
    tracks_leader = True
    flag_count = 1
    _changed: Sequence[str] = ()  # names and shapes of buffers whose shape has changed since the last synchronisation

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self.is_pending = False
        # A comm hook synchronises buffers after the forward, not before it.
        self._after_forward = reducer.syncs_buffers_after_forward(self._ddp)
        is_over = getattr(cast("object", self._ddp.module), "forward_is_over", False)
        # The forward of the step runs before the broadcast.
        self._is_changed_by_forward = self._after_forward or is_over
        self._last_header = SentHeader(leader=join.channel.headers.leader)
        self._places = reducer.buffer_places(self._ddp)
        known = memory_of(self._ddp).buffer_shapes  # a buffer may have been registered since
        self._shapes = {name: known.get(name, shape) for name, shape in self._shapes_now().items()}
        """The shapes at the last synchronisation."""
        self._changed = list[str]()
        # In a loop over join.iterate: whether all ranks had data in the last forward, and in the one that changed them.
        self._all_had_data = self._all_changed = True

    @override
    def detach(self) -> None:
        super().detach()
        memory_of(self._ddp).buffer_shapes = self._shapes
        del self._last_header  # it refers to this burst

    @override
    def flags(self, active: bool) -> Sequence[bool]:
        return (bool(self._changed),)

    def notice_new_shapes(self) -> None:
        """Find the buffers whose shape has changed; called before a forward announces anything, and in a hand-over."""
        shapes, changed = self._shapes_now(), list[str]()
        if shapes != self._shapes:
            changed = [f"{name} {list(shape)}" for name, shape in shapes.items() if shape != self._shapes[name]]
        if changed != self._changed:  # not for a change that an earlier forward of the window has shown already
            self._all_changed = self._all_had_data and (self._all_changed or not self._changed)
            self._changed = changed
        step = self._channel.place.step
        self._all_had_data = not step.in_loop or step.contributors == self._collective.world_size

    def _shapes_now(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (buffers, key) in self._places.items():
            buffer = buffers.get(key)
            shapes[name] = () if buffer is None else buffer.shape
        return shapes

    @override
    def main_hook(self) -> None:
        self.notice_new_shapes()
        self.fulfil(shadows=True)

    @override
    def fulfil(self, *, shadows: bool = False) -> None:
        """Broadcast the buffers; ``shadows`` says whether this rank shadows the burst."""
        self.is_pending = False
        channel = self._channel
        # After the forward that changes buffers, they come from a rank that ran it. Before the forward, the leader of
        # the step before still has the buffers that all ranks need to start with.
        source = channel.headers.find_leader() if self._is_changed_by_forward else self._last_header.leader
        if (shadows or self._changed) and not self._after_forward and self._all_have_new_shapes():
            self._replace(broadcast_tree(self._collective, reducer.buffers(self._ddp), source))
        else:
            reducer.sync_buffers(self._ddp, source)
        self._last_header = channel.headers.last

    @override
    def hand_over(self, leader: int) -> None:
        if leader == self._last_header.leader:
            return
        if not reducer.has_buffer_hook(self._ddp):
            self.notice_new_shapes()
            if self._changed:
                self._all_have_new_shapes()
            reducer.sync_buffers(self._ddp, self._last_header.leader)
        self._last_header = SentHeader(leader=leader)

    def _all_have_new_shapes(self) -> bool:
        """Return whether buffers changed their shape on all active ranks of a plain block, so that all ranks copy them.

        In a loop, accept the new shapes of this rank, and return ``False``.

        Raises:
            ProtocolError: If they changed on some of the active ranks, or in a loop while a rank had no data.
        """
        if self._channel.place.step.in_loop:
            if not self._all_changed:
                self._refuse_shapes("while another rank had no data")
            self._changed, self._shapes = [], self._shapes_now()
            return False
        header, index = self._channel.headers.read(), self._channel.roster.index[id(self)]
        (_, changed), active = header.counts[index], header.active
        if changed != active and (changed or self._changed):
            self._refuse_shapes(f"on {changed} of {active} ranks with data")
        return changed == active

    def _refuse_shapes(self, condition: str) -> None:
        names = ", ".join(self._changed) or "none on this rank"
        reason = (
            f"Buffers of {type(cast('object', self._ddp.module)).__name__} changed their shape {condition} ({names})."
            " Create them in their final size before the block. If they hold the same values on all ranks anyway, build"
            " DistributedDataParallel(..., broadcast_buffers=False). [J444]"
        )
        self._channel.guard.post_and_raise(ProtocolError(reason))

    def _replace(self, received: Mapping[str, torch.Tensor]) -> None:
        reducer.set_tensors(cast("torch.nn.Module", self._ddp.module), received)
        self._changed, self._shapes = [], self._shapes_now()

    def broadcast_when_due(self) -> None:
        """Broadcast the buffers, whose header was sent, or leave that to the end of the forward if a comm hook asks."""
        self.is_pending = True
        if not self._after_forward:
            self.fulfil()

    @override
    def exchange(self, source: int) -> Exchange:
        buffers = reducer.buffers(self._ddp)
        inbox = yield buffers
        received = inbox.fill(inbox.skeleton, buffers)
        yield ""
        self._replace(received)

    @override
    def equal_values(self) -> Mapping[str, Any]:
        return shapes_of(reducer.buffers(self._ddp))

    @override
    def own_tensors(self) -> Sequence[torch.Tensor]:
        return list(reducer.buffers(self._ddp).values())


class BucketRebuild(DDPBurst):
    """The single rebuild of DDP's buckets in the order in which gradients arrive: two broadcasts from rank 0."""

    action = "the bucket rebuild"
    interjects = True
    is_due = False
    """Whether DDP has yet to rebuild the buckets of this module, which it does once."""

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        if reducer.will_rebuild_buckets(self._ddp):
            join.channel.headers.make_ready()  # nothing is sent before the lists are checked
        self.main_hook()  # a backward before the block may have left the rebuild undone, on all ranks alike

    @override
    def main_hook(self) -> None:
        self.holds_followers = False
        reducer.rebuild_buckets(self._ddp)
        self.is_due = reducer.will_rebuild_buckets(self._ddp)

    def run(self) -> None:
        """Announce and run the rebuild; called after a backward on an active rank."""
        self._channel.announce(self)
        self.main_hook()
