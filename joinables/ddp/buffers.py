"""The small bursts of a DDP module: :class:`BufferSync` and :class:`BucketRebuild`, on :class:`DDPBurst`.

When each of them comes, and the order of collectives, is told in ``joinables.ddp``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join, ProtocolError
from join.transfer import Exchange, broadcast_tree
from joinables._torch import reducer
from joinables.adapter import Announcing
from joinables.state import shapes_of

# Of the buffers at their last synchronisation, the same on all ranks: one rank may evaluate between blocks.
_shapes: weakref.WeakKeyDictionary[DistributedDataParallel, dict[str, tuple[int, ...]]] = weakref.WeakKeyDictionary()


class DDPBurst(Announcing):
    """What the bursts of a DDP module have in common: the module they stand for."""

    what: ClassVar[str]
    breaks_in_time = True  # by the time limit of the group

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

    A forward may make a buffer longer (a cache of masks), and then an active rank waits for the header, in which those
    say so whose buffers have changed: if all that are active, all ranks take over the leader's buffers with their
    shapes; else those that know of it raise. In a loop over ``Join.iterate`` all ranks may change them alike while all
    have data, as with DDP alone; a rank that changes them while another one has a dummy raises.
    """

    what = "the buffer broadcast"
    tracks_leader = True
    flag_count = 1

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp)
        self._changed: list[str] = []  # buffers of another shape than at the last synchronisation
        # In a loop over join.iterate: whether all ranks had data in the last forward, and in the one that changed them.
        self._all_had_data = self._all_changed = True
        self._after_forward = False  # a comm hook synchronises buffers after the forward, not before it
        self._are_new = False  # the forward has changed them by the time they are broadcast

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self._after_forward = reducer.syncs_buffers_after_forward(self._ddp)
        self._are_new = self._after_forward or getattr(cast("object", self._ddp.module), "forward_is_over", False)
        self._source, self._world_size = join.channel.headers.leader, join.collective.world_size
        self._places = reducer.buffer_places(self._ddp)
        known = _shapes.get(self._ddp, {})  # a buffer may have been registered since
        self._changed, self._shapes = [], {name: known.get(name, shape) for name, shape in self._shapes_now().items()}

    @override
    def detach(self) -> None:
        super().detach()
        _shapes[self._ddp] = self._shapes

    @override
    def flags(self, active: bool) -> Sequence[bool]:
        return (bool(self._changed),)

    def look(self) -> None:
        """Look for buffers of another shape; called before a forward announces anything."""
        now = self._shapes_now()
        if now != self._shapes:
            self._changed = [f"{name} {list(shape)}" for name, shape in now.items() if shape != self._shapes[name]]
            self._all_changed = self._all_had_data
        self._all_had_data = self._channel.step.contributors in (None, self._world_size)

    def _shapes_now(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (buffers, key) in self._places.items():
            buffer = buffers.get(key)
            shapes[name] = () if buffer is None else buffer.shape
        return shapes

    @override
    def main_hook(self) -> None:
        self.look()
        self._run(shadows=True)

    def _run(self, *, shadows: bool = False) -> None:
        self.is_pending = False
        if (shadows or self._changed) and not self._after_forward and self._takes_over_shapes():
            self._take_over(self._source)
        else:
            # What this step's forward changed comes from a rank that took part in it; before the forward, the leader of
            # the step before still has what all have to start from.
            reducer.sync_buffers(self._ddp, self._channel.find_leader() if self._are_new else self._source)
        self._channel.headers.when_leader_is_known(self.set_source)

    def set_source(self, rank: int) -> None:
        """Let the buffers of this rank be broadcast next."""
        self._source = rank

    def _takes_over_shapes(self) -> bool:
        """Whether all active ranks have changed the shapes of buffers, so that all ranks have to take them over."""
        if self._channel.lockstep is not None:
            if not self._all_changed:
                self._protest("but another rank had no data")
            self._changed, self._shapes = [], self._shapes_now()
            return False
        (changed,), active = self._channel.headers.flags_beside(self)
        if changed != active and (changed or self._changed):
            self._protest(f"so they did on {changed} of {active} ranks with data")
        return changed == active

    def _protest(self, who: str) -> None:
        names = ", ".join(self._changed) or "of some ranks"
        why = (
            f"the buffers {names} of {type(cast('object', self._ddp.module)).__name__} changed their shape; {who}. Make"
            " them as long as they will be needed before the block, or build DistributedDataParallel(...,"
            " broadcast_buffers=False) if they hold the same on all ranks anyway [J444]"
        )
        self._channel.guard.raise_alone(ProtocolError(why))

    def _take_over(self, source: int) -> None:
        """Take over the buffers of rank ``source``, with their shapes."""
        received = broadcast_tree(self._collective, reducer.buffers(self._ddp), source)
        self._have_taken_over(received)

    def _have_taken_over(self, received: Mapping[str, torch.Tensor]) -> None:
        reducer.set_buffers(cast("torch.nn.Module", self._ddp.module), received, reshape=True)
        self._changed, self._shapes = [], self._shapes_now()

    @override
    def fulfil(self) -> None:
        self._run()

    def announced(self) -> None:
        """Broadcast the buffers, whose header was sent; after the forward, if a comm hook asks for that."""
        self.is_pending = True
        if not self._after_forward:
            self._run()

    def forward_ended(self) -> None:
        """Broadcast buffers that had to wait for the end of the forward."""
        if self.is_pending:
            self._run()

    @override
    def exchange(self, source: int) -> Exchange:
        buffers = reducer.buffers(self._ddp)
        inbox = yield buffers
        received = inbox.fill(inbox.skeleton, buffers)
        yield ""
        self._have_taken_over(received)

    @override
    def equal_values(self) -> Mapping[str, Any]:
        return shapes_of(reducer.buffers(self._ddp))

    @override
    def own_tensors(self) -> Sequence[torch.Tensor]:
        return list(reducer.buffers(self._ddp).values())


class BucketRebuild(DDPBurst):
    """The one rebuild of DDP's buckets in the order in which gradients arrive: two broadcasts from rank 0."""

    what = "the bucket rebuild"
    interjects = True
    is_due = False
    """Whether DDP has still to rebuild this module's buckets, which it does once."""

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        if reducer.will_rebuild_buckets(self._ddp):
            join.channel.headers.make_ready()  # nothing is sent before all are known to list the same
        self.main_hook()  # pending from a backward before the block; the same on all ranks

    @override
    def main_hook(self) -> None:
        self.holds_followers = False
        reducer.rebuild_buckets(self._ddp)
        self.is_due = reducer.will_rebuild_buckets(self._ddp)

    def run(self) -> None:
        """Announce and do the rebuild; called after a backward on an active rank."""
        self._channel.announce(self)
        self.main_hook()
