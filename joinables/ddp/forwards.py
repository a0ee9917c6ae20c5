"""Hooks on the forwards of a DDP module, which find its backwards: :class:`Forwards`.

A backward has no hook of its own in torch. So each forward with grad puts a hook on its outputs. The first gradient
that arrives there shows that a backward has begun. It is a backward of the module if it reaches the module's
parameters. ``torch.autograd.grad`` reaches none. Parameters behind reentrant checkpoints are reached by backwards
inside the backward, each with an end of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn, cast
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel

from join import JoinError
from join.batch import Step
from join.collectives._torch_private import Writes, accumulators, on_gradient, will_run, writes_to
from join.protocol.channel import Channel
from joinables._torch import autograd, objects, reducer
from joinables.ddp.buffers import BufferSync
from joinables.ddp.window import memory_of
from joinables.dummy_forward import InnerForward, refuse_backward_on_dummy
from joinables.modules import ModuleHook, run_uncompiled, synchronised_norms, tensors_with_grad
from joinables.own_collectives import refuse_in_plain_block

IN_TORCH_JOIN = (
    "The module is or was in torch's own Join or model.join(). Remove torch's Join, which this one replaces, and wrap"
    " the plain module in a new DistributedDataParallel. [J107]"
)


class Forwards:
    """Hooks on the forwards of a DDP module, which find the first gradient that enters the outputs of a forward.

    They also replace DDP's synchronisation of buffers, and restore buffers and frozen parameters after a forward on a
    dummy.

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
        self._memory = memory_of(ddp)
        self.end_calls: list[Callable[[], None]] | None = None
        """Calls at the end of the current backward if it runs others inside. ``None`` if it does not."""

    def attach(
        self, channel: Channel, on_forward: Callable[[], None], on_backward: Callable[[bool], None]
    ) -> list[Any]:
        """Register the hooks; called when a block is entered.

        Args:
            channel: The channel of the block.
            on_forward: Called before each forward with grad.
            on_backward: Called when a backward begins that reaches the parameters, with whether its forward
                synchronises.

        Returns:
            The handles of the hooks, for the caller to remove when the block is left. Later hooks are added to it.
        """
        ddp, inner = self._ddp, cast("torch.nn.Module", self._ddp.module)
        self._channel, self._on_forward, self._on_backward = channel, on_forward, on_backward
        # Until a forward returns a tensor with grad, a backward may run inside it.
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

    @cached_property
    def _accumulators(self) -> list[Any]:
        """The nodes of the parameters, made when a backward does not reach the first parameter."""
        return accumulators(self._parameters)

    @cached_property
    def _first_accumulator(self) -> list[Any]:
        """The node of the first parameter, made in the first backward, since a rank without data needs none."""
        return accumulators(self._parameters[:1])

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
        watches = channel.place.step.is_dummy or channel.place.step.may_be_last
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
        hook = partial(self._gradient_enters, synchronises, self._channel.place.step)
        for tensor in outputs:
            handle = on_gradient(tensor, hook)
            if tensor.is_leaf:  # the user's own tensor, returned unchanged, outlives the graph
                self._handles.append(handle)
        if not outputs:  # they are hidden in an object, so the first gradient of a parameter marks the backward
            if self._parameter_hook is not None:
                self._parameter_hook.remove()  # the hook of an earlier forward would run first
            self._parameter_hook = torch.autograd.graph.register_multi_grad_hook(self._parameters, hook, mode="any")

    def _gradient_enters(self, synchronises: bool, step: Step, gradient: torch.Tensor) -> None:
        """Notice a backward at the first gradient that enters the module, if gradients will reach its parameters.

        Args:
            synchronises: Whether DDP reduces gradients after the forward.
            step: The step of the forward.
            gradient: A gradient of the module's output.
        """
        if "_channel" not in vars(self):  # the block has ended, and this is an ordinary DDP module
            return
        current = self._channel.place.step
        if step.is_dummy:
            if not current.in_loop:
                refuse_backward_on_dummy(cast("object", self._ddp.module))
            self.inner.keep_in_backward()
        backward = autograd.backward_under_way()
        if backward == self._memory.backward:
            return
        self._memory.backward, self.end_calls = backward, None
        if step.window != current.window and step.in_loop and current.in_loop:
            self._refuse_late_backward(step, current)
        try:
            reaches_parameters = any(map(will_run, self._first_accumulator)) or any(map(will_run, self._accumulators))
        except RuntimeError:  # torch.autograd.grad computes the gradient of one of the parameters
            reaches_parameters = False
        if reaches_parameters:
            self._on_backward(synchronises)
            return
        # This is torch.autograd.grad, or the parameters are behind reentrant checkpoints. These run backwards of their
        # own inside this one, each with its own end.
        end_calls = self.end_calls = list[Callable[[], None]]()
        autograd.once_before(self._accumulators, partial(self._on_backward, synchronises))

        def end() -> None:
            for call in end_calls:
                call()

        autograd.after_backward(partial(autograd.after_backward, end))  # after the callbacks of reducers

    def _refuse_late_backward(self, step: Step, current: Step) -> NoReturn:
        raise JoinError(
            f"A backward of DistributedDataParallel ran in step {current.number} of join.iterate, but its forward ran"
            f" in step {step.number}. join.weight, join.shadowing and gradients belong to the batch that was read last."
            " Run the backward before you read the next batch, and call next() only at the start of a step. [J701]"
        )

    def _refuse_backward_inside(self) -> None:
        if writes_to(parameter.grad for parameter in self._parameters) != self._writes_before:
            name = type(cast("object", self._ddp.module)).__name__
            raise JoinError(
                f"A backward ran inside the forward of DistributedDataParallel({name}). It can neither be announced nor"
                " shadowed there. Return the loss from the forward, and call backward() after it. [J109]"
            )
