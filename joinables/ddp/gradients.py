"""The gradient reduction of a DDP module: :class:`GradientSync`.

When it comes, how it scales, and the order of collectives, is told in ``joinables.ddp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import JoinError, JoinHook
from join.joinable import Block
from join.transfer import broadcast_tensors
from joinables._torch import autograd, reducer, torch_join
from joinables.ddp.buffers import BucketRebuild, BufferSync, DDPBurst
from joinables.ddp.contributions import WITH_BUFFERS, Contributions, Window
from joinables.ddp.forwards import IN_TORCH_JOIN, Forwards
from joinables.ddp.static_graph import StaticGraph
from joinables.own_collectives import mixing
from joinables.tensors import adopt_gradients


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
    flag_count = 3  # see joinables.ddp.contributions

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
        self._at_end: Callable[[Callable[[], None]], object] = autograd.after_reduction  # calls at the end of it
        self._own_steps = 0  # how many were made in this block, outside of loops over join.iterate
        # The number of the loop over Join.iterate in which a reduction was found to need nothing done after it.
        self._plain_in = -1

    @override
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        """Return itself.

        Raises:
            ValueError: if torch's own ``Join`` is around the module, or a layer has sparse gradients.
        """
        if torch_join.is_in_torch_join(self._ddp):
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
    def attach(self, join: Block) -> None:
        self._static_graph.check()
        super().attach(join)
        self._join = join
        self._contributions.attach(join, self)
        self._own_steps, self._plain_in = 0, -1
        self._handles = self._forwards.attach(join.channel, self._begin_forward, self._gradient_enters)

    @override
    def detach(self) -> None:
        super().detach()  # from here on, what is left of the graphs of this block is an ordinary DDP module's
        self._forwards.detach()
        self._contributions.detach()
        del self._join

    @property
    @override
    def own_steps(self) -> int:
        return self._own_steps

    @property
    @override
    def mixes_ranks(self) -> str:
        return mixing(self.join_name, self._forwards.norms)

    @override
    def synchronise(self, source: int) -> None:
        """Parameters come from the last joiner; so do gradients, but for what is still to be reduced.

        Which parameters have a gradient is the same on all ranks afterwards: ``_begin_forward`` depends on it.
        """
        broadcast_tensors(self._collective, reducer.parameters(self._ddp), source)
        own, kept = self._contributions.holds_unreduced, self._contributions.last_result.kept
        kept = adopt_gradients(self._collective, self._parameters, source, accumulated=own, also=kept)
        if not own:
            self._contributions.last_result.kept = kept

    @override
    def synchronise_own(self, source: int) -> None:
        self._check_finished()

    # -- the header ---------------------------------------------------------------------------------------------------

    @override
    def flags(self, active: bool) -> Sequence[bool]:
        if active:
            return (self._contributions.with_buffers, True, self._contributions.weighted)
        if self._contributions.window.unreduced:
            self._contributions.forget_zeroed()
        return (False, self._contributions.window.unreduced, False)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        """Announce the backward, if that is due now, and synchronise buffers; called before a forward with grad."""
        if self._ddp.find_unused_parameters:
            self._watch_use()
        contributions, channel, buffers = self._contributions, self._channel, self._buffers
        synchronises = self._ddp.require_backward_grad_sync
        if buffers is not None and channel.is_in_loop_body and not synchronises:
            buffers.lead_by(channel.step.first_with_data)  # nothing is announced, and the forward changes them
        if not synchronises or self.is_pending:
            return
        if not channel.is_in_loop_body:
            channel.end_broken_loop()
        contributions.weighted = not channel.is_in_loop_body and self._join.weight is not None
        if contributions.last_result.kept and not channel.all_ranks_run_bursts:
            contributions.last_result.look()
        # How often the last result is to be added is known when the contributors are: so the header comes later, when
        # zero_grad may have been called. And contributors that a forward announces must be counted again (some may skip
        # the backward); with buffers it needs a header anyway.
        has_buffers = buffers is not None
        saves = not contributions.last_result.kept if contributions.over_all_ranks else has_buffers
        early = channel.announces_in_forward(self, saves_header=saves)
        contributions.with_buffers = early and has_buffers
        if early:
            channel.announce(self)
            self.is_pending = True
        elif buffers is not None:
            channel.announce(buffers)
        if buffers is not None:
            buffers.announced()

    def _watch_use(self) -> None:
        if self._contributions.last_result.has_no_gradient and not self._forwards.armed:
            reducer.forget_use(self._ddp)
        if self._channel.all_ranks_run_bursts:
            self._contributions.used.watch()

    # -- backward -----------------------------------------------------------------------------------------------------

    # The calls here find cold caches after a step's arithmetic and cost microseconds each, as much as a small layer. So
    # what is mostly not to be done is asked for before it is called.

    def _gradient_enters(self, synchronised: bool, gradient: torch.Tensor) -> None:
        """Begin a backward with the first gradient of it that enters the module, if any will reach its parameters."""
        backward = autograd.backward_under_way()
        if backward == self._backward or not self._handles:
            return
        self._backward, self._at_end = backward, autograd.after_reduction
        if autograd.will_run(self._accumulators):
            self._begin_backward(synchronised)
            return
        # This is torch.autograd.grad; or the parameters are behind reentrant checkpoints, which run backwards of their
        # own inside this one, each with an end of its own.
        at_end: list[Callable[[], None]] = []
        self._at_end = at_end.append
        autograd.once_before(self._accumulators, partial(self._begin_backward, synchronised))
        autograd.after_reduction(lambda: [end() for end in at_end].clear())

    def _begin_backward(self, synchronised: bool) -> None:
        contributions, channel = self._contributions, self._channel
        result = contributions.last_result
        if not channel.is_in_loop_body:
            channel.end_broken_loop()
            self._own_steps += 1
        contributions.take_over()
        reduces = self._forwards.armed or synchronised
        weight = self._join.weight
        if channel.is_in_loop_body:
            channel.scaling.check_backward(self.join_name)
            if reduces and weight and self._plain_in == channel.loop and contributions.are_plain:
                if not (self._forwards.armed and self.is_pending):
                    self._announce_backward()
                self._end_reduction()
                return
        elif (weight is not None) != channel.scaling.flows:
            raise JoinError(
                f"join.weight is {weight}, and the loss of {self.join_name} is"
                f" {'' if channel.scaling.flows else 'not '}scaled by it; set the weight before the forward, and call"
                " join.scale(loss).backward() [J472]"
            )
        window = contributions.window
        if window.unreduced or window.number or window.weight:
            contributions.forget_zeroed()
        contributions.note_step()
        window = contributions.window
        contributions.factors.multiply_by(0.0 if weight == 0 else 1.0)
        if not channel.is_in_loop_body:
            self._weigh(weight)
        # Else every rank gives what is in its gradients, the last result or None.
        if result.kept and (not reduces or not channel.all_ranks_run_bursts or contributions.scales):
            result.look()
        if reduces:
            self._begin_reduction()
            return
        sets_aside = weight is not None or contributions.over_all_ranks
        if sets_aside and result.kept and not window.unreduced and not channel.is_in_loop_body:
            result.set_aside()
        window.unreduced = True

    def _weigh(self, weight: float | None) -> None:
        """Count what a backward weighs in a plain block.

        Raises:
            JoinError: if others of its window of accumulation were weighed and it is not, or the other way round.
        """
        window = self._contributions.window
        if window.unreduced and (window.weight is None) != (weight is None):
            raise JoinError(
                "join.weight was set or unset in a window of accumulation; set it at every step or at none [J111]"
            )
        if weight is not None:
            window.weight = (window.weight or 0.0) + weight

    def _announce_backward(self) -> None:
        if not self._forwards.armed:  # a second backward, of which DDP itself would not reduce the gradients
            reducer.expect_backward(self._ddp, self._forwards.outputs)
        if not self.is_pending:
            self._contributions.with_buffers = False
            self._contributions.weighted = not self._channel.is_in_loop_body and self._join.weight is not None
            self._channel.announce(self)
            self.is_pending = True

    def _begin_reduction(self) -> None:
        contributions, channel = self._contributions, self._channel
        if not (self._forwards.armed and self.is_pending):
            self._announce_backward()
        if not channel.all_ranks_run_bursts:
            if contributions.weighted != (contributions.window.weight is not None):
                raise JoinError(
                    "join.weight was set or unset between forward and backward; set it before the forward [J106]"
                )
            if not contributions.weighs_as_last_time:
                contributions.agree_on_weights()
        if contributions.last_result.kept:
            contributions.add_last_result()
        self.is_pending = False
        scales = contributions.scales
        if scales:
            contributions.begin(1.0 if contributions.window.weight is None else contributions.window.weight)
        if self._ddp.static_graph:
            self._static_graph.watch(self._collective)
        if scales or contributions.used.counts or self._rebuild.pending or contributions.last_result.aside:
            self._at_end(self._finish_reduction)
        elif channel.all_ranks_run_bursts:  # nothing is done with the result, so it need not be there
            self._plain_in = channel.loop  # the next one is as plain
            self._end_reduction()
        else:
            self._at_end(self._end_plain_reduction)

    def _end_reduction(self) -> None:
        self.is_pending = False
        self._forwards.armed, self._contributions.last_result.kept = False, True
        self._contributions.window = Window()

    def _end_plain_reduction(self) -> None:
        self._check_finished()
        self._end_reduction()

    def _check_finished(self) -> None:
        """Check that the backward has reached all parameters: ranks without data reduce them all.

        Raises:
            JoinError: if ``backward(inputs=...)`` has left some out, or none of the module's outputs depends on them.
        """
        if not reducer.has_finished(self._ddp):
            raise JoinError(
                f"{self.join_name} did not reach all parameters that the module waits for; name them all in"
                " backward(inputs=...), leave it out, or build the module with find_unused_parameters=True where a loss"
                " does not depend on all of them [J473]"
            )

    def _finish_reduction(self) -> None:
        self._check_finished()
        try:
            self._contributions.end()
        finally:
            self._end_reduction()
        if self._rebuild.pending:
            self._rebuild.run()

    @override
    def fulfil(self) -> None:
        """Take part in the reduction of a backward that was skipped, without touching the gradients.

        Only on a dummy, what others gave is kept: the optimizer may be sharded, and step for all.

        Raises:
            ProtocolError: if others did not skip it, and this rank had something to give.
        """
        self.is_pending = False
        contributions, channel = self._contributions, self._channel
        contributions.take_over()
        if channel.all_ranks_run_bursts:
            contributions.last_result.look()
            contributions.note_step()
        elif not contributions.weighs_as_last_time:
            contributions.agree_on_weights()
        has_data = contributions.window.unreduced or not (self._join.shadowing or channel.has_run_out)
        missed = self._miss_reduction(takes_part=not has_data) and has_data
        self._forwards.armed = False
        if self._rebuild.pending:
            self._rebuild.run()
        if missed and not channel.has_run_out:
            channel.protest(
                f"rank {self._collective.rank} skipped {self.join_name}, which others ran, so it has no gradients where"
                " they have. Skip it on all ranks or on none: let them agree by an all-reduce, or multiply the loss by"
                " 0 [J113]"
            )

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
            reducer.shadow_backward(self._ddp, self._static_graph.learn(self._collective))
            has_result = contributions.has_result()
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

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        contributions = self._contributions
        contributions.with_buffers = self._channel.flags(self)[WITH_BUFFERS] > 0
        contributions.agree_on_weights()
        if contributions.with_buffers and self._buffers is not None:
            self._buffers.main_hook()
        self._shadow_reduction()
        self._rebuild.expect()

    def _shadow_reduction(self) -> None:
        """Run a backward with nothing but what was accumulated here."""
        contributions = self._contributions
        if contributions.window.unreduced:
            contributions.forget_zeroed()
        if not contributions.window.unreduced:
            contributions.drop()
        elif contributions.last_result.kept:
            contributions.add_last_result()
        window = contributions.window
        contributions.begin((window.weight or 0.0) if contributions.weighted else float(window.unreduced))
        reducer.shadow_backward(self._ddp, self._static_graph.learn(self._collective))
        contributions.window = Window()
        contributions.end()

    @property
    @override
    def holds_followers(self) -> bool:
        return self._rebuild.due
