"""What happens around the forwards of a DDP module in a block: :class:`Forwards`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from join import JoinError
from join.batch import StepBatch
from join.collectives._torch_private import on_gradient
from join.protocol.channel import Channel
from joinables._torch import autograd, objects, reducer
from joinables.ddp.buffers import BufferSync
from joinables.dummy_forward import InnerForward, check_backward_on_dummy
from joinables.modules import ModuleHook, tensors_with_grad
from joinables.own_collectives import refuse_synchronised_norms, synchronised_norms

IN_TORCH_JOIN = (
    "the module is in torch's own Join or model.join(), or was: leave that out, since this Join takes its place, and"
    " build the DistributedDataParallel anew [J107]"
)


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
