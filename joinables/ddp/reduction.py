"""The gradient reduction of a DDP module, from the mean that was asked for to the reducer's own backward.

:class:`GradientSync` is the burst; ``joinables.ddp`` has its place in a step and the order of collectives. It uses
:class:`Forwards`, which sees when a backward begins, and :class:`Contributions`, the share of each rank and the mean of
all shares. Contributions consist of the :class:`Window` of backwards that are not reduced yet and the
:class:`LastResult` that is still in the gradients. ``joinables.ddp.parameters`` has what is recorded for each
parameter.

*The mean.* DDP divides the sum over ranks by their number. The mean over contributors is that times ``world_size /
contributors``; the weighted mean, of losses that ``Join.scale`` has multiplied by ``weight / unit``, is that times
``world_size * unit / sum of weights``. A comm hook, which may round gradients or carry errors over to the next step, is
given parts of that mean itself: there the sum of weights is awaited before the backward.

*The last result.* DDP reduces all that is in ``grad``, and without ``zero_grad`` that has the last reduction's result,
which every rank has that had data then. It has to be in the new mean once. So each contributor adds it so often:
``weight`` times under a weighted mean, ``world_size / contributors`` times under a mean over all ranks, once under a
mean over contributors. Between machines the number of contributors takes its time: then the last result is set aside
and added to the new one, unless a joined rank steps on the gradients (``ZeroRedundancyOptimizer``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join, JoinError, JoinHook, ProtocolError
from join.batch import StepBatch
from join.collectives._torch_private import on_gradient
from join.protocol.channel import Channel
from join.transfer import Exchange
from joinables._torch import autograd, objects, reducer
from joinables.ddp.buffers import BucketRebuild, BufferSync, DDPBurst
from joinables.ddp.parameters import Factors, StaticGraph, UsedParameters
from joinables.dummy_forward import InnerForward, check_backward_on_dummy
from joinables.modules import ModuleHook, adopt_gradients, tensors_with_grad
from joinables.own_collectives import mixing, refuse_synchronised_norms, synchronised_norms

WITH_BUFFERS, CONTRIBUTES, WEIGHTED = range(3)
"""The flags in the header of a reduction: it covers the buffers too, this rank contributes, weights are summed."""

IN_TORCH_JOIN = (
    "the module is in torch's own Join or model.join(), or was: leave that out, since this Join takes its place, and"
    " build the DistributedDataParallel anew [J107]"
)


@dataclass(slots=True)
class Window:
    """The backwards since the last reduction (under ``no_sync``, say); replaced by a new one when that is over.

    Attributes:
        unreduced: whether this rank has gradients that no reduction has included yet.
        weight: in a plain block, the sum of the weights of this rank's backwards; ``None`` if these are not weighted.
        number: that of the loop's window in which they were made, over ``Join.iterate``; 0 in a plain block.
        with_dummies: in such a loop, whether a rank had no data in one of them.
    """

    unreduced: bool = False
    weight: float | None = None
    number: int = 0
    with_dummies: bool = False


# Between blocks, and not on the module itself, which belongs to the user: what a rank has accumulated and not reduced,
# and what was written to its gradients by then; whether gradients may hold the last result; the static graph.
_left_over: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[Window, list[tuple[int, int]]]]
_left_over = weakref.WeakKeyDictionary()
_kept: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()


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
    flag_count = 3

    def __init__(self, ddp: DistributedDataParallel, buffers: BufferSync | None, rebuild: BucketRebuild) -> None:
        super().__init__(ddp)
        self._buffers, self._rebuild = buffers, rebuild
        self._parameters = reducer.reduced_parameters(ddp)
        self._accumulators = autograd.accumulators(self._parameters)
        self._static_graph = StaticGraph(ddp, self._parameters)
        self._forwards = Forwards(ddp, self._parameters, buffers)
        self.needs_scale = bool(self._forwards.norms)  # else what is NaN on a dummy reaches other ranks
        self._contributions = Contributions(ddp, self._parameters)
        self._backward = -1  # the number of the last one in which a gradient entered
        self._at_end: list[Callable[[], None]] | None = None  # calls at the end of one that runs others inside it

    @override
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        """Return itself.

        Raises:
            ValueError: if torch's own ``Join`` is around the module, or a layer has sparse gradients.
        """
        if objects.is_in_torch_join(self._ddp):
            raise ValueError(IN_TORCH_JOIN)
        for name, layer in cast("Iterator[tuple[str, torch.nn.Module]]", self._ddp.named_modules()):
            sparse = isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
            if sparse and layer.weight.requires_grad:
                raise ValueError(
                    f"{name!r} has sparse gradients, which a rank without data cannot take over; build it with"
                    " sparse=False [J110]"
                )
        self._contributions.over_all_ranks = divide_by_initial_world_size
        return self

    @override
    def attach(self, join: Join) -> None:
        self._static_graph.check()
        super().attach(join)
        self._join, self._scope = join, join.channel.roster.scopes[-1]
        self._contributions.attach(join, self)
        self.own_steps = 0
        self._handles = self._forwards.attach(join.channel, self._begin_forward, self._gradient_enters)

    @override
    def detach(self) -> None:
        super().detach()  # from here on, what is left of the graphs of this block is an ordinary DDP module's
        self._forwards.detach()
        self._contributions.detach()
        del self._join, self._scope

    @property
    @override
    def mixes_ranks(self) -> str:
        return mixing(self.join_name, self._forwards.norms)

    @override
    def exchange(self, source: int) -> Exchange:
        """Copy parameters from the last joiner; gradients too, but for those that are still to be reduced.

        Which parameters have a gradient is the same on all ranks afterwards: ``_begin_forward`` depends on it.
        """
        unreduced, result = self._contributions.holds_unreduced, self._contributions.last_result
        keeps, parameters = unreduced or self._collective.rank == source, reducer.parameters(self._ddp)
        present = [parameter.grad is not None for parameter in self._parameters]
        held = [(parameter.grad, parameter.dtype) for parameter in self._parameters if not unreduced]
        gradients = [gradient.to(dtype) for gradient, dtype in held if gradient is not None]
        inbox = yield parameters, present, gradients, result.kept
        theirs, present, gradients, kept = inbox.skeleton
        inbox.fill(theirs, parameters)
        adopt_gradients(inbox, self._parameters, present, gradients, keeps=keeps)
        yield ""
        if not keeps:
            result.kept = kept

    @override
    def synchronise_own(self, source: int) -> None:
        if not reducer.has_finished(self._ddp):
            self._raise_unfinished()

    @override
    def flags(self, active: bool) -> Sequence[bool]:
        """As the flags above. A joined rank contributes, too, once: what it had accumulated when it ran out."""
        contributions = self._contributions
        if active:
            return (contributions.with_buffers, True, contributions.weighted)
        if contributions.window.unreduced:
            contributions.forget_zeroed()
        return (False, contributions.window.unreduced, False)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        """Announce the backward, if that is due now, and synchronise buffers; called before a forward with grad."""
        contributions, channel, buffers = self._contributions, self._channel, self._buffers
        if self._ddp.find_unused_parameters:
            if contributions.last_result.has_no_gradient and not self._forwards.armed:
                reducer.forget_use(self._ddp)
            if channel.lockstep is not None:
                contributions.used.watch()
        synchronises = self._ddp.require_backward_grad_sync
        if buffers is not None and channel.is_in_loop_body and not synchronises:
            buffers.set_source(channel.step.first_with_data)  # nothing is announced, and the forward changes them
        if not synchronises or self.is_pending:
            return
        if channel.lockstep is not None and channel.lockstep.leave is not None:
            channel.lockstep.leave()
        # How often the last result is to be added is known when the contributors are: so the header comes later, when
        # zero_grad may have been called. And contributors that a forward announces must be counted again (some may skip
        # the backward); with buffers it needs a header anyway. In a loop nothing is sent, and a backward that this rank
        # skips is pending since its forward.
        all_ranks_run, saves_header = channel.lockstep is not None, buffers is not None
        if contributions.over_all_ranks:
            if contributions.last_result.kept and not all_ranks_run:
                contributions.last_result.look()
            saves_header = not contributions.last_result.kept
        early = channel.roster.early is self and (saves_header or all_ranks_run)
        contributions.with_buffers = early and buffers is not None
        if early:
            contributions.weighted = not channel.is_in_loop_body and self._scope.weight is not None
            channel.announce(self)
            self.is_pending = True
        elif buffers is not None:
            channel.announce(buffers)
        if buffers is not None:
            buffers.announced()

    # -- backward -----------------------------------------------------------------------------------------------------

    # The calls here find cold caches after a step's arithmetic and cost microseconds each, as much as a small layer: so
    # mostly a condition is tested before a call and not inside it.

    def _gradient_enters(self, synchronised: bool, gradient: torch.Tensor) -> None:
        """Begin a backward with the first gradient of it that enters the module, if any will reach its parameters."""
        backward = autograd.backward_under_way()
        if backward == self._backward or not self._handles:
            return
        self._backward, self._at_end = backward, None
        if autograd.will_run(self._accumulators):
            self._begin_backward(synchronised)
            return
        # This is torch.autograd.grad; or the parameters are behind reentrant checkpoints, which run backwards of their
        # own inside this one, each with an end of its own.
        at_end = self._at_end = list[Callable[[], None]]()
        autograd.once_before(self._accumulators, partial(self._begin_backward, synchronised))

        def end() -> None:
            for call in at_end:
                call()

        autograd.after_reduction(end)

    def _begin_backward(self, synchronised: bool) -> None:
        contributions, channel, in_loop = self._contributions, self._channel, self._channel.is_in_loop_body
        if not in_loop:
            if channel.lockstep is not None and channel.lockstep.leave is not None:
                channel.lockstep.leave()
            self.own_steps += 1
        if self._ddp in _left_over:
            contributions.take_over()
        weight = channel.step.weight if in_loop else self._scope.weight
        if in_loop:
            channel.scaling.check_backward(self)
        elif (weight is not None) != channel.scaling.flows:
            raise JoinError(
                f"join.weight is {weight}, and the loss of {self.join_name} is"
                f" {'' if channel.scaling.flows else 'not '}scaled by it; set the weight before the forward, and call"
                " join.scale(loss).backward() [J472]"
            )
        contributions.note_backward(weight, in_loop=in_loop)
        reduces, result = self._forwards.armed or synchronised, contributions.last_result
        # Else every rank gives what is in its gradients, the last result or None.
        if result.kept and not (reduces and channel.lockstep is not None and not contributions.scales_in_loop):
            result.look()
        if reduces:
            self._begin_reduction(weight)
            return
        sets_aside = weight is not None or contributions.over_all_ranks
        if sets_aside and result.kept and not contributions.window.unreduced and not in_loop:
            result.set_aside()
        contributions.window.unreduced = True

    def _begin_reduction(self, weight: float | None) -> None:
        """Begin the reduction that the backward under way ends with; announce it, if the forward has not."""
        contributions, channel = self._contributions, self._channel
        if not self._forwards.armed:  # a second backward, of which DDP itself would not reduce the gradients
            reducer.expect_backward(self._ddp, self._forwards.outputs)
        if not self.is_pending:
            contributions.with_buffers = False
            contributions.weighted = weight is not None and not channel.is_in_loop_body
            channel.announce(self)
        if channel.lockstep is None:
            if contributions.weighted != (contributions.window.weight is not None):
                raise JoinError(
                    "join.weight was set or unset between forward and backward; set it before the forward [J106]"
                )
            if contributions.weighted != contributions.weighted_last:
                contributions.agree_on_weights(channel.headers.flags(self)[WEIGHTED])
        if contributions.last_result.kept:
            contributions.add_last_result()
        self.is_pending = False
        needs_end = contributions.begin(1.0 if contributions.window.weight is None else contributions.window.weight)
        if self._ddp.static_graph:
            self._static_graph.watch(self._collective)
        if channel.guard.timeout is not None and channel.lockstep is None:
            autograd.after_backward(channel.headers.read)  # before the reducer waits, who looks for no missing rank
        if needs_end or self._rebuild.is_due or channel.lockstep is None:
            if self._at_end is None:  # a layer calls less than after_reduction
                autograd.after_backward(partial(autograd.after_backward, self._finish_reduction))
            else:
                self._at_end.append(self._finish_reduction)
        self._forwards.armed, contributions.last_result.kept = False, True

    def _raise_unfinished(self) -> NoReturn:
        """``backward(inputs=...)`` has left parameters out, or no output of the module depends on them."""
        raise JoinError(
            f"{self.join_name} did not reach all parameters that the module waits for; name them all in"
            " backward(inputs=...), leave it out, or build the module with find_unused_parameters=True where a loss"
            " does not depend on all of them [J473]"
        )

    def _finish_reduction(self) -> None:
        if not reducer.has_finished(self._ddp):
            self._raise_unfinished()
        self._contributions.end()
        if self._rebuild.is_due:
            self._rebuild.run()

    @override
    def fulfil(self) -> None:
        """Take part in the reduction of a backward that was skipped, without touching the gradients.

        Only on a dummy, the result is kept: the optimizer may be sharded, and step for all.

        Raises:
            ProtocolError: if others did not skip it, and this rank had something to give.
        """
        self.is_pending = False
        contributions, channel = self._contributions, self._channel
        contributions.take_over()
        if channel.lockstep is not None:
            contributions.last_result.look()
            contributions.note_step()
        elif contributions.weighted != contributions.weighted_last:
            contributions.agree_on_weights(channel.headers.flags(self)[WEIGHTED])
        has_data = contributions.window.unreduced or not (self._join.shadowing or channel.has_run_out)
        missed = self._miss_reduction(takes_part=not has_data) and has_data
        self._forwards.armed = False
        if self._rebuild.is_due:
            self._rebuild.run()
        if missed and not channel.has_run_out:
            why = (
                f"rank {self._collective.rank} skipped {self.join_name}, which others ran, so it has no gradients where"
                " they have. Skip it on all ranks or on none: let them agree by an all-reduce, or multiply the loss by"
                " 0 [J113]"
            )
            channel.guard.raise_alone(ProtocolError(why))

    def _miss_reduction(self, *, takes_part: bool) -> bool:
        """Give nothing to a reduction, and take nothing; whether active ranks gave something.

        Args:
            takes_part: whether to take what they gave, if there are no gradients here.
        """
        contributions = self._contributions
        kept, window = [parameter.grad for parameter in self._parameters], contributions.window
        if self._ddp.gradient_as_bucket_view:  # else what others give would be written there
            kept = [None if gradient is None else gradient.clone() for gradient in kept]
        has_result, takes_part = False, takes_part and contributions.last_result.has_no_gradient
        try:
            contributions.drop()
            contributions.begin(0.0)
            self._shadow_backward()
            has_result = contributions.surely_has_result()
            if takes_part and has_result:
                contributions.end()
                kept = [parameter.grad for parameter in self._parameters]
            else:
                contributions.wait()
                contributions.end_without_result()
        finally:
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient
        # Without a result all have skipped it: what was accumulated before is still to be reduced.
        contributions.window = Window() if has_result else window
        return has_result

    def _shadow_backward(self) -> None:
        arrivals = self._static_graph.learn(self._collective) if self._ddp.static_graph else None
        reducer.shadow_backward(self._ddp, self._parameters, arrivals)

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        """Run a backward with nothing but what was accumulated here."""
        contributions, flags = self._contributions, self._channel.headers.flags(self)
        contributions.with_buffers = flags[WITH_BUFFERS] > 0
        contributions.agree_on_weights(flags[WEIGHTED])
        if contributions.with_buffers and self._buffers is not None:
            self._buffers.main_hook()
        if contributions.window.unreduced:
            contributions.forget_zeroed()
        if not contributions.window.unreduced:
            contributions.drop()
        elif contributions.last_result.kept:
            contributions.add_last_result()
        window = contributions.window
        contributions.begin((window.weight or 0.0) if contributions.weighted else float(window.unreduced))
        self._shadow_backward()
        contributions.end()
        self._rebuild.holds_followers = self._rebuild.is_due  # which the active ranks announce next


class Forwards:
    """Watches the forwards of a DDP module, and tells when a gradient enters the outputs of one.

    Buffers are synchronised by ``buffers``, if there are any, instead of by DDP, and left as they were by the forward
    of a dummy.
    """

    def __init__(
        self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], buffers: BufferSync | None
    ) -> None:
        self._ddp, self._parameters, self._buffers = ddp, parameters, buffers
        self.norms = synchronised_norms(cast("torch.nn.Module", ddp.module))
        """The layers that compute with the samples of all ranks together."""
        self.armed = False
        """Whether the reducer reduces in the next backward: after a synchronised forward, whichever that belongs to."""
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._buffers_before: dict[str, torch.Tensor] = {}  # of a dummy's forward
        self._hidden: Any = None  # the handle of what waits for any gradient, where a forward shows no output
        self._written: list[tuple[int, int]] = []  # each gradient, before the forward

    def attach(
        self, channel: Channel, begins: Callable[[], None], enters: Callable[[bool, torch.Tensor], None]
    ) -> list[Any]:
        """Register the hooks; called when a block is entered.

        Args:
            channel: that of the block.
            begins: called before each forward with grad.
            enters: called with whether the forward synchronises, and with a gradient that enters the forward's outputs.

        Returns:
            The handles of hooks, to be removed when it is left; later ones are added to the list.
        """
        ddp, inner = self._ddp, cast("torch.nn.Module", self._ddp.module)
        self._channel, self._begins, self._enters = channel, begins, enters
        # Whether a backward inside the forward is looked for: until a forward returns what a backward can begin at.
        self._expects_backward_inside = True
        self._param_sync = ddp.require_forward_param_sync
        reducer.suppress_buffer_sync(ddp)
        self._inner = InnerForward(inner, channel, stands_in=not self.norms)
        before, after = ModuleHook(self._before), ModuleHook(self._after)
        self._unseen = inner.register_forward_pre_hook(ModuleHook(self._before_inner))
        # The hooks of the user are between these.
        handles = [ddp.register_forward_pre_hook(before, prepend=True), ddp.register_forward_hook(after), self._unseen]
        self._handles: list[Any] = handles
        return handles

    def detach(self) -> None:
        """Put the module back as it was; called when the block is left, and the handles are removed."""
        self._inner.remove()
        if self._hidden is not None:
            self._hidden.remove()
            self._hidden = None
        del self._inner, self._channel, self._begins, self._enters  # a batch, and what holds the module
        self._ddp.require_forward_param_sync = self._param_sync
        self.armed = False

    @property
    def outputs(self) -> list[torch.Tensor]:
        """What the last synchronised forward returned and is still alive, under ``find_unused_parameters``."""
        return [tensor for ref in self._outputs if (tensor := ref()) is not None]

    def _before_inner(self, *_: Any) -> None:
        if reducer.is_in_forward(self._ddp):
            raise JoinError(
                "DistributedDataParallel.forward was called directly, where Join cannot see it; call the module itself:"
                " ddp(...) [J108]"
            )

    def _before(self, *_: Any) -> None:
        if self._unseen is not None:
            self._unseen.remove()  # the module itself was called, and so it will be
            self._unseen = None
        if objects.is_in_torch_join(self._ddp):
            raise JoinError(IN_TORCH_JOIN)
        channel = self._channel
        if channel.scaling.flows and not autograd.in_backward():  # the last backward has raised
            channel.scaling.flows = False
        if self.norms:
            refuse_synchronised_norms(self._ddp, self.norms, channel)
        watches = channel.late_use is not None or channel.step.batch is not StepBatch.DATA
        if watches:
            channel.module_called()
        if self._buffers is not None:
            reducer.suppress_buffer_sync(self._ddp)
            if torch.is_grad_enabled():
                self._buffers.look()
        if torch.is_grad_enabled():
            self._begins()
        if self._expects_backward_inside:
            self._written = autograd.gradient_writes(self._parameters)
        if channel.step.shadowing:  # SyncBatchNorm's statistics are of all ranks, also on a dummy
            self._buffers_before = reducer.copied_buffers(self._ddp, but=self.norms)
        if watches:
            self._inner.put()

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if self._buffers_before:
            reducer.restore_buffers(self._ddp, self._buffers_before)
            self._buffers_before = {}
        if not torch.is_grad_enabled():
            return
        if self._buffers is not None:
            self._buffers.forward_ended()
        is_one = isinstance(output, torch.Tensor) and output.requires_grad  # by far the most often
        outputs = [output] if is_one else tensors_with_grad(output)
        if self._expects_backward_inside:
            self._refuse_backward_inside()
            self._expects_backward_inside = not outputs
        synchronises = bool(self._ddp.require_backward_grad_sync)
        self.armed |= synchronises
        if synchronises and self._ddp.find_unused_parameters:
            self._outputs = [weakref.ref(tensor) for tensor in outputs]
        enters = self._enters_on_dummy if self._channel.step.shadowing else self._enters
        hook = partial(enters, synchronises)
        for tensor in outputs:
            handle = on_gradient(tensor, hook)
            if tensor.is_leaf:  # the user's own tensor, passed through: it outlives the graph
                self._handles.append(handle)
        if not outputs:  # hidden in an object we cannot look into: the first parameter's gradient will tell
            self._watch_gradients(hook)

    def _enters_on_dummy(self, synchronises: bool, gradient: torch.Tensor) -> None:
        if "_channel" in vars(self):  # else the block is left, and this an ordinary DDP module
            check_backward_on_dummy(self._channel, cast("object", self._ddp.module))
            self._enters(synchronises, gradient)

    def _watch_gradients(self, enters: Callable[[torch.Tensor], None]) -> None:
        if self._hidden is not None:
            self._hidden.remove()  # one of an earlier forward, which would tell first
        watch = torch.autograd.graph.register_multi_grad_hook
        self._hidden = watch(self._parameters, enters, mode="any")

    def _refuse_backward_inside(self) -> None:
        if autograd.gradient_writes(self._parameters) != self._written:
            name = type(cast("object", self._ddp.module)).__name__
            raise JoinError(
                f"a backward ran inside the forward of DistributedDataParallel({name}), where it can be neither"
                " announced nor, on other ranks, shadowed. Return the loss from the forward, and call backward() after"
                " it [J109]"
            )


class Contributions:
    """What was accumulated since the last reduction, and how the next one makes a mean of it.

    The module's ``parameters`` are in the reducer's order.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ddp, self._parameters = ddp, parameters
        self.window = Window()
        self.last_result = LastResult(parameters)
        self.used = UsedParameters(ddp, parameters)
        self.factors = Factors(parameters)
        self.over_all_ranks = True
        """Whether to divide by the number of ranks where there are no weights (``divide_by_initial_world_size``)."""
        self.weighted = False
        """In a plain block: whether the reduction under way, or to come, makes the weighted mean."""
        self.weighted_last = False
        """What all active ranks said in the last header in which they did alike."""
        self.with_buffers = False
        """Whether the header covers the buffers too: sent in the forward, it cannot tell who will run a backward."""
        self._scales = False  # whether the result of the reduction under way is multiplied
        self._awaits: Callable[[], float] | None = None  # waits for the sum under way, of weights or contributors
        self._total: float | None = None  # that sum, once it is there
        self._unit = 1.0  # of the losses that the reduction under way is of
        self._are_parts = False  # whether gradients are parts of the mean already

    def attach(self, join: Join, burst: GradientSync) -> None:
        """Prepare for a block that is entered, in which the reduction is announced as ``burst``."""
        self._channel, self._burst, self._world_size = join.channel, burst, join.collective.world_size
        self._has_comm_hook = reducer.has_comm_hook(self._ddp)
        self._leaves_unused = self._ddp.find_unused_parameters or bool(self._ddp.static_graph)
        self._channel.scaling.attach_module()
        self.used.attach(join)
        self.last_result.kept = _kept.get(self._ddp, True)
        self.window, self.weighted_last = Window(), False

    def detach(self) -> None:
        """Let go of the block that is left, and keep what is accumulated for the next one."""
        if self.window.unreduced and not self.last_result.aside:  # which is put back into the gradients
            _left_over[self._ddp] = self.window, autograd.gradient_writes(self._parameters)
        self.factors.multiply_by(1.0)
        self._channel.scaling.detach_module()
        self.used.detach()
        self.last_result.put_back()
        _kept[self._ddp] = self.last_result.kept
        del self._channel, self._burst  # which hold the module

    # -- what was accumulated, and by whom ----------------------------------------------------------------------------

    def note_backward(self, weight: float | None, *, in_loop: bool) -> None:
        """Note that a backward begins, of a loss of this ``weight``.

        Raises:
            JoinError: in a plain block, if others of its window of accumulation were weighed and it is not, or the
                other way round; else as :meth:`note_step` does.
        """
        window = self.window
        if window.unreduced or window.number or window.weight:
            self.forget_zeroed()
        if in_loop or self.window.number:
            self.note_step()
        if weight == 0 or self.factors.factor != 1.0:
            self.factors.multiply_by(0.0 if weight == 0 else 1.0)
        if in_loop:
            return
        window = self.window
        if window.unreduced and (window.weight is None) != (weight is None):
            raise JoinError(
                "join.weight was set or unset in a window of accumulation; set it at every step or at none [J111]"
            )
        if weight is not None:
            window.weight = (window.weight or 0.0) + weight

    def note_step(self) -> None:
        """Note that a backward begins in another window of the loop over ``Join.iterate``, or in a plain block.

        Raises:
            JoinError: if gradients of another window are left unreduced, or of before or in the loop.
        """
        window, contributors = self.window, self._channel.step.contributors
        number = 0 if contributors is None else self._channel.scaling.window
        if window.number != number:
            if window.unreduced:
                raise JoinError(
                    f"{self._burst.join_name} began, and gradients of an earlier step are left unreduced, where a"
                    " loop over join.iterate knows of no window; give join.iterate(loader, window=k), or call"
                    " zero_grad() between loops [J471]"
                )
            window = self.window = Window(number=number)
            if self.used.counts:
                self.used.begin_window()
        window.with_dummies |= contributors not in (None, self._world_size)

    def forget_zeroed(self) -> None:
        """Drop the window if ``zero_grad`` was called since: gradients that are gone must not count.

        Gradients that are 0 tell nothing: those of a batch may be.
        """
        if self.last_result.has_no_gradient:
            self.window = Window()
            self.last_result.aside.clear()

    def take_over(self) -> None:
        """Go on with the window that the last block has left open; called when the first backward begins.

        Unless ``zero_grad`` was called since: it sets gradients to ``None``, or writes 0 to them. A rank that only
        shadows does not come here: the loop would have called ``zero_grad``, or not, and it cannot know.
        """
        if self._ddp not in _left_over:
            return
        window, writes = _left_over.pop(self._ddp)
        was_zeroed = writes != autograd.gradient_writes(self._parameters) and self.last_result.is_zero
        if window.unreduced and not (was_zeroed or self.last_result.has_no_gradient):
            self.window = window

    @property
    def holds_unreduced(self) -> bool:
        """Whether the gradients are this rank's own, still to be reduced: of this block, or of the last one."""
        return self.window.unreduced or (self._ddp in _left_over and not self.last_result.has_no_gradient)

    def drop(self) -> None:
        """Contribute nothing to the reduction that comes: drop the gradients."""
        _left_over.pop(self._ddp, None)
        for parameter in self._parameters:
            parameter.grad = None
        if self._leaves_unused:
            reducer.forget_use(self._ddp)

    def add_last_result(self) -> None:
        """See to it that the mean has the last reduction's result once, where gradients still hold it."""
        window, result, step = self.window, self.last_result, self._channel.step
        if step.contributors is not None:
            times = float(step.has_data or self.over_all_ranks or self._channel.scaling.in_use is True)
        elif self.weighted:
            times = (window.weight or 0.0) / self._channel.scaling.unit
        elif self._adds_result_later():
            if not (result.aside or window.unreduced):
                result.set_aside()
            return
        elif self.over_all_ranks:
            times = self._world_size / self._channel.headers.flags(self._burst)[CONTRIBUTES]
        else:
            times = 1.0
        if times != 1 and not result.aside and (step.shadowing or not window.unreduced):
            result.set_aside()
        if result.aside:
            result.add(times)

    def _adds_result_later(self) -> bool:
        """Return whether the last result, set aside, is added when the reduction is done; the same on all ranks.

        So nothing waits for the header, whose contributors :meth:`add_last_result` divides by. Only if headers take
        their time, and if a joined rank does not need the gradients: it cannot know whether the others have zeroed
        theirs.
        """
        channel = self._channel
        if not self.over_all_ranks or self.weighted or channel.headers.depth == 1 or channel.step.contributors is not None:
            return False
        return all(isinstance(m.joinable, DDPBurst) for m in channel.roster.listed if m.joinable.communicates)

    def surely_has_result(self) -> bool:
        """Whether a reduction to which this rank gave nothing surely has something of others; else nobody can tell."""
        may_be_older, headers = self.last_result.kept and self.over_all_ranks, self._channel.headers
        # A rank that has joined may have given what it had accumulated.
        may_be_joined = headers.flags(self._burst)[CONTRIBUTES] > headers.announced(self._burst)
        if may_be_older or may_be_joined or reducer.hooks_remember(self._ddp):
            return False
        return not self.last_result.gradients_are_zero

    def agree_on_weights(self, using: int) -> None:
        """In a plain block, as a reduction begins: sum weights in it if active ranks do.

        Called by a joined rank, and by one that does not do as all did last time; others need not wait for the header.

        Args:
            using: how many ranks do, as the header says.

        Raises:
            ValueError: if some do and others do not.
        """
        if using and using != (announced := self._channel.headers.announced(self._burst)):
            raise ValueError(
                f"join.weight is set on {using} ranks and not on {announced - using}; set it on all ranks or on none"
                " [J277]"
            )
        self.weighted = self.weighted_last = using > 0

    # -- the mean -----------------------------------------------------------------------------------------------------

    @property
    def scales_in_loop(self) -> bool:
        """Whether the result is multiplied in this step of a loop over ``Join.iterate``, since its losses are not."""
        in_use, contributors = self._channel.scaling.in_use, self._channel.step.contributors
        return not (self.over_all_ranks or in_use) and 0 < (contributors or 0) < self._world_size

    def begin(self, weight: float) -> bool:
        """Begin a reduction: start to sum the contributors, or their weights, if they are wanted and not known.

        Args:
            weight: the sum of this rank's weights, or 1 if it contributes.

        Returns:
            Whether there is something to do at its end.
        """
        self._awaits = self._total = None
        if self._channel.step.contributors is not None:
            self._scales, self._are_parts = self.scales_in_loop, False
        else:
            self._unit = self._channel.scaling.unit if self.weighted else 1.0
            self._are_parts = self.weighted and self._has_comm_hook
            self._scales = self.weighted or not self.over_all_ranks
            if self.weighted or (self.with_buffers and self._scales):
                self._awaits = self._channel.sum(weight)
            if self._are_parts and (total := self._summed()):
                factor = self._world_size * self._unit / total
                if self.factors.factor:
                    self.factors.multiply_by(factor)
                reducer.multiply_gradients(self._parameters, factor)
        self.used.with_dummies, self.window = self.window.with_dummies, Window()
        return self._scales or self.used.counts or bool(self.last_result.aside)

    def _summed(self) -> float:
        """Return the sum of weights or contributors in the current reduction; wait for it if it is not there yet."""
        if self._awaits is not None:
            self.wait()
        if self._total is not None:
            return self._total
        in_loop = self._channel.step.contributors
        return self._channel.headers.flags(self._burst)[CONTRIBUTES] if in_loop is None else in_loop

    def wait(self) -> None:
        """Wait for the sum that was started, if any: it must be over before the next one begins."""
        if self._awaits is not None:
            self._total, self._awaits = self._awaits(), None
            if self.weighted:
                self._channel.scaling.learn(self._total / self._world_size)

    def end(self) -> None:
        """Turn the result of a reduction, the sum divided by the world size, into the mean that was asked for."""
        touched = reducer.used_anywhere(self._ddp) if self._leaves_unused else None
        if self.last_result.aside:
            if self._adds_result_later():
                self.last_result.add(1.0)
            self.last_result.end_reduction(touched)
        if self._are_parts:
            self.factors.multiply_by(1.0)
        elif self._scales and (total := self._summed()) and (factor := self._world_size * self._unit / total) != 1:
            reducer.multiply_gradients(self._parameters, factor, touched)
        if self.used.counts:
            self.end_without_result()

    def end_without_result(self) -> None:
        """End a reduction of which this rank takes nothing: drop the gradients of parameters that only dummies used."""
        if self.used.counts and self.used.with_dummies:
            self.used.end_reduction()


class LastResult:
    """What the last reduction left in the gradients of a module's ``parameters``, which are in the reducer's order."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.kept = True
        """Whether the gradients may hold the last result."""
        self.aside: dict[int, torch.Tensor] = {}
        """What was taken out of the gradients, by position among the parameters."""

    @property
    def has_no_gradient(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(parameter.grad is None for parameter in self._parameters)

    @property
    def is_zero(self) -> bool:
        """Whether all of the last result is 0; reads it all."""
        return _are_zero(self.aside.values()) if self.aside else self.gradients_are_zero

    @property
    def gradients_are_zero(self) -> bool:
        """Whether all gradients are 0 now, or there are none; reads them all."""
        return _are_zero(parameter.grad for parameter in self._parameters if parameter.grad is not None)

    def look(self) -> None:
        """Notice that ``zero_grad`` has set the gradients to ``None``."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                return
        self.kept = False

    @torch.no_grad()
    def set_aside(self) -> None:
        """Take the last result out of the gradients, before others are accumulated there."""
        gradients = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
        self.aside |= zip(gradients, reducer.take_out(list(gradients.values())), strict=True)

    @torch.no_grad()
    def add(self, times: float) -> None:
        """Add what was set aside to the gradients, so many ``times``."""
        there = {index: gradient for index in self.aside if (gradient := self._parameters[index].grad) is not None}
        reducer.add_to(list(there.values()), [self.aside[index] for index in there], times)

    def put_back(self) -> None:
        """Put back what is set aside; called when the block is left, maybe before a reduction."""
        self.add(1.0)
        self.aside.clear()

    @torch.no_grad()
    def end_reduction(self, used: torch.Tensor | None) -> None:
        """Restore what was set aside of the gradients that a reduction did not touch.

        Args:
            used: for each parameter, whether any rank used it; the reduction leaves other gradients alone. ``None``:
                all were used.
        """
        for index, result in self.aside.items():
            gradient = self._parameters[index].grad
            if gradient is not None and used is not None:
                gradient.copy_(torch.where(used[index].to(result.device), gradient, result))
        self.aside.clear()


def _are_zero(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all elements of all tensors are 0; one host synchronisation for each device."""
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor.any())
    return not any(bool(torch.stack(found).any()) for found in devices.values())
