"""The gradient reduction of a DDP module: :class:`GradientSync`.

When it comes, how it scales, and the order of collectives, is told in ``joinables.ddp``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import JoinError, JoinHook, ProtocolError
from join.batch import StepBatch
from join.collectives import Work
from join.collectives.broken import is_broken
from join.joinable import Block, BurstState
from join.transfer import broadcast_tensors
from joinables._torch import reducer
from joinables.ddp.buffers import BucketRebuild, BufferSync, DDPBurst
from joinables.ddp.static_graph import StaticGraph
from joinables.ddp.unused_parameters import Usage
from joinables.dummy_forward import DummyForward, InnerForward, emptied_output, is_empty_call
from joinables.tensors import adopt_gradients, tensors_with_grad
from joinables.weights import Weights, weighs_on_some
from joinables.wrapped_forward import around_forward

_IN_TORCH_JOIN = (
    "the module is in torch's own Join or model.join(), or was: leave that out, since this Join takes its place, and"
    " build the DistributedDataParallel anew"
)
# From one block of a module to the next: gradients that a rank has not yet reduced are not the last result.
_may_hold_result: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()


class GradientSync(DDPBurst):
    """The gradient all-reduce of a synchronised backward.

    Args:
        ddp: the module.
        buffers: its buffer synchronisation, which shares this burst's header where it can; ``None`` if it has none.
        rebuild: its bucket rebuild, which comes after the first backward.
    """

    what = "the backward"
    runs_ahead = True
    join_keywords: ClassVar[frozenset[str] | None] = frozenset({"divide_by_initial_world_size"})
    # [the header covers the buffers too, joined ranks must contribute the last result, this rank contributes, weights
    # are summed]
    flag_count = 4

    def __init__(self, ddp: DistributedDataParallel, buffers: BufferSync | None, rebuild: BucketRebuild) -> None:
        super().__init__(ddp)
        self._buffers, self._rebuild = buffers, rebuild
        self._parameters = reducer.reduced_parameters(ddp)
        self._static_graph = StaticGraph(ddp, self._parameters)
        self._weights = Weights(self._parameters)
        self._usage = Usage(self._parameters)
        self._buffers_before: list[torch.Tensor] = []  # of a dummy's forward
        self._inner: InnerForward | None = None  # in the forward under way
        self._refuses_empty = False  # the module cannot take an empty batch
        self._expects_backward_inside = True  # until a forward returns something that a backward can begin at
        self._written: list[tuple[int, int]] = []  # before the forward
        self._divide_by_initial_world_size = True
        self._with_buffers = False  # this burst's header covers the buffers too
        self._weighted = False  # in this burst, weights are summed
        self._weighs = False  # in a plain block: all active ranks set weights in the last burst in which they did alike
        self._window_weighs = False  # what was accumulated since the last reduction is weighted
        self._armed = False  # the reducer will reduce in the next backward
        self._backward = -1  # the last one in which a gradient entered
        self._backwards = 0  # how many were made in this block
        self._plain_in = 0  # the loop in lockstep, by its number, in which a reduction was a plain one
        self._unsynced = False  # gradients were accumulated since the last reduction
        self._had_data = 0  # in lockstep: the ranks that had data since the last reduction, as a bit mask
        self._had_dummies = False  # in lockstep: a rank had none in a backward since then
        self._may_hold_result = True  # grad may still hold the last reduction's result
        self._contributors: tuple[torch.Tensor, Work] | None = None  # their sum, under way
        self._held: tuple[torch.Tensor, Work] | None = None  # kept while it is under way
        self._outputs: list[weakref.ref[torch.Tensor]] = []

    @override
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        """Return itself.

        Raises:
            ValueError: if torch's own ``Join`` is around the module, or a layer has sparse gradients.
        """
        if reducer.is_in_torch_join(self._ddp):
            raise ValueError(_IN_TORCH_JOIN)
        for name, layer in cast("Iterator[tuple[str, torch.nn.Module]]", self._ddp.named_modules()):
            sparse = isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
            if sparse and layer.weight.requires_grad:
                raise ValueError(
                    f"{name!r} has sparse gradients, which a rank without data cannot take over; build it with"
                    " sparse=False"
                )
        self._divide_by_initial_world_size = divide_by_initial_world_size
        return self

    @override
    def attach(self, join: Block) -> None:
        super().attach(join)
        self._join = join
        self._all_ranks = (1 << self._collective.world_size) - 1
        self._weights.attach(join)
        self._usage.attach(join)
        self._static_graph.check()
        ddp = self._ddp
        self._counts_use = ddp.find_unused_parameters and not ddp.static_graph  # in lockstep
        self._may_hold_result, self._plain_in = _may_hold_result.get(ddp, True), 0
        self._backwards, self._expects_backward_inside = 0, True
        self._dummy_forward, self._inner, self._refuses_empty = DummyForward(join.channel), None, False
        self._param_sync, self._has_comm_hook = ddp.require_forward_param_sync, reducer.has_comm_hook(ddp)
        self._handles = around_forward(ddp, self._before_forward, self._after_forward)

    @override
    def detach(self) -> None:
        super().detach()  # from here on, what is left of the graphs of this block is an ordinary DDP module's
        if self._inner is not None:
            self._inner.remove()
        self._weights.detach()
        self._usage.detach()
        del self._join, self._dummy_forward
        self._ddp.require_forward_param_sync = self._param_sync
        _may_hold_result[self._ddp] = self._may_hold_result
        self._armed = False

    @property
    @override
    def own_steps(self) -> int:
        return self._backwards

    @override
    def synchronise(self, source: int) -> None:
        """Parameters come from the last joiner; so do gradients, but for what is still to be reduced.

        Which parameters have a gradient is the same on all ranks afterwards: ``_announce_forward`` depends on it.
        """
        broadcast_tensors(self._collective, reducer.parameters(self._ddp), source)
        accumulated, may_hold_result = self._unsynced, self._may_hold_result
        may_hold_result = adopt_gradients(
            self._collective, self._parameters, source, accumulated=accumulated, also=may_hold_result
        )
        if not accumulated:
            self._may_hold_result = may_hold_result

    # -- the header ---------------------------------------------------------------------------------------------------

    @override
    def flags(self, active: bool) -> Sequence[bool]:
        if active:
            holding = self._may_hold_result and self._divide_by_initial_world_size and not self._weighted
            return (self._with_buffers, holding, True, self._weighted)
        if self._unsynced:
            self._forget_zeroed()
        return (False, False, self._unsynced, False)

    @override
    def declared_flags(self, weighted: bool) -> Sequence[bool]:
        covers = self._channel.announces_in_forward(self, saves_header=False, has_buffers=True)
        return (self._buffers is not None and covers, False, True, weighted)

    @property
    @override
    def is_due(self) -> bool:
        return self._unsynced

    @override
    def fulfil(self) -> None:
        """The backward was skipped: take part in the reduction without touching the gradients.

        Only on a dummy, what others gave is kept: the optimizer may be sharded, and step for all.

        Raises:
            ProtocolError: if others did not skip it, and this rank had something to give.
        """
        self.state = BurstState.RUNNING
        if self._channel.ranks_with_data is not None:
            self._see_zeroed(values=False)
            self._agree()
        elif self._weighted != self._weighs:
            self._weigh_as_all()
        has_data = not self._join.shadowing or self._unsynced
        missed = self._miss_reduction(takes_part=not has_data) and has_data
        self._armed = False
        self.state = BurstState.IDLE
        if self._rebuild.pending:
            self._rebuild.run()
        self._weights.end_refused()
        if missed:
            self._channel.protest(
                f"rank {self._collective.rank} skipped {self.join_name}, which others ran, so it has no gradients where"
                " they have. Skip it on all ranks or on none: let them agree by an all-reduce, or multiply the loss by"
                " 0"
            )

    def _miss_reduction(self, *, takes_part: bool = False) -> bool:
        """Give nothing to a reduction, and take nothing; whether active ranks gave something.

        Args:
            takes_part: whether to take what they gave, if there are no gradients here.
        """
        kept = [parameter.grad for parameter in self._parameters]
        had_data, window = (self._had_data, self._had_dummies), self._usage.window
        has_result = False
        try:
            self._begin_use()
            self._drop_gradients()
            self._count_contributors(0.0)
            reducer.shadow_backward(self._ddp, self._static_graph.learn(self._collective))
            has_result = self._has_result()
            if takes_part and has_result and all(gradient is None for gradient in kept):
                self._scale()
                kept = [parameter.grad for parameter in self._parameters]
            self._end_use()
        finally:
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient
        if had_data[0] and not has_result:  # all have skipped it: what was accumulated is still to be reduced
            self._had_data, self._had_dummies = had_data
            self._usage.window = window
        return has_result

    def _has_result(self) -> bool:
        """Whether a reduction to which this rank gave nothing shows that others gave something."""
        may_be_older = self._may_hold_result and self._divide_by_initial_world_size
        # A rank that has joined may have given what it had accumulated.
        may_be_joined = self._channel.flags(self)[2] > self._channel.announced(self)
        if may_be_older or may_be_joined or reducer.hooks_remember(self._ddp):
            return False
        return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._parameters)

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        with_buffers, holding, _, _ = self._channel.flags(self)
        self._with_buffers = with_buffers > 0
        self._weigh_as_all()
        if self._with_buffers and self._buffers is not None:
            self._buffers.main_hook()
        self._shadow_reduction(holding > 0)
        self._rebuild.expect()

    def _shadow_reduction(self, holding: bool) -> None:
        """Run a backward with nothing but what was accumulated here.

        Args:
            holding: whether an active rank still has the last reduction's result in its gradients.
        """
        if self._unsynced:
            self._forget_zeroed()
        self._begin_use()
        if self._weights.aside:
            self._weights.take_back(self._share_of_result)
        self._count_contributors(self._weights.window if self._weighted else float(self._unsynced))
        if not (self._unsynced or holding):
            self._drop_gradients()
        elif holding:
            self._keep_only_held()
        reducer.shadow_backward(self._ddp, self._static_graph.learn(self._collective))
        self._unsynced = False
        self._weights.end_reduction(self._used_anywhere)
        self._scale_and_end_use()

    @property
    @override
    def holds_followers(self) -> bool:
        return self._rebuild.due

    def _keep_only_held(self) -> None:
        """Contribute the last result only of the parameters of which active ranks still have it."""
        held = self._exchange_held([False] * len(self._parameters))
        held[1].wait()
        if self._unsynced:
            return
        for parameter, keep in zip(self._parameters, cast("list[int]", held[0].tolist()), strict=True):
            if not keep:
                parameter.grad = None

    def _exchange_held(self, mine: list[bool]) -> tuple[torch.Tensor, Work]:
        """Which parameters an active rank still has the last result of: one may ``zero_grad`` a few of them only."""
        held = torch.tensor(mine, dtype=torch.int64)
        return held, self._collective.all_reduce(held, "max")

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        reducer.forget_use(self._ddp)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self) -> None:
        if reducer.is_in_torch_join(self._ddp):
            raise JoinError(_IN_TORCH_JOIN)
        channel = self._channel
        channel.module_called()
        if self._buffers is not None:
            reducer.suppress_buffer_sync(self._ddp)
        if torch.is_grad_enabled():
            if self._ddp.find_unused_parameters:
                self._watch_use()
            weighted = self._join.weight is not None
            if weighted:
                self._weights.watch()
            if self._ddp.require_backward_grad_sync and self.state is not BurstState.OWED:
                self._weighted = weighted and not channel.shadowing
                self._announce_forward()
        if self._expects_backward_inside:
            self._written = self._gradient_writes()
        if channel.shadowing:
            self._buffers_before = reducer.copied_buffers(self._ddp)
        if channel.watches_calls:
            self._look_into_forward()

    def _watch_use(self) -> None:
        if self._has_no_gradient and not self._armed:
            reducer.forget_use(self._ddp)
        if self._counts_use and self._channel.ranks_with_data is not None:
            self._usage.watch()

    def _announce_forward(self) -> None:
        channel, buffers = self._channel, self._buffers
        channel.end_broken_loop()
        if self._may_hold_result and channel.ranks_with_data is None:
            self._see_zeroed(values=False)
        # A forward cannot know whether the last result will be there (zero_grad may follow), nor count contributors
        # for nothing. With buffers it needs a header anyway.
        has_buffers = buffers is not None
        saves = not self._may_hold_result if self._divide_by_initial_world_size else has_buffers
        early = channel.announces_in_forward(self, saves_header=saves, has_buffers=has_buffers)
        self._with_buffers = early and buffers is not None
        if early:
            channel.announce(self)
            self.state = BurstState.OWED
        elif buffers is not None:
            channel.announce(buffers)
        if buffers is not None:
            buffers.announced()

    def _look_into_forward(self) -> None:
        if self._inner is not None:
            self._inner.remove()  # the forward that it was for has raised
        self._inner = InnerForward(cast("torch.nn.Module", self._ddp.module), self._stands_in, self._run_on_dummy)

    def _stands_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Before the module's own forward, at the beginning of a loop and where this rank's data ends."""
        channel, self._inner = self._channel, None
        channel.module_runs_on((args, kwargs))
        self._dummy_forward.called(args, kwargs)
        return channel.batch is StepBatch.EMPTY and is_empty_call((args, kwargs))

    def _run_on_dummy(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._refuses_empty:
            try:
                return forward(*args, **kwargs)
            except Exception as error:
                if is_broken(error):
                    raise  # another rank is gone
                self._refuses_empty = True
        instead, by_name = self._dummy_forward.arguments(args, kwargs)
        return emptied_output(forward(*instead, **by_name), (args, kwargs))

    def _after_forward(self, output: Any) -> None:
        if self._channel.shadowing:  # a dummy leaves no trace
            reducer.restore_buffers(self._ddp, self._buffers_before)
            self._buffers_before = []
        if not torch.is_grad_enabled():
            return
        if self._buffers is not None:
            self._buffers.forward_ended()
        if self._expects_backward_inside:
            self._refuse_backward_inside()
            self._expects_backward_inside = not tensors_with_grad(output)
        synchronises = bool(self._ddp.require_backward_grad_sync)
        self._armed |= synchronises
        outputs = tensors_with_grad(output)
        if synchronises and self._ddp.find_unused_parameters:
            self._outputs = [weakref.ref(tensor) for tensor in outputs]
        hook = partial(self._gradient_enters, synchronises)
        for tensor in outputs:
            handle = reducer.on_gradient(tensor, hook)
            if tensor.is_leaf:  # the user's own tensor, passed through: it outlives the graph
                self._handles.append(handle)
        if not outputs:  # hidden in an object we cannot look into: the first parameter's gradient will tell
            watch = torch.autograd.graph.register_multi_grad_hook
            self._handles.append(watch(self._parameters, cast("Any", hook), mode="any"))

    def _gradient_writes(self) -> list[tuple[int, int]]:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return [(id(gradient), reducer.writes(gradient)) for gradient in gradients]

    def _refuse_backward_inside(self) -> None:
        if self._gradient_writes() != self._written:
            name = type(cast("object", self._ddp.module)).__name__
            raise JoinError(
                f"a backward ran inside the forward of DistributedDataParallel({name}), where it can be neither"
                " announced nor, on other ranks, shadowed. Return the loss from the forward, and call backward() after"
                " it"
            )

    # -- backward -----------------------------------------------------------------------------------------------------

    # The calls here find cold caches after a step's arithmetic and cost microseconds each, as much as a small layer. So
    # what is mostly not to be done is asked for before it is called.

    def _gradient_enters(self, synchronised: bool, gradient: torch.Tensor) -> None:
        """A gradient enters the module: the first one of a backward begins it."""
        backward = reducer.backward_under_way()
        if backward == self._backward or not self._handles:
            return
        self._backward, channel = backward, self._channel
        self._backwards += 1
        weighted = self._join.weight is not None
        # The reducer is armed by any synchronised forward, whichever forward this gradient belongs to.
        reduces = self._armed or synchronised
        if reduces and not weighted and self._plain_in == channel.loop and channel.is_in_loop_body:
            if not (self._armed and self.state is BurstState.OWED):
                self._announce_backward(weighted)
            self._end_reduction()
            return
        if self._unsynced or self._had_data or self._weights.window:
            self._forget_zeroed()
        if self._unsynced and weighted != self._window_weighs and not channel.shadowing:
            self._weights.refused = ValueError(
                "join.weight was set or unset in a window of accumulation; set it at every step or at none"
            )
            if not reduces:
                self._weights.end_refused()
        # Where all ranks give theirs, it makes no difference.
        makes_no_difference = reduces and channel.ranks_with_data is not None and not weighted
        if self._may_hold_result and not makes_no_difference:
            self._see_zeroed(values=True)
        if weighted:
            self._plain_in = 0
            self._weights.begin_backward(holds_result=self._sets_result_aside())
        self._begin_use()
        if reduces:
            self._begin_reduction(weighted)
            return
        if not channel.shadowing:
            self._unsynced, self._window_weighs = True, weighted
        if self._weights.aside and not self._weights.window:
            # Nothing but dummies: what was set aside must be there, to be zeroed or not.
            reducer.after_backward(self._weights.put_back)

    def _announce_backward(self, weighted: bool) -> None:
        if not self._armed:  # a second backward, of which DDP itself would not reduce the gradients
            outputs = [tensor for ref in self._outputs if (tensor := ref()) is not None]
            reducer.expect_backward(self._ddp, outputs)
        if self.state is not BurstState.OWED:
            if self._channel.foresees_bursts and self._buffers is not None:
                raise ProtocolError(
                    "with steps=, each backward of a module with buffers needs a forward of its own, and announces in"
                    " it; call what announces in between after the backward, and list it after the module"
                )
            self._with_buffers, self._weighted = False, weighted and not self._channel.shadowing
            self._channel.announce(self)
            self.state = BurstState.OWED

    def _begin_reduction(self, weighted: bool) -> None:
        self._announce_backward(weighted)
        holding = False
        if self._channel.ranks_with_data is not None:  # where ranks without data hold the last result, too
            if self._weights.agreed_in != self._channel.loop or self._weights.agreed != weighted:
                self._agree()
                self._weights.refused = self._weights.refused or self._weights.change()
            self._weighted = self._weights.agreed
        else:
            self._check_weights()
            holding = self._may_hold_result and self._divide_by_initial_world_size and not self._weighted
            if holding and self._channel.foresees_bursts:
                raise ValueError("steps= needs zero_grad() between backwards: gradients still hold the last result")
        if self._weights.aside:
            self._weights.take_back(self._share_of_result)
        self.state, self._contributors = BurstState.RUNNING, None
        scales = self._scales
        if scales:
            mine = self._weights.window if self._weighted else self._contribution
            # What is refused must not leave others with a sum of 0, which is another mistake.
            self._count_contributors(1.0 if self._weights.refused else mine)
        if holding:
            held = [parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._parameters]
            self._held = self._exchange_held(held)
        if self._ddp.static_graph:
            self._static_graph.watch(self._collective)
        waits = scales or self._counts_use or self._rebuild.pending
        if waits or self._weights.window or self._weights.aside or self._weights.refused:
            reducer.after_reduction(self._finish_reduction)
        elif self._channel.ranks_with_data is not None:  # nothing is done with the result, so it need not be there
            # The next one is as plain, if it is not weighted: that is all that may change in a loop.
            self._plain_in = self._channel.loop
            self._end_reduction()
        else:
            reducer.after_reduction(self._end_reduction)

    def _end_reduction(self) -> None:
        self.state = BurstState.IDLE
        self._armed = self._unsynced = self._had_dummies = False
        self._may_hold_result, self._had_data = True, 0

    def _finish_reduction(self) -> None:
        try:
            self._weights.end_reduction(self._used_anywhere)
            self._scale_and_end_use()
        finally:
            self._end_reduction()
        if self._rebuild.pending:
            self._rebuild.run()
        self._weights.end_refused()

    def _agree(self) -> None:
        """In lockstep, a reduction begins."""
        if self._counts_use:
            self._begin_window()
        self._weighted, accumulated = self._weights.agree(self._unsynced)
        self._had_data |= accumulated

    def _begin_use(self) -> None:
        """A backward begins: in lockstep, note who has data, and, if it is the first of a reduction, the gradients."""
        with_data = self._channel.ranks_with_data
        if with_data is None:
            return
        if self._counts_use:
            self._begin_window()
        self._had_data |= with_data
        self._had_dummies |= with_data != self._all_ranks

    def _begin_window(self) -> None:
        if not self._had_data:
            self._usage.begin_window(brought=self._unsynced)

    def _scale_and_end_use(self) -> None:
        try:
            self._scale()
        finally:  # whatever that raises, maybe on this rank alone: the collectives must stay in step
            self._end_use()

    def _end_use(self) -> None:
        """A reduction is over: in lockstep, what only dummies used is put back."""
        if self._counts_use and self._channel.ranks_with_data is not None:
            self._usage.end_reduction(with_dummies=self._had_dummies or self._weights.brought)
        self._had_data, self._had_dummies = 0, False

    # -- scaling ------------------------------------------------------------------------------------------------------

    @property
    def _scales(self) -> bool:
        """Whether the mean is not simply that over all ranks."""
        return self._weighted or not self._divide_by_initial_world_size

    def _check_weights(self) -> None:
        """Make sure that all active ranks sum weights in this burst, or none: where this rank begins or ceases to.

        Where something is wrong, the burst still is as on the others, and what is wrong is raised after it.
        """
        if self._weighted != self._weights.in_use:
            self._weights.refused = ValueError(
                "join.weight was set or unset between forward and backward; set it before the forward"
            )
        if self._weighted != self._weighs:
            self._weights.refused = self._weigh_as_all() or self._weights.refused

    def _weigh_as_all(self) -> ValueError | None:
        """Sum weights in this burst, or not, as all active ranks do; what is wrong if they do not all do the same.

        Then it is as the last burst was, on all ranks, whose collectives so match.
        """
        using, announced = self._channel.flags(self)[3], self._channel.announced(self)
        agree = using in (0, announced)
        if agree:
            self._weighs = using > 0
        self._weighted = self._weighs
        return None if agree else weighs_on_some(using, announced - using)

    def _count_contributors(self, mine: float) -> None:
        """Sum the contributors, or their weights, in this burst, if its header could not know them."""
        self._contributors = None
        if self._weighted or not (self._divide_by_initial_world_size or self._header_tells_contributors):
            count = torch.tensor(mine, dtype=torch.float64)
            work = self._collective.all_reduce(count)
            self._contributors = count, work
            if self._normalises:
                work.wait()
                if count:
                    self._weights.normalise(self._collective.world_size / count.item())

    @property
    def _normalises(self) -> bool:
        """Whether gradients are parts of the mean before they are reduced, since a comm hook is given them."""
        return self._weighted and self._has_comm_hook

    @property
    def _contribution(self) -> float:
        """Whether this rank contributes to its own backward: not with dummies alone."""
        return float(self._channel.ranks_with_data is None or self._had_data >> self._collective.rank & 1)

    @property
    def _header_tells_contributors(self) -> bool:
        channel = self._channel
        if channel.ranks_with_data is not None:
            return not self._weights.brought
        in_time = not self._with_buffers or channel.foresees_bursts
        return in_time and not channel.someone_may_contribute_unseen()

    def _scale(self) -> None:
        """Turn the sum over ranks, divided by the world size, into the mean over contributors, or the weighted one.

        Raises:
            ValueError: on all ranks, if their weights are all 0.
        """
        if not self._scales:
            return
        if self._contributors is None and self._channel.ranks_with_data is not None:
            contributors = float(self._had_data.bit_count())
        elif self._contributors is None:
            contributors = float(self._channel.flags(self)[2])
        else:
            count, work = self._contributors
            work.wait()
            contributors = count.item()
        if self._weighted and contributors == 0:
            raise ValueError("join.weight is 0 on all ranks at once, so their gradients have no mean")
        if contributors in (0, self._collective.world_size) or self._normalises:
            return
        factor = self._collective.world_size / contributors
        with torch.no_grad():
            for parameter, used in zip(self._parameters, self._used_anywhere(), strict=True):
                if used and parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _used_anywhere(self) -> Sequence[int]:
        return reducer.used_anywhere(self._ddp, len(self._parameters))

    def _sets_result_aside(self) -> bool:
        """Whether the gradients hold the last result alone, and this rank may not contribute it as it is."""
        if not self._may_hold_result or self._weights.window:
            return False
        return not self._channel.shadowing or not self._had_data >> self._collective.rank & 1

    @property
    def _share_of_result(self) -> float:
        """How often this rank contributes a result that was set aside."""
        return self._weights.window if self._weighted else float(self._divide_by_initial_world_size)

    # -- what the gradients hold --------------------------------------------------------------------------------------

    def _forget_zeroed(self) -> None:
        """What was accumulated is gone if ``zero_grad`` was called since: then it must not count.

        Gradients that are 0 tell nothing: those of a batch may be.
        """
        if self._has_no_gradient:
            self._unsynced, self._had_data, self._had_dummies = False, 0, False
            self._weights.forget()

    @property
    def _has_no_gradient(self) -> bool:
        return all(parameter.grad is None for parameter in self._parameters)

    def _see_zeroed(self, *, values: bool) -> None:
        """Note that the last result is gone: ``zero_grad`` has set the gradients to None, or, if asked to look, to 0.

        Whether a reduction adds to the last one's result matters to joined ranks: they then contribute what they
        received. Not where the mean is over contributors: all of these have it, and the others need not.
        """
        look = values and self._divide_by_initial_world_size
        for parameter in self._parameters:
            if parameter.grad is not None and not (look and not parameter.grad.any()):
                return
        self._may_hold_result = False
