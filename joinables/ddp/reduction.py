"""Gradient reduction of a DDP module: :class:`GradientSync`, the burst.

The docstring of ``joinables.ddp`` shows its place in a step and the order of collectives. A gradient takes this way
from ``backward()`` to ``step()``::

              active rank                     dummy                           joined rank
              -----------                     -----                           -----------
    found     by ``Arrivals``                 the same                        by a header
    window    counts the backward             the same; the factor of the     dropped, unless this block left it open
                                              backward is 0
    close     ``_close_window``               the same                        the same
    reduce    DDP's reducer                   the same                        zeros, or the reducer's own backward
    finish    ``_finish``                     the same                        the same, for sharded optimizers

- ``_close_window`` runs when the last backward of a window begins, before its gradients arrive. It corrects how often
  ``grad`` contains the last result, and starts the sum of n or S (``joinables.ddp.mean``).
- ``_finish`` turns the quotient of DDP into the mean. The gradient of a parameter that no rank used becomes the last
  result again. In a loop, ``_finish`` is skipped if it has nothing to do. ``synchronise_own`` then checks at the end of
  the loop that the reducer has finished.
- ``BackwardPass`` has the facts of one backward (``joinables.ddp.forwards``). Its burst is pending while the next one
  has a mean.
- ``Mean`` is what one reduction divides gradients by, and all that is known of it (``joinables.ddp.mean``).
- ``Window`` knows whether gradients wait for a reduction (``joinables.ddp.window``). It is open from the first backward
  of a window to ``_close_window``, and outlives the block.
- A rank that skips a backward of other ranks runs the steps of a joined rank (``fulfil``). It puts its own gradients
  back, and its window if perhaps no rank ran the backward. On a dummy or out of data, a rank without gradients receives
  the result instead.

``joinables.ddp.parameters`` keeps the records for each parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from math import isnan
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join, Joinable, JoinError, JoinHook, ProtocolError
from join.collectives._torch_private import after_backward, are_zero, writes_to
from join.held import Part
from join.protocol.channel import Phase
from join.scaling import Backward, refuse_unreduced, refuse_weight
from join.transfer import Exchange
from joinables._torch import autograd, objects, reducer
from joinables.attributes import parts_of_module
from joinables.ddp.buffers import BucketRebuild, BufferSync, DDPBurst
from joinables.ddp.forwards import IN_TORCH_JOIN, BackwardPass, Forwards
from joinables.ddp.mean import ANNOUNCED, CONTRIBUTES, WEIGHTED, WITH_BUFFERS, Mean
from joinables.ddp.parameters import UsedParameters, refuse_unreduced_parameters
from joinables.ddp.window import LastResult, Window, have_none, memory_of
from joinables.own_collectives import mixing
from joinables.sample import sampled


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
    is_pending = property(attrgetter("_forwards.next.mean"))

    def __init__(self, ddp: DistributedDataParallel, buffers: BufferSync | None, rebuild: BucketRebuild) -> None:
        super().__init__(ddp)
        self._buffers, self._rebuild = buffers, rebuild
        self._parameters = reducer.reduced_parameters(ddp)
        self._forwards = Forwards(ddp, self._parameters, buffers)
        self.mixes_ranks = mixing(self.join_name, self._forwards.norms)  # a NaN on a dummy would reach other ranks
        self._memory = memory_of(ddp)

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
        self._over_all_ranks = divide_by_initial_world_size
        return self

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self._has_comm_hook = reducer.has_comm_hook(self._ddp)
        self._scope = join.channel.roster.scopes[-1]
        unknown = {"times": None} if self._over_all_ranks else {"multiple": None}
        self._unweighted = partial(Mean, join.channel, self, **unknown)
        self._weighted = partial(Mean, join.channel, self, None, None, weighted=True)
        self._agrees_on_weights = False
        """Whether the headers of all active ranks agreed on weights in the last reduction of a plain block."""
        self._used = UsedParameters(self._ddp, self._parameters, join.channel)
        self._memory.window.is_earlier, self._memory.window.sample = self._memory.window.backwards > 0, None
        self.own_steps = 0
        self._handles = self._forwards.attach(join.channel, self._begin_forward, self._begin_backward)
        bursts = [each for each in join.channel.roster.listed if isinstance(each, GradientSync)]
        reduced = {each: set(map(id, reducer.reduced_parameters(each.join_target))) for each in bursts}
        self._handles += refuse_unreduced_parameters(self._ddp, set[int]().union(*reduced.values()))
        others = [each for each in bursts if each is not self] if self._collective.world_size > 1 else []
        self._sharing = [each for each in others if reduced[each] & reduced[self]]
        records_use = self._ddp.find_unused_parameters or self._ddp.static_graph
        self._may_be_read = bool(self._has_comm_hook or self._sharing or records_use)
        """Whether gradients may be read before they are reduced, even if no hook of a parameter reads them."""

    @override
    def detach(self) -> None:
        super().detach()  # a backward through the graphs of this block is an ordinary DDP backward from here on
        if self._memory.own is not None:
            self._memory.own = sampled(self._parameters)
        self._forwards.detach()
        del self._scope, self._unweighted, self._weighted, self._sharing, self._used  # they hold the channel, or this

    @override
    def exchange(self, source: int) -> Exchange:
        """Copy parameters from the last joiner, and the last result, unless this rank has unreduced gradients.

        Afterwards the gradients of all ranks contain it, or none do. All ranks then choose the same time for the header
        in ``_begin_forward``.
        """
        unreduced = self._memory.window.backwards > 0 and not have_none(self._parameters)
        is_source = self._collective.rank == source
        results = self._results(unreduced) if is_source else []
        inbox = yield bytes(result is not None for result in results)
        present: bytes = inbox.skeleton
        yield ""
        self._memory.own = None
        with_gradient = list(compress(self._parameters, present))
        if is_source:
            gradients = [r.to(p.dtype) for p, r in zip(self._parameters, results, strict=True) if r is not None]
        elif unreduced:
            gradients = [torch.empty_like(parameter) for parameter in with_gradient]  # received and dropped
        else:
            gradients = self._adopt(present)
        # All ranks know the shapes of these tensors, so that they need no skeleton.
        reducer.broadcast(self._ddp, [*reducer.parameters(self._ddp), *gradients], source)

    def _results(self, unreduced: bool) -> list[torch.Tensor | None]:
        """Return the last result of each parameter, to send it; ``unreduced`` says whether newer gradients hide it."""
        gradients = [parameter.grad for parameter in self._parameters]
        if not unreduced:
            return gradients
        # Other ranks receive only the last result under these gradients. Without one, they receive zeros, or None if
        # the time of headers depends on gradients being None.
        headers_depend = self._over_all_ranks
        zeros = [None if g is None or headers_depend else torch.zeros_like(g) for g in gradients]
        return [self._memory.window.kept.get(index, zero) for index, zero in enumerate(zeros)]

    def _adopt(self, present: Sequence[int]) -> list[torch.Tensor]:
        """Let each parameter that is ``present`` have a gradient to be overwritten, and the others have none.

        Returns:
            These gradients.

        Gradients that fit stay, as they may be views of buckets. A hook that compresses gradients may have left one of
        another dtype.
        """
        adopted: list[torch.Tensor] = []
        for parameter, is_present in zip(self._parameters, present, strict=True):
            gradient = parameter.grad
            if not is_present:
                parameter.grad = None
                continue
            if gradient is None or gradient.dtype != parameter.dtype:
                gradient = parameter.grad = torch.zeros_like(parameter)
            adopted.append(gradient)
        return adopted

    @override
    def held(self) -> Iterable[Part]:
        module = cast("torch.nn.Module", self._ddp.module)
        return parts_of_module(module, f"{type(module).__name__}{self.join_place}")

    @override
    def before_entering(self, listed: Sequence[Joinable]) -> Mapping[str, Any]:
        memory, sample = self._memory, sampled(self._parameters)
        if memory.own != sample:
            memory.own = None  # the parameters have changed since, and may have become equal
        return sample if memory.own is None else {}

    @override
    def equal_values(self) -> Mapping[str, Any]:
        """Return a sample of the parameters, unless this rank has stepped on gradients of its own in this block."""
        sample = self._notice_own_step()
        return sample if self._memory.own is None else {}

    def _notice_own_step(self) -> Mapping[str, float]:
        """Notice a step on gradients that no reduction has included, and return a sample of the parameters."""
        memory, sample = self._memory, sampled(self._parameters)
        if memory.window.sample not in (None, sample):
            if memory.window.was_outside and memory.own is None and not any(map(isnan, sample.values())):
                warnings.warn(
                    f"The loop stepped on gradients of {self.join_name} that DistributedDataParallel has not reduced,"
                    " although the backward was outside of no_sync: the forward decides. Run the forward outside, too."
                    " If each rank is to step on its own gradients, run both under no_sync. [J892]",
                    stacklevel=2,
                )
            memory.own = sample
        return sample

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

        A joined rank contributes once: the gradients that it had accumulated in this block when it was out of data. A
        rank without data in this block cannot know whether the loop would have called ``zero_grad``. A window that was
        zeroed is dropped here.
        """
        if active:
            mean = self._forwards.next.mean
            assert mean is not None
            return (mean.with_buffers, True, mean.weighted)
        window = self._memory.window
        if window.is_earlier:
            return (False, False, False)
        if window.backwards and window.was_zeroed(self._parameters):
            self._notice_own_step()
            window = self._memory.window = Window()
        return (False, window.backwards > 0, False)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        """Announce the backward if it is due now, and synchronise buffers; called before a forward with grad."""
        channel, buffers, backward = self._channel, self._buffers, self._forwards.next
        if channel.place.phase is Phase.LEFT:
            channel.end_left_loop()  # not later: the end of the loop writes to buffers that this forward saves
        window = self._memory.window
        if self._ddp.find_unused_parameters:
            if have_none(self._parameters) and not backward.is_armed:
                reducer.forget_use(self._ddp)
            if channel.place.step.in_loop:
                self._handles += self._used.watch()
        if not self._ddp.require_backward_grad_sync or backward.mean is not None:
            return
        # How often the last result counts may depend on the number of contributors. So if the gradients may contain it,
        # the header is sent with the backward, when zero_grad may have been called. Under a mean over contributors, a
        # header in the forward needs a second count, since some ranks may skip the backward. It saves a header only if
        # the buffers need one in the forward anyway. In a loop nothing is sent, and a backward that this rank skips
        # stays pending since its forward.
        early = channel.roster.early is self
        if early and not channel.place.step.in_loop:
            if not self._over_all_ranks:
                early = buffers is not None
            else:
                early = (window.backwards > 0 and not window.kept) or have_none(self._parameters)
        if early:
            backward.mean = (self._unweighted if self._scope.weight is None else self._weighted)()
            backward.mean.with_buffers = buffers is not None
            channel.announce(self)
        elif buffers is not None:
            channel.announce(buffers)
        if buffers is not None:
            buffers.broadcast_when_due()

    # -- backward -----------------------------------------------------------------------------------------------------

    # After the arithmetic of a step, a call finds cold caches and costs microseconds, as much as a small layer. So most
    # conditions of a backward are tested before a call instead of inside it.

    def _begin_backward(self, backward: BackwardPass) -> None:
        """Count a backward in the window, choose its mean, and begin the reduction if it is the last of the window.

        Args:
            backward: The backward.

        Raises:
            JoinError: If the weight or the scaling of the loss does not match the forward or the rest of the window.
        """
        channel, forwards, window = self._channel, self._forwards, self._memory.window
        if channel.place.phase is Phase.LEFT:
            channel.end_left_loop()
        step, call, announced = channel.place.step, backward.call, backward.mean
        if window.sample is not None:
            self._notice_own_step()
        for other in self._sharing:
            self._refuse_shared_backward(call, other)
        if step.in_loop:
            weight = step.weight
            if channel.scaling.in_use is not call.scaled:
                self._check_scaling(call.scaled)
            window, mean = self._enter_window()
        else:
            self.own_steps += 1
            weight = self._scope.weight
            if window.backwards or window.number:
                window, _ = self._enter_window()
            mean = announced or (self._unweighted if weight is None else self._weighted)()
            if weight is not None or call.weight is not None or window.weight is not None or mean.weighted:
                self._weigh(weight, window, call, mean)
        backward.factor = 0.0 if weight == 0 else 1.0
        window.backwards += 1
        if not (backward.is_armed or backward.synchronises):
            forwards.next = BackwardPass(mean=announced)  # it is announced if a forward has raised
            if window.sample is None and not step.in_loop:
                window.sample = sampled(self._parameters)
            if mean.times != 1.0 and window.backwards == 1:
                window.kept = LastResult.copy_of(self._parameters)
            window.was_outside |= bool(self._ddp.require_backward_grad_sync)
            call.at_end.append(partial(self._remember_writes, window))
            return
        if self._ddp.static_graph and reducer.first_static_backward(self._ddp):
            call.at_end.append(self._check_graph)  # a gradient may reach a parameter ahead of the output
        if not backward.is_armed:  # a second backward, whose gradients DDP itself would not reduce
            reducer.expect_backward(self._ddp, forwards.outputs)
        backward.mean = mean
        if announced is None:
            channel.announce(self)
        if not step.in_loop and mean.weighted is not self._agrees_on_weights:
            mean = self._agree()
        backward.factor *= self._close_window(mean, is_first=window.backwards == 1)
        backward.drops = not (backward.factor or self._may_be_read or reducer.have_hooks(self._parameters))
        forwards.next = BackwardPass()
        if channel.guard.timeout is not None and not step.in_loop:
            # This is before the reducer waits, which does not look for missing ranks.
            after_backward(channel.headers.read)
        counts_use = self._used.counts and window.with_dummies
        if not step.in_loop or mean.multiple != 1.0 or counts_use or self._rebuild.is_due:
            call.at_end.append(partial(self._finish, mean, self._parameters))

    def _weigh(self, weight: float | None, window: Window, call: Backward, mean: Mean) -> None:
        """Add the weight of a backward in a plain block to the window, and check that they match.

        Args:
            weight: The weight.
            window: The window of the backward.
            call: The call of the backward.
            mean: The mean of the backward.
        """
        if weight != call.weight:
            refuse_weight(weight, self.join_name)
        is_weighted = weight is not None
        if mean.weighted != is_weighted or (window.backwards and (window.weight is not None) != is_weighted):
            raise JoinError(
                "join.weight was set or unset between forward and backward, or in an accumulation window. Set it before"
                " the forward, in every step or in none. [J106]"
            )
        if weight is not None:
            window.weight, window.unit = (window.weight or 0.0) + weight, self._channel.scaling.unit

    def _agree(self) -> Mean:
        """Return the mean that active ranks announced in the last header of the burst, in a plain block.

        A joined rank calls this, and a rank that changes between weights and no weights. Other ranks need not wait for
        the header.

        Raises:
            ValueError: If some active ranks use weights and others do not.
        """
        counts = self._channel.headers.counts(self)
        using, announced = counts[WEIGHTED], counts[ANNOUNCED]
        if using and using != announced:
            raise ValueError(
                f"join.weight is set on {using} ranks and not on {announced - using}. Set it on all ranks or on none."
                " [J277]"
            )
        self._agrees_on_weights = using > 0
        mean = (self._weighted if using else self._unweighted)()
        mean.with_buffers = counts[WITH_BUFFERS] > 0
        return mean

    def _refuse_shared_backward(self, call: Backward, other: GradientSync) -> None:
        """Refuse a backward through two modules that share a parameter, unless reductions leave a mean as it is."""
        is_mean = self._channel.place.step.in_loop and (call.scaled or self._over_all_ranks)
        if not is_mean and call in (other._forwards.next.call, other._forwards.arrivals.current.call):
            #: Or loop over `join.iterate`, and call `join.scale(loss).backward()`.
            raise JoinError(
                f"Two modules that share a parameter are in one backward ({self.join_name}, {other.join_name}), so each"
                " would average its gradient. Wrap one module that contains both, or run two backwards. [J775]"
            )

    def _check_scaling(self, scaled: bool) -> None:
        """Check the scaling of the loss, in the first backward of a loop or in one that is unlike the first."""
        scaling = self._channel.scaling
        if scaling.in_use is None and not scaled:
            collective = autograd.differentiated_collective(self._ddp.process_group)
            if collective:
                raise JoinError(
                    f"The loss of {self.join_name} contains {collective}, which passes gradients to other ranks. They"
                    " are wrong if a rank has no data, unless losses are scaled. Pass"
                    " divide_by_initial_world_size=False to Join, and call join.scale(loss).backward(). [J700]"
                )
        scaling.check_backward(self, scaled=scaled)

    def _enter_window(self) -> tuple[Window, Mean]:
        """Return the window of the next backward, and its mean if it is in a loop over ``Join.iterate``.

        The window is the current one, or a new one after ``zero_grad`` or in another accumulation window of a loop.

        Raises:
            JoinError: If gradients of an earlier window are unreduced in a loop over ``Join.iterate``, or after it.
        """
        memory, channel = self._memory, self._channel
        if (memory.window.backwards or memory.window.number) and memory.window.was_zeroed(self._parameters):
            memory.window = Window()
        window, step = memory.window, channel.place.step
        if window.number != step.window:
            if window.backwards:
                refuse_unreduced(self.join_name)
            window = memory.window = Window(number=step.window)
            if self._used.counts:
                self._used.begin_window()
        window.is_earlier = False
        window.with_dummies |= step.in_loop and step.contributors < self._collective.world_size
        if window.weight is not None and window.unit != channel.scaling.unit:  # chosen by a reduction since
            factor = window.unit / channel.scaling.unit
            reducer.multiply_gradients(self._parameters, factor)
            window.kept.add(self._parameters, 1 - factor)
        world_size, count, is_scaled = self._collective.world_size, step.contributors, channel.scaling.in_use
        if self._over_all_ranks or is_scaled or not 0 < count < world_size:
            return window, Mean(channel, self)
        return window, Mean(channel, self, world_size / count, 0.0 if step.is_dummy else 1.0)

    def _remember_writes(self, window: Window) -> None:
        window.writes = writes_to(parameter.grad for parameter in self._parameters)

    def _check_graph(self) -> None:
        """Check at the end of the first backward of a module with ``static_graph`` that DDP has learnt its graph."""
        if reducer.first_static_backward(self._ddp):
            raise JoinError(
                f"No gradient has reached the output of the forward in {self.join_name}. With static_graph=True, DDP"
                " reduces nothing then, inside and outside of Join. Compute the loss from tensors that the forward"
                " returns, alone or in lists, tuples and dicts, or build the module without static_graph. [J803]"
            )

    def _raise_unfinished(self) -> NoReturn:
        raise JoinError(
            f"Gradients did not reach all parameters that the module waits for in {self.join_name}. Call backward()"
            " without inputs=, or list all parameters there. If a loss does not depend on all parameters, build the"
            " module with find_unused_parameters=True. [J473]"
        )

    # -- a reduction on any rank --------------------------------------------------------------------------------------

    def _close_window(self, mean: Mean, *, is_first: bool = False) -> float:
        """Close the window: correct its gradients for the reduction, and start the sum of n or S if needed.

        Args:
            mean: The mean that the reduction makes.
            is_first: Whether this is at the beginning of the window's first backward, so that gradients, if any, are
                the last result.

        Returns:
            The factor of the gradients that arrive in the rest of the backward.
        """
        window, factor = self._memory.window, 1.0
        has_kept = mean.times != 1.0 and (window.kept or (is_first and not have_none(self._parameters)))
        if has_kept and (times := mean.count(window)) != 1:
            window.kept = window.kept or LastResult.copy_of(self._parameters)
            window.kept.add(self._parameters, times - 1)
        if mean.multiple is None and (mean.with_buffers or mean.weighted):  # otherwise the header counts contributors
            mean.begin(window)
        if mean.weighted and self._has_comm_hook:  # gradients become parts of the mean before they are reduced
            factor, mean.multiple = mean.factor(), 1.0
            reducer.multiply_gradients(self._parameters, factor)
        mean.window, self._memory.window = window, Window()
        return factor

    def _finish(self, mean: Mean, parameters: Sequence[torch.nn.Parameter], *, leads: bool = True) -> None:
        """Turn the result of a reduction, which is the sum divided by the world size, into the mean.

        Args:
            mean: The mean.
            parameters: The parameters that have the result in ``grad``.
            leads: Whether this rank is active. It then announces the rebuild of the buckets after the first backward.

        Raises:
            JoinError: If the reducer still waits for gradients.
        """
        if leads:
            try:
                reducer.check_finished(self._ddp.reducer)
            except RuntimeError:
                self._raise_unfinished()
        leaves_unused = self._ddp.find_unused_parameters or self._ddp.static_graph
        touched = reducer.used_anywhere(self._ddp) if leaves_unused else None
        if touched is not None:
            mean.window.kept.restore(self._parameters, touched)
        mean.window.kept.clear()  # it is as large as the gradients
        factor = mean.multiple or mean.factor()
        if factor != 1.0:
            reducer.multiply_gradients(parameters, factor, touched)
        if self._used.counts and mean.window.with_dummies:
            self._used.end_reduction()
        if leads and self._rebuild.is_due:
            self._rebuild.run()

    def _shadow(self, mean: Mean, parameters: Sequence[torch.nn.Parameter], *, leads: bool) -> None:
        """Run a reduction without a backward of this rank's own; the arguments are those of :meth:`_finish`."""
        self._close_window(mean)
        if self._ddp.static_graph and reducer.first_static_backward(self._ddp):
            self._channel.guard.post_and_raise(
                JoinError(
                    f"Rank {self._collective.rank} has no data in {self.join_name}, the first one of a module with"
                    " static_graph=True, which learns its graph there. Run one step on each rank before the block, on"
                    " any batch: a forward, a backward of its output, and zero_grad(). [J802]"
                )
            )
        reducer.shadow_backward(self._ddp, parameters)
        self._finish(mean, parameters, leads=leads)

    def _drop(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Drop the gradients of these parameters, so that this rank contributes nothing to the next reduction."""
        self._memory.window = Window()
        for parameter in parameters:
            parameter.grad = None
        if self._ddp.find_unused_parameters:
            reducer.forget_use(self._ddp)

    # -- without a backward of its own --------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        """Run a backward that contributes only the gradients which this rank had accumulated, if any."""
        mean = self._agree()
        if mean.with_buffers and self._buffers is not None:
            self._buffers.main_hook()
        parameters = self._parameters
        if self._memory.window.is_earlier or not self._memory.window.backwards:
            # A sharded optimizer reads the result, and so may a joinable of the user. The reducer itself learns the
            # order of gradients before it rebuilds the buckets, and reduces the record of the used parameters. A comm
            # hook may only work inside a backward.
            listed = self._channel.roster.listed
            readers = [each for each in listed if each.communicates and not isinstance(each, DDPBurst)]
            is_more = self._rebuild.is_due or self._ddp.find_unused_parameters or self._has_comm_hook
            if not (readers or is_more):
                parameters = []  # the end of the block overwrites their gradients
            self._drop(parameters)
        self._shadow(mean, parameters, leads=False)
        self._rebuild.holds_followers = self._rebuild.is_due  # active ranks announce the rebuild next

    @override
    def fulfil(self) -> None:
        """Take part in the reduction of a backward that this rank skipped, without changing its gradients.

        On a dummy or out of data, a rank without gradients receives the result, since a sharded optimizer may step for
        all ranks.

        Raises:
            ProtocolError: If other ranks ran the backward, and this rank had data or unreduced gradients.
        """
        channel, memory, backward = self._channel, self._memory, self._forwards.next
        mean, in_loop = backward.mean, channel.place.step.in_loop
        assert mean is not None
        backward.mean, backward.is_armed = None, False
        if in_loop or memory.window.is_earlier:
            _, mean_of_loop = self._enter_window()
            mean = mean_of_loop if in_loop else mean
        if not in_loop and mean.weighted is not self._agrees_on_weights:
            mean = self._agree()
        window, gradients = memory.window, [parameter.grad for parameter in self._parameters]
        is_joined = channel.place.phase is Phase.DRAINING
        has_data = window.backwards > 0 or not (channel.place.step.is_dummy or is_joined)
        takes_result = not has_data and have_none(self._parameters)
        if self._ddp.gradient_as_bucket_view:  # the reduction writes its result into these tensors
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        try:
            self._drop(self._parameters)
            memory.window.with_dummies = window.with_dummies
            self._shadow(mean, self._parameters, leads=True)
            has_result = self._certainly_has_result()
            if takes_result and has_result:
                gradients = [parameter.grad for parameter in self._parameters]
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        if not has_result:  # perhaps all ranks have skipped the backward, so gradients of before stay unreduced
            memory.window = window
        if has_result and has_data and not is_joined:
            reason = (
                f"Rank {self._collective.rank} skipped {self.join_name}, but other ranks ran it, so this rank has no"
                " gradients where they have some. Skip it on all ranks or on none: agree by an all-reduce, or multiply"
                " the loss by 0. [J113]"
            )
            channel.guard.post_and_raise(ProtocolError(reason))

    def _certainly_has_result(self) -> bool:
        """Return whether active ranks certainly contributed to a reduction in which this rank contributed nothing.

        ``False`` means that they may have contributed or not.
        """
        # A joined rank may have contributed the gradients that it had accumulated.
        counts = self._channel.headers.counts(self)
        if counts[CONTRIBUTES] > counts[ANNOUNCED] or reducer.hooks_remember(self._ddp):
            return False
        return not are_zero(parameter.grad for parameter in self._parameters if parameter.grad is not None)
