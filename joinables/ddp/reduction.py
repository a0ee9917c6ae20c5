"""Gradient reduction of a DDP module, from the requested mean to the reducer's own backward.

:class:`GradientSync` is the burst. The docstring of ``joinables.ddp`` shows its place in a step and the order of
collectives. Its parts:

- :class:`Forwards` finds the beginning of a backward.
- :class:`Contributions` computes the share of each rank and the mean of all shares. It consists of the :class:`Window`
  of backwards that are not reduced yet and the :class:`LastResult`, which the gradients may still contain.

``joinables.ddp.parameters`` keeps the records for each parameter.

*The mean.* DDP divides the sum over ranks by the world size. The other means are multiples of this quotient:

- The mean over contributors is the quotient times ``world_size / contributors``.
- The weighted mean is the quotient times ``world_size * unit / sum of weights``, if ``Join.scale`` has multiplied the
  losses by ``weight / unit``.

A comm hook may round gradients, or carry errors over to the next step, so it receives parts of the weighted mean
itself. In that case the sum of weights is awaited before the backward.

*The last result.* DDP reduces the contents of ``grad``. Without ``zero_grad``, these include the result of the last
reduction on every rank that had data in it. The new mean must contain that result once. So each contributor adds the
result as many times as that takes (``Contributions.add_last_result``). Between machines, the number of contributors
takes long to arrive. Then the last result is taken out of the gradients, and added to the new one, unless a joined rank
steps on the gradients (``ZeroRedundancyOptimizer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn, cast
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join, JoinError, JoinHook, ProtocolError
from join.collectives._torch_private import Writes, accumulators, are_zero, on_gradient, will_run, writes_to
from join.protocol.channel import Channel
from join.transfer import Exchange
from joinables._torch import autograd, objects, reducer
from joinables.ddp.buffers import BucketRebuild, BufferSync, DDPBurst
from joinables.ddp.parameters import Factors, StaticGraph, UsedParameters
from joinables.ddp.records import Reduction, Window, memory_of
from joinables.dummy_forward import InnerForward, refuse_backward_on_dummy
from joinables.modules import ModuleHook, adopt_gradients, run_uncompiled, synchronised_norms, tensors_with_grad
from joinables.own_collectives import mixing, refuse_in_plain_block

WITH_BUFFERS, CONTRIBUTES, WEIGHTED = range(3)
"""The flags in the header of a reduction: it announces the buffers too, this rank contributes, weights are summed."""

IN_TORCH_JOIN = (
    "The module is or was in torch's own Join or model.join(). Remove torch's Join, which this one replaces, and wrap"
    " the plain module in a new DistributedDataParallel. [J107]"
)


class GradientSync(DDPBurst):
    """The gradient all-reduce of a synchronised backward.

    Args:
        ddp: The module.
        buffers: The broadcast of its buffers, which shares the header of this burst if possible; ``None`` if the module
            has no buffers.
        rebuild: The rebuild of its buckets, which follows the first backward.
    """

    action = "the backward"
    runs_ahead = True
    join_keywords: ClassVar[frozenset[str] | None] = frozenset({"divide_by_initial_world_size"})
    flag_count = 3

    def __init__(self, ddp: DistributedDataParallel, buffers: BufferSync | None, rebuild: BucketRebuild) -> None:
        super().__init__(ddp)
        self._buffers, self._rebuild = buffers, rebuild
        self._parameters = reducer.reduced_parameters(ddp)
        self._accumulators = accumulators(self._parameters)
        self._static_graph = StaticGraph(ddp, self._parameters)
        self._forwards = Forwards(ddp, self._parameters, buffers)
        self.mixes_ranks = mixing(self.join_name, self._forwards.norms)  # a NaN on a dummy would reach other ranks
        self._contributions = Contributions(ddp, self._parameters)
        self._backward = -1  # the number of the last backward in which a gradient entered the module
        self._end_calls: list[Callable[[], None]] | None = None  # at the end of a backward that runs others inside

    @override
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        """Return this object, which is its own hook.

        Args:
            divide_by_initial_world_size: Whether gradients are divided by the world size instead of by the number of
                contributors.
            **kwargs: The keywords of other joinables.

        Raises:
            ValueError: If the module is in torch's own ``Join``, or a layer has sparse gradients.
        """
        if objects.is_in_torch_join(self._ddp):
            raise ValueError(IN_TORCH_JOIN)
        for name, layer in cast("Iterator[tuple[str, torch.nn.Module]]", self._ddp.named_modules()):
            is_embedding = isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            if is_embedding and layer.sparse and any(layer.weight is parameter for parameter in self._parameters):
                raise ValueError(
                    f"The layer {name!r} has sparse gradients, which a rank without data cannot receive. Build it with"
                    " sparse=False. [J110]"
                )
        self._contributions.over_all_ranks = divide_by_initial_world_size
        return self

    @override
    def attach(self, join: Join) -> None:
        self._static_graph.check()
        super().attach(join)
        self._scope = join.channel.roster.scopes[-1]
        self._contributions.attach(join, self)
        self.own_steps = 0
        self._handles = self._forwards.attach(join.channel, self._begin_forward, self._gradient_enters)

    @override
    def detach(self) -> None:
        super().detach()  # a backward through the graphs of this block is an ordinary DDP backward from here on
        self._forwards.detach()
        self._contributions.detach()
        del self._scope

    @override
    def exchange(self, source: int) -> Exchange:
        """Copy parameters from the last joiner, and gradients except for those that are not reduced yet.

        Afterwards the same parameters have a gradient on all ranks, as ``_begin_forward`` requires.
        """
        unreduced, result = self._contributions.holds_unreduced, self._contributions.last_result
        keeps, parameters = unreduced or self._collective.rank == source, reducer.parameters(self._ddp)
        present = [parameter.grad is not None for parameter in self._parameters]
        gradients = [p.grad.to(p.dtype) for p in self._parameters if not unreduced and p.grad is not None]
        inbox = yield parameters, present, gradients, result.may_remain
        source_parameters, present, gradients, may_remain = inbox.skeleton
        inbox.fill(source_parameters, parameters)
        adopt_gradients(inbox, self._parameters, present, gradients, keeps=keeps)
        yield ""
        if not keeps:
            result.may_remain = may_remain

    @override
    def hand_over(self, leader: int) -> None:
        self._forwards.inner.begin_loop()

    @override
    def synchronise_own(self, source: int) -> None:
        if not reducer.has_finished(self._ddp):
            self._raise_unfinished()
        self._forwards.inner.synchronise(self._collective, source)

    @override
    def flags(self, active: bool) -> Sequence[bool]:
        """Return the flags of this rank: ``WITH_BUFFERS``, ``CONTRIBUTES``, ``WEIGHTED``.

        A joined rank contributes once: the gradients that it had accumulated when it was out of data.
        """
        contributions = self._contributions
        if active:
            return (contributions.reduction.with_buffers, True, contributions.reduction.weighted)
        if contributions.window.unreduced:
            contributions.drop_if_zeroed()
        return (False, contributions.window.unreduced, False)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        """Announce the backward if it is due now, and synchronise buffers; called before a forward with grad."""
        contributions, channel, buffers = self._contributions, self._channel, self._buffers
        if channel.loop is not None and not channel.step.in_loop:
            channel.loop.leave()  # not later: the end of the loop writes to buffers that this forward saves
        if self._ddp.find_unused_parameters:
            if contributions.last_result.has_no_gradient and not self._forwards.reduces_next:
                reducer.forget_use(self._ddp)
            if channel.step.in_loop:
                contributions.used.watch()
        if not self._ddp.require_backward_grad_sync or self.is_pending:
            return
        # The number of times to add the last result depends on the number of contributors. So if the gradients may
        # contain it, the header is sent with the backward, when zero_grad may have been called. Under a mean over
        # contributors, a header in the forward needs a second count, since some ranks may skip the backward. It saves a
        # header only if the buffers need one in the forward anyway. In a loop nothing is sent, and a backward that this
        # rank skips stays pending since its forward.
        all_ranks_run, saves_header = channel.step.in_loop, buffers is not None
        if contributions.over_all_ranks:
            if contributions.last_result.may_remain and not all_ranks_run:
                contributions.last_result.notice_zero_grad()
            saves_header = not contributions.last_result.may_remain
        early = channel.roster.early is self and (saves_header or all_ranks_run)
        if early:
            weighted = not channel.step.in_loop and self._scope.weight is not None
            contributions.reduction = Reduction(with_buffers=buffers is not None, weighted=weighted)
            channel.announce(self)
            self.is_pending = True
        elif buffers is not None:
            channel.announce(buffers)
        if buffers is not None:
            buffers.broadcast_when_due()

    # -- backward -----------------------------------------------------------------------------------------------------

    # After the arithmetic of a step, a call finds cold caches and costs microseconds, as much as a small layer. So most
    # conditions are tested before a call instead of inside it.

    def _gradient_enters(self, synchronised: bool, gradient: torch.Tensor) -> None:
        """Begin a backward at the first gradient that enters the module, if gradients will reach its parameters."""
        backward = autograd.backward_under_way()
        if backward == self._backward or not self._handles:
            return
        self._backward, self._end_calls = backward, None
        try:
            reaches_parameters = any(map(will_run, self._accumulators))
        except RuntimeError:  # torch.autograd.grad computes the gradient of one of the parameters
            reaches_parameters = False
        if reaches_parameters:
            self._begin_backward(synchronised)
            return
        # This is torch.autograd.grad, or the parameters are behind reentrant checkpoints. These run backwards of their
        # own inside this one, each with its own end.
        end_calls = self._end_calls = list[Callable[[], None]]()
        autograd.once_before(self._accumulators, partial(self._begin_backward, synchronised))

        def end() -> None:
            for call in end_calls:
                call()

        autograd.after_backward(partial(autograd.after_backward, end))  # twice, as in _begin_reduction

    def _begin_backward(self, synchronised: bool) -> None:
        contributions, channel, in_loop = self._contributions, self._channel, self._channel.step.in_loop
        if not in_loop:
            if channel.loop is not None:
                channel.loop.leave()
            self.own_steps += 1
        if contributions.memory.open_window is not None:
            contributions.resume_window()
        weight = channel.step.weight if in_loop else self._scope.weight
        if in_loop:
            if channel.scaling.in_use is not channel.scaling.flows:
                channel.scaling.check_backward(self)
        elif (weight is not None) != channel.scaling.flows:
            raise JoinError(
                f"join.weight is {weight}, which does not match the scaling of the loss in {self.join_name}. Set the"
                " weight before the forward, and call join.scale(loss).backward(). [J472]"
            )
        contributions.record_backward(weight, in_loop=in_loop)
        reduces, result = self._forwards.reduces_next or synchronised, contributions.last_result
        if result.may_remain:
            result.notice_zero_grad()
        if reduces:
            self._begin_reduction(weight)
            return
        depends_on_others = weight is not None or contributions.over_all_ranks
        if depends_on_others and result.may_remain and not contributions.window.unreduced and not in_loop:
            result.take_out()
        contributions.window.unreduced = True
        autograd.after_backward(contributions.remember_writes)

    def _begin_reduction(self, weight: float | None) -> None:
        """Begin the reduction at the end of the current backward, and announce it if the forward has not."""
        contributions, channel = self._contributions, self._channel
        if not self._forwards.reduces_next:  # a second backward, whose gradients DDP itself would not reduce
            reducer.expect_backward(self._ddp, self._forwards.outputs)
        if not self.is_pending:
            contributions.reduction = Reduction(weighted=weight is not None and not channel.step.in_loop)
            channel.announce(self)
        weighted = contributions.reduction.weighted
        if not channel.step.in_loop:
            if weighted != (contributions.window.weight is not None):
                raise JoinError(
                    "join.weight was set or unset between forward and backward. Set it before the forward. [J106]"
                )
            if weighted != contributions.was_weighted:
                contributions.agree_on_weights(channel.headers.flags(self)[WEIGHTED])
        if contributions.last_result.may_remain:
            contributions.add_last_result()
        self.is_pending = False
        needs_end = contributions.begin(1.0 if contributions.window.weight is None else contributions.window.weight)
        if self._ddp.static_graph:
            self._static_graph.watch(self._collective)
        if channel.guard.timeout is not None and not channel.step.in_loop:
            # This is before the reducer waits, which does not look for missing ranks.
            autograd.after_backward(channel.headers.read)
        if needs_end or self._rebuild.is_due or not channel.step.in_loop:
            if self._end_calls is None:  # twice, so that it runs after the callbacks that reducers queue meanwhile
                autograd.after_backward(partial(autograd.after_backward, self._finish_reduction))
            else:
                self._end_calls.append(self._finish_reduction)
        self._forwards.reduces_next, contributions.last_result.may_remain = False, True

    def _raise_unfinished(self) -> NoReturn:
        raise JoinError(
            f"Gradients did not reach all parameters that the module waits for in {self.join_name}. Call backward()"
            " without inputs=, or list all parameters there. If a loss does not depend on all parameters, build the"
            " module with find_unused_parameters=True. [J473]"
        )

    def _finish_reduction(self) -> None:
        if not reducer.has_finished(self._ddp):
            self._raise_unfinished()
        self._contributions.end()
        if self._rebuild.is_due:
            self._rebuild.run()

    @override
    def fulfil(self) -> None:
        """Take part in the reduction of a backward that this rank skipped, without changing its gradients.

        On a dummy, this rank receives the result, since a sharded optimizer may step for all ranks.

        Raises:
            ProtocolError: If other ranks ran the backward, and this rank had data or unreduced gradients.
        """
        self.is_pending = False
        contributions, channel = self._contributions, self._channel
        if contributions.memory.open_window is not None:
            contributions.resume_window()
        if channel.step.in_loop:
            contributions.last_result.notice_zero_grad()
            contributions.enter_step()
        elif contributions.reduction.weighted != contributions.was_weighted:
            contributions.agree_on_weights(channel.headers.flags(self)[WEIGHTED])
        has_data = contributions.window.unreduced or not (channel.step.shadowing or channel.has_run_out)
        misses_result = self._contribute_nothing(takes_result=not has_data) and has_data
        self._forwards.reduces_next = False
        if self._rebuild.is_due:
            self._rebuild.run()
        if misses_result and not channel.has_run_out:
            reason = (
                f"Rank {self._collective.rank} skipped {self.join_name}, but other ranks ran it, so this rank has no"
                " gradients where they have some. Skip it on all ranks or on none: agree by an all-reduce, or multiply"
                " the loss by 0. [J113]"
            )
            channel.guard.post_and_raise(ProtocolError(reason))

    def _contribute_nothing(self, *, takes_result: bool) -> bool:
        """Run a reduction without contributions of this rank, and restore its gradients.

        Args:
            takes_result: Whether to keep the result instead, if this rank has no gradients.

        Returns:
            Whether active ranks certainly contributed.
        """
        contributions = self._contributions
        gradients, window = [parameter.grad for parameter in self._parameters], contributions.window
        if self._ddp.gradient_as_bucket_view:  # the reduction writes its result into these tensors
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        has_result, takes_result = False, takes_result and contributions.last_result.has_no_gradient
        try:
            contributions.drop()
            contributions.begin(0.0)
            self._shadow_backward()
            has_result = contributions.certainly_has_result()
            if takes_result and has_result:
                contributions.end()
                gradients = [parameter.grad for parameter in self._parameters]
            else:
                contributions.summed()  # which must be complete before the next sum begins
                if contributions.reduction.with_dummies:
                    contributions.used.end_reduction()
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        # Without a result, all ranks have skipped the backward, so the gradients accumulated before stay unreduced.
        contributions.window = Window() if has_result else window
        return has_result

    def _shadow_backward(self) -> None:
        arrivals = self._static_graph.learn(self._collective) if self._ddp.static_graph else None
        reducer.shadow_backward(self._ddp, self._parameters, arrivals)

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        """Run a backward that contributes only the gradients which this rank had accumulated, if any."""
        contributions, flags = self._contributions, self._channel.headers.flags(self)
        reduction = contributions.reduction = Reduction(with_buffers=flags[WITH_BUFFERS] > 0)
        if flags[WEIGHTED] or contributions.was_weighted:
            contributions.agree_on_weights(flags[WEIGHTED])
        if reduction.with_buffers and self._buffers is not None:
            self._buffers.main_hook()
        if not contributions.window.unreduced:
            contributions.drop()
        elif contributions.last_result.may_remain:
            contributions.add_last_result()
        window = contributions.window
        contributions.begin((window.weight or 0.0) if reduction.weighted else float(window.unreduced))
        self._shadow_backward()
        contributions.end()
        self._rebuild.holds_followers = self._rebuild.is_due  # active ranks announce the rebuild next


class Forwards:
    """Hooks on the forwards of a DDP module, which find the first gradient that enters the outputs of a forward.

    They also replace DDP's synchronisation of buffers, and restore the buffers after the forward of a dummy.

    Args:
        ddp: The module.
        parameters: Its parameters, in the reducer's order.
        buffers: The broadcast of its buffers; ``None`` if the module has no buffers.
    """

    def __init__(
        self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], buffers: BufferSync | None
    ) -> None:
        self._ddp, self._parameters, self._buffers = ddp, parameters, buffers
        self.norms = synchronised_norms(cast("torch.nn.Module", ddp.module))
        """The layers that compute with the samples of all ranks together."""
        self.reduces_next = False
        """Whether the reducer reduces in the next backward of any forward, since a synchronised forward has run."""
        self._outputs: list[ref[torch.Tensor]] = []
        self._parameter_hook: Any = None  # the handle of a hook on the parameters, if a forward shows no output tensor
        self._writes_before: Writes = []  # the writes to each gradient before the forward

    def attach(
        self, channel: Channel, on_forward: Callable[[], None], on_backward: Callable[[bool, torch.Tensor], None]
    ) -> list[Any]:
        """Register the hooks; called when a block is entered.

        Args:
            channel: The channel of the block.
            on_forward: Called before each forward with grad.
            on_backward: Called when a gradient enters the outputs of a forward, with whether that forward synchronises,
                and with the gradient.

        Returns:
            The handles of the hooks, for the caller to remove when the block is left. Later hooks are added to it.
        """
        ddp, inner = self._ddp, cast("torch.nn.Module", self._ddp.module)
        self._channel, self._on_forward, self._on_backward = channel, on_forward, on_backward
        # A backward inside the forward is possible until a forward returns a tensor that can start a backward.
        self._may_run_backward_inside = True
        self._param_sync = ddp.require_forward_param_sync
        reducer.suppress_buffer_sync(ddp)
        self.inner = InnerForward(inner, channel, cast("set[str]", ddp.parameters_to_ignore))
        """The forward of the module inside, and its tensors that dummies leave unchanged."""
        self._direct_call_hook = inner.register_forward_pre_hook(ModuleHook(run_uncompiled, self._before_inner))
        # The user's hooks run between these two.
        before = ddp.register_forward_pre_hook(ModuleHook(self._before), prepend=True, with_kwargs=True)
        after = ddp.register_forward_hook(ModuleHook(self._after))
        self._handles = self.inner.handles = list[Any]([before, after, self._direct_call_hook])
        return self._handles

    def detach(self) -> None:
        """Restore the module; called when the block is left and the handles are removed."""
        self.inner.remove()
        if self._parameter_hook is not None:
            self._parameter_hook.remove()
            self._parameter_hook = None
        del self.inner, self._channel, self._on_forward, self._on_backward  # these hold a batch, or the module
        self._ddp.require_forward_param_sync = self._param_sync
        self.reduces_next = False

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The outputs of the last synchronised forward that still exist, under ``find_unused_parameters``."""
        return [tensor for output in self._outputs if (tensor := output()) is not None]

    def _before_inner(self, *_: Any) -> None:
        if reducer.is_in_forward(self._ddp):
            raise JoinError(
                "DistributedDataParallel.forward was called directly, so Join did not see the call. Call the module"
                " itself: ddp(...). [J108]"
            )

    @objects.not_compiled
    def _before(self, module: Any, *arguments: Any) -> None:
        if objects.compiler_under_way() is not None:
            return objects.call_uncompiled(self._before, module, *arguments)
        if self.inner.is_kept:  # since a part of a LossGate ran, or since a forward that raised
            self.inner.restore()
        if self._direct_call_hook is not None:
            self._direct_call_hook.remove()  # the module itself is called, and will be in later steps
            self._direct_call_hook = None
        if objects.is_in_torch_join(self._ddp):
            raise JoinError(IN_TORCH_JOIN)
        channel = self._channel
        if channel.scaling.flows and not autograd.in_backward():  # the last backward raised
            channel.scaling.flows = False
        if self.norms and any(norm.training for norm in self.norms.values()):
            refuse_in_plain_block(self._ddp, "which contains SyncBatchNorm in training mode", channel)
        watches = channel.step.shadowing or channel.step.may_be_last
        if channel.late_use is not None:
            channel.late_use = channel.late_use.called(arguments)
        if self._buffers is not None:
            reducer.suppress_buffer_sync(self._ddp)
            self._buffers.notice_new_shapes()
        if torch.is_grad_enabled():
            self._on_forward()
        if self._may_run_backward_inside:
            self._writes_before = writes_to(parameter.grad for parameter in self._parameters)
        if watches:
            self.inner.begin(arguments)
            self.inner.put()

    @objects.not_compiled
    def _after(self, module: Any, args: Any, output: Any) -> None:
        if objects.compiler_under_way() is not None:
            return objects.call_uncompiled(self._after, module, args, output)
        if self.inner.is_kept:
            self.inner.restore()
        if not torch.is_grad_enabled():
            return
        if self._buffers is not None and self._buffers.is_pending:
            self._buffers.fulfil()  # the broadcast had to wait for the end of the forward
        is_one = isinstance(output, torch.Tensor) and output.requires_grad  # the usual case
        outputs = [output] if is_one else tensors_with_grad(output)
        if self._may_run_backward_inside:
            self._refuse_backward_inside()
            self._may_run_backward_inside = not outputs
        synchronises = bool(self._ddp.require_backward_grad_sync)
        self.reduces_next |= synchronises
        if synchronises and self._ddp.find_unused_parameters:
            self._outputs = [ref(tensor) for tensor in outputs]
        on_backward = self._on_backward_of_dummy if self._channel.step.shadowing else self._on_backward
        hook = partial(on_backward, synchronises)
        for tensor in outputs:
            handle = on_gradient(tensor, hook)
            if tensor.is_leaf:  # the user's own tensor, returned unchanged, outlives the graph
                self._handles.append(handle)
        if not outputs:  # they are hidden in an object, so the first gradient of a parameter marks the backward
            if self._parameter_hook is not None:
                self._parameter_hook.remove()  # the hook of an earlier forward would run first
            self._parameter_hook = torch.autograd.graph.register_multi_grad_hook(self._parameters, hook, mode="any")

    def _on_backward_of_dummy(self, synchronises: bool, gradient: torch.Tensor) -> None:
        if "_channel" in vars(self):  # otherwise the block has ended, and this is an ordinary DDP module
            if not self._channel.step.in_loop:
                refuse_backward_on_dummy(cast("object", self._ddp.module))
            self.inner.keep_in_backward()
            self._on_backward(synchronises, gradient)

    def _refuse_backward_inside(self) -> None:
        if writes_to(parameter.grad for parameter in self._parameters) != self._writes_before:
            name = type(cast("object", self._ddp.module)).__name__
            raise JoinError(
                f"A backward ran inside the forward of DistributedDataParallel({name}). It can neither be announced nor"
                " shadowed there. Return the loss from the forward, and call backward() after it. [J109]"
            )


class Contributions:
    """Gradients of this rank since the last reduction, and the mean that the next reduction makes over all ranks.

    Args:
        ddp: The module.
        parameters: Its parameters, in the reducer's order.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ddp, self._parameters = ddp, parameters
        self.memory = memory_of(ddp)
        """The window and the last result that a block leaves to the next one."""
        self.window = Window()
        self.last_result = LastResult(parameters)
        self.used = UsedParameters(ddp, parameters)
        self.factors = Factors(parameters)
        self.over_all_ranks = True
        """Whether gradients without weights are divided by the world size (``divide_by_initial_world_size``)."""
        self.reduction = Reduction()
        """The last reduction that was announced."""
        self.was_weighted = False
        """Whether the last reduction was weighted on which the headers of all active ranks agreed."""

    def attach(self, join: Join, burst: GradientSync) -> None:
        """Prepare for a block that is entered.

        Args:
            join: The ``Join`` of the block.
            burst: The burst that announces the reductions.
        """
        self._channel, self._burst, self._world_size = join.channel, burst, join.collective.world_size
        self._has_comm_hook = reducer.has_comm_hook(self._ddp)
        self._leaves_unused = self._ddp.find_unused_parameters or bool(self._ddp.static_graph)
        self.used.attach(join)
        self.last_result.may_remain = self.memory.may_have_result
        self.window, self.was_weighted = Window(), False

    def detach(self) -> None:
        """Release the block that is left, and keep its unreduced window for the next block."""
        if self.window.unreduced:
            self.memory.open_window, self.memory.taken_out = self.window, dict(self.last_result.taken_out)
        if self.factors.factor != 1.0:
            self.factors.multiply_by(1.0)
        self.used.detach()
        if self.last_result.taken_out:
            self.last_result.put_back()
        self.memory.may_have_result = self.last_result.may_remain
        del self._channel, self._burst  # these hold the module

    # -- accumulated gradients ----------------------------------------------------------------------------------------

    def record_backward(self, weight: float | None, *, in_loop: bool) -> None:
        """Record the beginning of a backward in the window.

        Args:
            weight: The weight of its loss, or ``None`` if losses have no weights.
            in_loop: Whether it begins in the body of a loop over ``Join.iterate``.

        Raises:
            JoinError: In a plain block, if some backwards of the accumulation window have weights and others do not. In
                a loop, if gradients of another window are unreduced.
        """
        window = self.window
        if window.unreduced or window.number or window.weight:
            self.drop_if_zeroed()
        if in_loop or self.window.number:
            self.enter_step()
        if weight == 0 or self.factors.factor != 1.0:
            self.factors.multiply_by(0.0 if weight == 0 else 1.0)
        if in_loop:
            return
        window = self.window
        if window.unreduced and (window.weight is None) != (weight is None):
            raise JoinError(
                "join.weight was set or unset in an accumulation window. Set it in every step or in none. [J111]"
            )
        if weight is not None:
            window.weight, window.unit = (window.weight or 0.0) + weight, self._channel.scaling.unit

    def remember_writes(self) -> None:
        """Record the writes to the gradients at the end of a backward that leaves them unreduced."""
        self.window.writes = writes_to(parameter.grad for parameter in self._parameters)

    def enter_step(self) -> None:
        """Begin a new window if the step is in another window of a loop over ``Join.iterate``, or after the loop.

        Raises:
            JoinError: If gradients of the window before are unreduced.
        """
        window, channel = self.window, self._channel
        in_loop = channel.step.in_loop
        number = channel.step.window
        if window.number != number:
            if window.unreduced:
                raise JoinError(
                    f"Gradients of an earlier step are still unreduced at the start of {self._burst.join_name}. A loop"
                    " over join.iterate has to know its accumulation windows. Pass join.iterate(loader, window=k), or"
                    " call zero_grad() between loops. [J471]"
                )
            window = self.window = Window(number=number)
            if self.used.counts:
                self.used.begin_window()
        window.with_dummies |= in_loop and channel.step.contributors < self._world_size

    def drop_if_zeroed(self) -> None:
        """Drop the window if ``zero_grad`` was called since its last backward, so that it does not count."""
        if self._was_zeroed(self.window):
            self.window = Window()
            self.last_result.taken_out.clear()

    def _was_zeroed(self, window: Window) -> bool:
        """Return whether ``zero_grad`` was called since the last backward of a window.

        It sets gradients to ``None``, or writes 0 to them. Gradients of 0 do not show a call without a write, because a
        batch may produce them.
        """
        if self.last_result.has_no_gradient:
            return True
        is_written = window.writes and window.writes != writes_to(parameter.grad for parameter in self._parameters)
        return bool(is_written) and self.last_result.gradients_are_zero

    def resume_window(self) -> None:
        """Resume the window that the last block has left open; called when the first backward begins.

        The window is dropped if ``zero_grad`` was called since. A rank that only shadows does not call this, since it
        cannot know whether the loop would have called ``zero_grad``.
        """
        memory = self.memory
        window, memory.open_window, taken_out, memory.taken_out = memory.open_window, None, memory.taken_out, {}
        if window is not None and not self._was_zeroed(window):
            self.window, unit = window, self._channel.scaling.unit
            self.last_result.taken_out = taken_out
            self.last_result.add(-1.0)
            if window.weight is not None and window.unit != unit:
                reducer.multiply_gradients(self._parameters, window.unit / unit)

    @property
    def holds_unreduced(self) -> bool:
        """Whether the gradients are this rank's own and unreduced, from this block or from the last one."""
        has_open_window = self.memory.open_window is not None
        return self.window.unreduced or (has_open_window and not self.last_result.has_no_gradient)

    def drop(self) -> None:
        """Drop the gradients, so that this rank contributes nothing to the next reduction."""
        self.memory.open_window = None
        for parameter in self._parameters:
            parameter.grad = None
        if self._leaves_unused:
            reducer.forget_use(self._ddp)

    def add_last_result(self) -> None:
        """Make the new mean contain the last result once, if the gradients still contain it.

        Each rank adds it as many times as that takes. Only the mean over all ranks waits for its header::

            in a loop, losses are scaled, or the mean is over all ranks     once
            in a loop, the mean is over contributors                        once with data, 0 times on a dummy
            weighted mean                                                   weight / unit times
            mean over all ranks, headers travel in messages                 once, to the result
            mean over all ranks                                             world size / contributors times
            mean over contributors                                          once
        """
        window, result, step = self.window, self.last_result, self._channel.step
        if self._channel.step.in_loop:
            times = float(not step.shadowing or self.over_all_ranks or self._channel.scaling.in_use is True)
        elif self.reduction.weighted:
            times = (window.weight or 0.0) / self._channel.scaling.unit
        elif self._adds_result_later():
            if not (result.taken_out or window.unreduced):
                result.take_out()
            return
        elif self.over_all_ranks:
            times = self._world_size / self._channel.headers.flags(self._burst)[CONTRIBUTES]
        else:
            times = 1.0
        if times != 1 and not result.taken_out and (step.shadowing or not window.unreduced):
            result.take_out()
        if result.taken_out:
            result.add(times)

    def _adds_result_later(self) -> bool:
        """Return whether the last result, once taken out, is added after the reduction; the same on all ranks.

        In that case no rank waits for the number of contributors in the header, which :meth:`add_last_result` divides
        by. This applies only if headers take long to arrive and no joined rank needs the gradients, since a joined rank
        cannot know whether the other ranks have zeroed theirs.
        """
        channel = self._channel
        if not self.over_all_ranks or self.reduction.weighted or channel.step.in_loop or channel.headers.depth == 1:
            return False
        return all(isinstance(m.joinable, DDPBurst) for m in channel.roster.listed if m.joinable.communicates)

    def certainly_has_result(self) -> bool:
        """Return whether active ranks certainly contributed to a reduction in which this rank contributed nothing.

        ``False`` means that they may have contributed or not.
        """
        may_be_older, headers = self.last_result.may_remain and self.over_all_ranks, self._channel.headers
        # A joined rank may have contributed the gradients that it had accumulated.
        may_be_joined = headers.flags(self._burst)[CONTRIBUTES] > headers.announced(self._burst)
        if may_be_older or may_be_joined or reducer.hooks_remember(self._ddp):
            return False
        return not self.last_result.gradients_are_zero

    def agree_on_weights(self, using: int) -> None:
        """Use weights in the reduction that begins in a plain block if all active ranks do.

        This is called on a joined rank, and on a rank that changes between weights and no weights. Other ranks need not
        wait for the header.

        Args:
            using: The number of ranks that use weights, from the header.

        Raises:
            ValueError: If some active ranks use weights and others do not.
        """
        if using and using != (announced := self._channel.headers.announced(self._burst)):
            raise ValueError(
                f"join.weight is set on {using} ranks and not on {announced - using}. Set it on all ranks or on none."
                " [J277]"
            )
        self.reduction.weighted = self.was_weighted = using > 0

    # -- the mean -----------------------------------------------------------------------------------------------------

    def begin(self, weight: float) -> bool:
        """Begin a reduction, and start to sum the contributors or their weights if the sum is needed and not known.

        Args:
            weight: The sum of this rank's weights. Without weights, 1 if this rank contributes, and 0 if it does not.

        Returns:
            Whether :meth:`end` has to be called after the reduction.
        """
        reduction = self.reduction
        if self._channel.step.in_loop:
            has_unscaled_losses = not (self.over_all_ranks or self._channel.scaling.in_use)
            reduction.is_scaled = has_unscaled_losses and 0 < self._channel.step.contributors < self._world_size
        else:
            reduction.is_scaled = reduction.weighted or not self.over_all_ranks
            if reduction.weighted or (reduction.with_buffers and reduction.is_scaled):
                reduction.running_sum = self._channel.sums.sum_float(weight)
            if reduction.weighted:
                reduction.unit, reduction.has_parts = self._channel.scaling.unit, self._has_comm_hook
            if reduction.has_parts and (total := self.summed()):
                factor = self._world_size * reduction.unit / total
                if self.factors.factor:
                    self.factors.multiply_by(factor)
                reducer.multiply_gradients(self._parameters, factor)
        reduction.with_dummies, self.window = self.used.counts and self.window.with_dummies, Window()
        return reduction.is_scaled or reduction.with_dummies or bool(self.last_result.taken_out)

    def summed(self) -> float:
        """Return the sum of weights or contributors in the current reduction, and wait for it if needed."""
        reduction = self.reduction
        if (work := reduction.running_sum) is not None:
            total = self._channel.guard.wait(work, "sums weights or contributors", work.total)
            reduction.total, reduction.running_sum = total, None
            if reduction.weighted:
                self._channel.scaling.learn(total / self._world_size, len(self._channel.roster.backwards))
        if reduction.total is not None:
            return reduction.total
        if self._channel.step.in_loop:
            return self._channel.step.contributors
        return self._channel.headers.flags(self._burst)[CONTRIBUTES]

    def end(self) -> None:
        """Turn the result of a reduction, which is the sum divided by the world size, into the requested mean."""
        reduction, scale = self.reduction, self._world_size * self.reduction.unit
        touched = reducer.used_anywhere(self._ddp) if self._leaves_unused else None
        if self.last_result.taken_out:
            if self._adds_result_later():
                self.last_result.add(1.0)
            self.last_result.end_reduction(touched)
        if reduction.has_parts:
            self.factors.multiply_by(1.0)
        elif reduction.is_scaled and (total := self.summed()) and (factor := scale / total) != 1:
            reducer.multiply_gradients(self._parameters, factor, touched)
        if reduction.with_dummies:
            self.used.end_reduction()


class LastResult:
    """Result of the last reduction, as far as it remains in the gradients.

    Args:
        parameters: The parameters of the module, in the reducer's order.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.may_remain = True
        """Whether the gradients may contain the last result."""
        self.taken_out: dict[int, torch.Tensor] = {}
        """The parts of the last result that were taken out of the gradients, by index of the parameter."""

    @property
    def has_no_gradient(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(parameter.grad is None for parameter in self._parameters)

    @property
    def gradients_are_zero(self) -> bool:
        """Whether all gradients are 0, or there are none; reads all of them."""
        return are_zero(parameter.grad for parameter in self._parameters if parameter.grad is not None)

    def notice_zero_grad(self) -> None:
        """Check whether ``zero_grad`` has set all gradients to ``None``."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                return
        self.may_remain = False

    @torch.no_grad()
    def take_out(self) -> None:
        """Take the last result out of the gradients, before new gradients are accumulated there."""
        gradients = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
        self.taken_out |= zip(gradients, reducer.take_out(list(gradients.values())), strict=True)

    @torch.no_grad()
    def add(self, times: float) -> None:
        """Add the parts that were taken out to the gradients.

        Args:
            times: The factor of the parts.
        """
        gradients = {i: gradient for i in self.taken_out if (gradient := self._parameters[i].grad) is not None}
        reducer.add_to(list(gradients.values()), [self.taken_out[i] for i in gradients], times)

    def put_back(self) -> None:
        """Put the parts back into the gradients; called when the block is left, possibly before a reduction."""
        self.add(1.0)
        self.taken_out.clear()

    @torch.no_grad()
    def end_reduction(self, used: torch.Tensor | None) -> None:
        """Put the parts back into the gradients that a reduction did not write, and discard the others.

        Args:
            used: Whether any rank used each parameter, of shape ``(number of parameters,)``. The reduction writes only
                the gradients of these. ``None`` means that it wrote all gradients.
        """
        for index, result in self.taken_out.items():
            gradient = self._parameters[index].grad
            if gradient is not None and used is not None:
                gradient.copy_(torch.where(used[index].to(result.device), gradient, result))
        self.taken_out.clear()
