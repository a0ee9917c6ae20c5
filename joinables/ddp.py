"""Adapters for ``DistributedDataParallel``: :class:`BufferSync`, :class:`GradientSync`, :class:`BucketRebuild`.

A stock DDP module stands for these three bursts. Each issues the collectives that DDP issues, at the place where DDP
issues them, but for two: buffers come from the lowest active rank and not from rank 0, and buckets are rebuilt at the
end of the first backward and not in the forward after it, where a joined rank never comes. One training step::

    active rank                                        joined rank
    -----------                                        -----------
    forward   header                                   header
              broadcast of buffers (if it has any)     broadcast of buffers
    backward  number of contributors (see Scaling)     number of contributors
              the first static one: arrivals (max)     arrivals (max)
              all-reduce of each bucket                all-reduce of each bucket (the reducer's own backward, empty)
              all-reduce of the used map, if asked     all-reduce of the used map
              the first: header, bucket rebuild        header, bucket rebuild

The header is sent in the forward and hides behind it. Not so with several DDP modules in the blocks of a group, where
forward order is not backward order, when the parameters may still hold the last result in the forward, and where the
number of contributors is wanted and there are no buffers: then the header is sent when the backward begins, and
buffers, if any, have one of their own in the forward.

``no_sync`` forwards and forwards without grad communicate nothing. A forward that finds a header open (the backward was
skipped, or two forwards go before one backward) communicates nothing either.

*Scaling.* DDP divides by the world size. With ``divide_by_initial_world_size=False`` and n contributors, the reduced
gradients are multiplied by ``world_size / n`` at the end of the backward: for every comm hook, chain and accumulation
alike, and not at all while n is the world size. The header counts the contributors if it is sent when the backward
begins. A header sent in the forward cannot know whether a backward will come, so then a number of its own is summed
next to the buckets. Neither is awaited before the end of the backward.

*Joined ranks.* The reduced gradient is written into ``param.grad`` so that sharded optimizers step on it. What a rank
had accumulated under ``no_sync`` when it ran out goes into the first burst it shadows. If active ranks keep their
gradients over several backwards, the joined rank contributes what it received, as it would have kept it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Burst, Join, Joinable, JoinHook
from join.collectives import Work
from join.transfer import broadcast_tensors, broadcast_tree
from joinables import _torch_reducer as reducer
from joinables.tensors import tensors_with_grad

# What a static graph's first backward taught this rank about a module; kept over blocks, never on the module itself.
_arrivals: weakref.WeakKeyDictionary[DistributedDataParallel, list[int]] = weakref.WeakKeyDictionary()


def joinables_of_ddp(ddp: DistributedDataParallel) -> list[Joinable]:
    """The bursts a DDP module stands for, in their order.

    Raises:
        ValueError: if the module contains SyncBatchNorm, whose collectives are not DDP's and would not be shadowed.
    """
    modules = cast("Iterator[tuple[str, torch.nn.Module]]", ddp.module.named_modules())
    for name, module in modules:
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"the DDP module contains SyncBatchNorm ({name!r}), whose forward communicates and cannot be shadowed"
                " yet; use BatchNorm, or feed all ranks evenly and pass enable=False"
            )
    rebuild = BucketRebuild(ddp)
    if not reducer.broadcasts_buffers(ddp):
        return [rebuild, GradientSync(ddp, None, rebuild)]
    buffers = BufferSync(ddp)
    return [rebuild, buffers, GradientSync(ddp, buffers, rebuild)]  # what follows the module follows its backward


class _DDPBurst(Burst, JoinHook):
    """What the three have in common: the module they stand for."""

    join_keywords: ClassVar[frozenset[str] | None] = frozenset()
    what: ClassVar[str]

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__()
        self._ddp = ddp

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @property
    def join_device(self) -> torch.device:
        return cast("torch.device", self._ddp.join_device)

    @property
    def join_process_group(self) -> Any:
        return cast("Any", self._ddp.join_process_group)

    @property
    def join_name(self) -> str:
        module = cast("torch.nn.Module", self._ddp.module)
        return f"{self.what} of DistributedDataParallel({type(module).__name__})"

    @property
    def join_target(self) -> Any:
        return self._ddp

    def attach(self, join: Join) -> None:
        self._channel, self._collective = join.channel, join.collective


class BufferSync(_DDPBurst):
    """The broadcast of buffers (BatchNorm's statistics) in a synchronised forward.

    They come from the leader, the lowest active rank. When it has run out of inputs, it still broadcasts what it had
    after its last forward; the rank that leads from then on was active in that step.
    """

    what = "the buffer broadcast"
    tracks_leader = True

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp)
        self.after_forward = False

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self.after_forward = reducer.syncs_buffers_after_forward(self._ddp)

    @override
    def main_hook(self) -> None:
        reducer.sync_buffers(self._ddp, self._channel.leader)

    @override
    def synchronise(self, source: int) -> None:
        broadcast_tensors(self._collective, list(reducer.named_buffers(self._ddp).values()), source)


class BucketRebuild(_DDPBurst):
    """The one rebuild of DDP's buckets in the order in which gradients arrive: two broadcasts from rank 0."""

    what = "the bucket rebuild"
    interjects = True

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self.main_hook()  # pending from a backward before the block; the same on all ranks

    @override
    def main_hook(self) -> None:
        self.due = False
        reducer.rebuild_buckets(self._ddp)

    def expect(self) -> None:
        """Note that a backward has been shadowed after which the active ranks will announce a rebuild."""
        self.due = reducer.will_rebuild_buckets(self._ddp)

    def run_if_due(self) -> None:
        """Announce and do the rebuild, if this backward was the one that allows it."""
        if reducer.will_rebuild_buckets(self._ddp):
            self._channel.announce(self)
            self.main_hook()


class GradientSync(_DDPBurst):
    """The gradient all-reduce of a synchronised backward.

    Args:
        ddp: the module.
        buffers: its buffer synchronisation, which shares this burst's header where it can; ``None`` if it has none.
        rebuild: its bucket rebuild, which comes after the first backward.
    """

    what = "the backward"
    runs_ahead = True
    join_keywords: ClassVar[frozenset[str] | None] = frozenset({"divide_by_initial_world_size"})
    # [with buffers, active ranks still hold the last result, ranks that contribute]
    payload_width = 3

    def __init__(self, ddp: DistributedDataParallel, buffers: BufferSync | None, rebuild: BucketRebuild) -> None:
        super().__init__(ddp)
        self._buffers, self._rebuild = buffers, rebuild
        self._parameters = reducer.reduced_parameters(ddp)
        self._divide_by_initial_world_size = True
        self._credit = False  # announced, and the backward has not begun
        self._buffers_due = False  # announced with this burst, to be synchronised after the forward
        self._with_buffers = False  # this burst's header covers the buffers too
        self._armed = False  # the reducer will reduce in the next backward
        self._in_backward = False
        self._unsynced = False  # gradients were accumulated since the last reduction
        self._may_hold_result = True  # grad may still hold the last reduction's result
        self._contributors: tuple[torch.Tensor, Work] | None = None  # their sum, under way
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._leaf_handles: list[Any] = []

    @override
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        self._divide_by_initial_world_size = divide_by_initial_world_size
        return self

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        ddp = self._ddp
        if ddp.static_graph and not reducer.first_static_backward(ddp) and ddp not in _arrivals:
            raise ValueError(
                "the static_graph module has run its first backward outside a Join block, so a rank without data cannot"
                " know its graph; enter the first block before the first backward"
            )
        self._param_sync = ddp.require_forward_param_sync
        before, after = cast("Any", _Hook(self._before_forward)), cast("Any", _Hook(self._after_forward))
        self._handles = [ddp.register_forward_pre_hook(before, prepend=True), ddp.register_forward_hook(after)]

    @override
    def detach(self) -> None:
        for handle in (*self._handles, *self._leaf_handles):
            handle.remove()
        self._ddp.require_forward_param_sync = self._param_sync
        self._credit = self._armed = self._in_backward = False

    def synchronise(self, source: int) -> None:
        """Parameters come from the last joiner; so do gradients, but for what is still to be reduced."""
        broadcast_tensors(self._collective, list(reducer.named_parameters(self._ddp).values()), source)
        mine = None if self._unsynced else [parameter.grad for parameter in self._parameters]
        received = broadcast_tree(self._collective, mine, source)
        if self._collective.rank == source or self._unsynced:
            return
        for parameter, gradient in zip(self._parameters, received or [None] * len(self._parameters), strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.copy_(gradient)  # it may be a view of a bucket
            else:
                parameter.grad = gradient

    # -- the header ---------------------------------------------------------------------------------------------------

    @override
    def payload(self, active: bool) -> Sequence[float]:
        if active:
            return (float(self._with_buffers), float(self._holds_result()), 1.0)
        return (0.0, 0.0, float(self._unsynced))

    @property
    @override
    def owes(self) -> bool:
        return self._credit

    def fulfil(self) -> None:
        """The backward was skipped: take part in the reduction without touching the gradients."""
        kept = [parameter.grad for parameter in self._parameters]
        self._credit = False
        try:
            if self._buffers_due:
                self._sync_buffers()
            self._drop_gradients()
            self._count_contributors(0.0)
            reducer.shadow_backward(self._ddp, self._exchange_arrivals())
        finally:
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient
            self._armed = False
        self._rebuild.run_if_due()

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        with_buffers, holding, _ = self._channel.received(self)
        self._with_buffers = with_buffers > 0
        if self._with_buffers:
            self._sync_buffers()
        if not (self._unsynced or holding):
            self._drop_gradients()
        self._count_contributors(float(self._unsynced))
        reducer.shadow_backward(self._ddp, self._exchange_arrivals())
        self._unsynced = False
        self._scale()
        self._rebuild.expect()

    @property
    @override
    def holds_followers(self) -> bool:
        return self._rebuild.due

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, ddp: Any, args: Any) -> None:
        reducer.suppress_buffer_sync(self._ddp)
        if torch.is_grad_enabled():
            self._in_backward = False  # a backward that raised did not come to its end
            if self._synchronises:
                self._announce_forward()

    @property
    def _synchronises(self) -> bool:
        return bool(self._ddp.require_backward_grad_sync)

    def _announce_forward(self) -> None:
        if self._credit:
            return
        self._see_zeroed()
        header_may_count = self._divide_by_initial_world_size or self._buffers is not None
        early = header_may_count and not self._may_hold_result and self._channel.may_announce_early(self)
        self._with_buffers = early and self._buffers is not None
        if early:
            self._channel.announce(self)
            self._credit = True
        elif self._buffers is not None:
            self._channel.announce(self._buffers)
        if self._buffers is not None:
            self._buffers_due = True
            if not self._buffers.after_forward:
                self._sync_buffers()

    def _after_forward(self, ddp: Any, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._buffers_due:
            self._sync_buffers()
        synchronises = self._synchronises
        self._armed |= synchronises
        outputs = list(tensors_with_grad(output))
        if synchronises and self._ddp.find_unused_parameters:
            self._outputs = [weakref.ref(tensor) for tensor in outputs]
        hook = self._on_synchronised_gradient if synchronises else self._on_local_gradient
        for tensor in outputs:
            handle = cast("Any", tensor).register_hook(hook)
            if tensor.is_leaf:  # the user's own tensor, passed through: it outlives the graph
                self._leaf_handles.append(handle)

    def _sync_buffers(self) -> None:
        assert self._buffers is not None
        self._buffers_due = False
        self._buffers.main_hook()

    # -- backward -----------------------------------------------------------------------------------------------------

    def _on_synchronised_gradient(self, gradient: torch.Tensor) -> None:
        self._begin_backward(synchronised=True)

    def _on_local_gradient(self, gradient: torch.Tensor) -> None:
        self._begin_backward(synchronised=False)

    def _begin_backward(self, *, synchronised: bool) -> None:
        """A gradient enters the module: the first one of a backward begins it."""
        if self._in_backward:
            return
        self._in_backward = True
        self._see_zeroed()
        # The reducer is armed by any synchronised forward, whichever forward this gradient belongs to.
        if self._armed or synchronised:
            self._begin_reduction()
        else:
            self._unsynced = True
            reducer.after_backward(self._end_backward)

    def _begin_reduction(self) -> None:
        if not self._armed:  # a second backward, of which DDP itself would not reduce the gradients
            outputs = [tensor for ref in self._outputs if (tensor := ref()) is not None]
            reducer.expect_backward(self._ddp, outputs)
        if not self._credit:
            self._with_buffers = False
            self._channel.announce(self)
        self._credit = False
        self._count_contributors(1.0)
        if reducer.first_static_backward(self._ddp):
            count = _ArrivalCounter(self._parameters)
            reducer.after_backward(lambda: self._share_arrivals(count.stop()))
        # Queued now, it runs before the reducer's own callback, and what it queues runs after it.
        reducer.after_backward(lambda: reducer.after_backward(self._end_reduction))

    def _end_backward(self) -> None:
        self._in_backward = False

    def _end_reduction(self) -> None:
        self._in_backward = self._armed = self._unsynced = False
        self._may_hold_result = True
        self._scale()
        self._rebuild.run_if_due()

    # -- scaling ------------------------------------------------------------------------------------------------------

    def _count_contributors(self, mine: float) -> None:
        """Sum the contributors in this burst, if its header was sent too early to know them."""
        self._contributors = None
        if self._with_buffers and not self._divide_by_initial_world_size:
            count = torch.tensor(mine, dtype=torch.float64)
            self._contributors = count, self._collective.all_reduce(count)

    @torch.no_grad()
    def _scale(self) -> None:
        """Turn the sum over ranks, divided by the world size, into the mean over contributors."""
        if self._divide_by_initial_world_size:
            return
        if self._contributors is None:
            contributors = self._channel.received(self)[2]
        else:
            count, work = self._contributors
            work.wait()
            contributors = count.item()
        if contributors in (0, self._collective.world_size):
            return
        for parameter, used in zip(self._parameters, reducer.used_anywhere(self._ddp), strict=True):
            if used and parameter.grad is not None:
                parameter.grad.mul_(self._collective.world_size / contributors)

    # -- what the gradients hold --------------------------------------------------------------------------------------

    def _see_zeroed(self) -> None:
        """Note that the last result is gone; by far the most often because ``zero_grad`` set the gradients to None."""
        if self._may_hold_result and all(parameter.grad is None for parameter in self._parameters):
            self._may_hold_result = False

    def _holds_result(self) -> bool:
        """Whether joined ranks must contribute the last result, because the active ones will add to it.

        Not where the mean is over contributors: there, all of these have it and the others need not.
        """
        if not self._may_hold_result or not self._divide_by_initial_world_size:
            return False
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return any(bool(gradient.any()) for gradient in gradients)

    # -- static graphs ------------------------------------------------------------------------------------------------

    def _exchange_arrivals(self) -> list[int] | None:
        """How often each parameter's gradient arrives in the static graph's backward; from a rank that has seen it."""
        if reducer.first_static_backward(self._ddp):
            self._share_arrivals([0] * len(self._parameters))
        return _arrivals.get(self._ddp)

    def _share_arrivals(self, mine: list[int]) -> None:
        counts = torch.tensor(mine)
        self._collective.all_reduce(counts, "max").wait()
        _arrivals[self._ddp] = counts.tolist()


class _ArrivalCounter:
    """Counts in one backward how often each parameter's gradient arrives."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._counts = [0] * len(parameters)
        self._handles: list[Any] = []
        for index, parameter in enumerate(parameters):
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._handles.append(node.register_hook(functools.partial(self._arrived, index)))

    def _arrived(self, index: int, *_: Any) -> None:
        self._counts[index] += 1

    def stop(self) -> list[int]:
        for handle in self._handles:
            handle.remove()
        return self._counts


class _Hook:
    """A module hook that copies and pickles as one that does nothing: a copy of the module is in no block."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _Hook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    return None
