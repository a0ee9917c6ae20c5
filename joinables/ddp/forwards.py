"""Hooks on a DDP module that find its backwards and weigh their gradients: :class:`Forwards`, :class:`BackwardPass`.

A loss takes any way from the module to ``backward()``: through outputs, attributes, hooks or objects. So a backward is
found where all ways end, by a hook on the node that accumulates the gradient of a parameter. The hook runs before DDP's
own. ``torch.autograd.grad`` runs no such node. The first gradient of a backward begins the reduction. All gradients are
multiplied by the factor of the backward, if it is not 1.

A backward belongs to the module if a forward with grad has run since the last one. A second backward of one forward
also belongs to it, if a gradient has entered outputs. Any other backward that reaches the parameters begins at a
penalty on them. It adds the same gradients on all ranks, so its gradients stay as they are.

All facts of a backward are in its :class:`BackwardPass`. It is ``Forwards.next`` from the first forward to the first
gradient, and ``Arrivals.current`` afterwards. A reduction that a rank skips takes the mean out of it.

The hook on outputs knows the step of the forward. On a dummy, it copies the tensors that a checkpoint will change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, cast
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch.nn.parallel import DistributedDataParallel

from join import JoinError
from join.batch import Step
from join.collectives._torch_private import accumulators, backward_under_way, on_gradient, uncompiled
from join.protocol.channel import Channel
from join.scaling import Backward
from joinables._torch import autograd, objects, reducer
from joinables.ddp.buffers import BufferSync
from joinables.ddp.mean import Mean
from joinables.dummy_forward import InnerForward, refuse_backward_on_dummy
from joinables.modules import ModuleHook, synchronised_norms, tensors_with_grad
from joinables.own_collectives import refuse_in_plain_block

IN_TORCH_JOIN = (
    "The module is or was in torch's own Join or model.join(). Remove torch's Join, which this one replaces, and wrap"
    " the plain module in a new DistributedDataParallel. [J107]"
)


_NONE = Backward(-1)


@dataclass(slots=True, eq=False)
class BackwardPass:
    """One backward of a DDP module, from the first forward with grad since the last one to its end.

    Attributes:
        call: The call of ``backward()``, since a gradient has entered outputs of the module or arrived at a parameter.
        step: The step of the last forward with grad; ``None`` before.
        synchronises: Whether DDP reduces after the last forward with grad; once a gradient has entered outputs, after
            their forward.
        is_armed: Whether the reducer reduces in this backward, since a synchronised forward has run.
        mean: The mean of its reduction; ``None`` before the reduction is announced.
        factor: The number that multiplies the gradients. It is 0 on a dummy, and if a batch has the weight 0. For a
            comm hook, it turns each gradient into a part of the mean.
        drops: Whether gradients that a factor of 0 multiplies are ``None`` instead of zeros, which take longer. The
            reducer then adds 0.
    """

    call: Backward = _NONE
    step: Step | None = None
    synchronises: bool = False
    is_armed: bool = False
    mean: Mean | None = None
    factor: float = 1.0
    drops: bool = False


class Arrivals:
    """Hooks on the nodes that accumulate the gradients of a DDP module's parameters, as its reducer has them.

    Registering a hook costs as much as several calls of it. So the hooks stay while the module lives. They do nothing
    outside of blocks, and from the first gradient of a backward to the next forward, unless gradients are multiplied:
    the arithmetic of a backward empties the caches, so that a call of a Python function takes 1 us.

    Args:
        ddp: The module.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.handles: list[Any] = []
        """Handles of the hooks; none before the first forward in a block."""
        finalize(ddp, self._remove).atexit = False  # a new module around the same parameters may share the nodes
        hook: Any = partial(self._arrive)  # of all nodes; its function can be replaced
        self._hook = hook
        self.arm: Callable[[], None] = partial(hook.__setstate__, (self._arrive, (), {}, None))
        """Let the hooks find the next backward, and multiply its gradients."""
        self.rest: Callable[[], None] = partial(hook.__setstate__, (_ignore, (), {}, None))
        """Let the hooks do nothing."""
        self.begin: Callable[[], object] = bool
        """Called at the first gradient of a backward."""
        self.task = -1
        """The number of the last backward in which a gradient arrived at a parameter."""
        self.current = BackwardPass()
        """The last backward in which a gradient arrived at a parameter."""

    def watch(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Register the hooks; called before the first forward in a block."""
        self.handles = [node.register_prehook(self._hook) for node in accumulators(parameters)]

    def _remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _arrive(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None] | None:
        """Find a backward, and multiply a gradient; called before each gradient arrives at its parameter."""
        if backward_under_way() != self.task:
            self.begin()
        factor, gradient = self.current.factor, gradients[0]
        if factor == 1.0 or gradient is None:  # SyncBatchNorm passes None for an empty batch
            return None
        if factor:
            return (gradient * factor,)
        return (None if self.current.drops else torch.zeros_like(gradient),)  # even a gradient of NaN is gone


_ignore: Callable[[object], None] = deque[object](maxlen=0).append
_arrivals: WeakKeyDictionary[DistributedDataParallel, Arrivals] = WeakKeyDictionary()


class Forwards:
    """Hooks on a DDP module, which find its backwards and multiply their gradients by a factor.

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
        self.arrivals = _arrivals.get(ddp) or Arrivals(ddp)
        _arrivals[ddp] = self.arrivals
        self.next = BackwardPass()
        """The next backward of the module."""
        self._outputs: list[ref[torch.Tensor]] = []
        self._lock = RLock()  # each device has a thread that calls hooks

    def attach(
        self, channel: Channel, on_forward: Callable[[], None], on_backward: Callable[[BackwardPass], None]
    ) -> list[Any]:
        """Register the hooks; called when a block is entered.

        Args:
            channel: The channel of the block.
            on_forward: Called before each forward with grad.
            on_backward: Called with the next backward when it begins.

        Returns:
            The handles of the hooks, for the caller to remove when the block is left. Later hooks are added to it.
        """
        ddp, inner = self._ddp, cast("torch.nn.Module", self._ddp.module)
        self._channel, self._on_forward, self._on_backward = channel, on_forward, on_backward
        self._param_sync = ddp.require_forward_param_sync
        reducer.suppress_buffer_sync(ddp)
        self.inner = InnerForward(inner, channel, cast("set[str]", ddp.parameters_to_ignore), self.norms)
        """The forward of the module inside, and its tensors that dummies leave unchanged."""
        self._direct_call_hook = inner.register_forward_pre_hook(ModuleHook(self._before_inner))
        # The user's hooks run between these two.
        before = ddp.register_forward_pre_hook(ModuleHook(self._before), prepend=True, with_kwargs=True)
        after = ddp.register_forward_hook(ModuleHook(self._after))
        self._handles = self.inner.handles = list[Any]([before, after, self._direct_call_hook])
        self.arrivals.begin, self.arrivals.task = self._arrive_first, -1
        return self._handles

    def detach(self) -> None:
        """Restore the module; called when the block is left and the handles are removed."""
        self.inner.remove()
        # These hold a batch, or the module.
        del self.inner, self._channel, self._on_forward, self._on_backward
        self.next = self.arrivals.current = BackwardPass()
        self.arrivals.rest()
        self.arrivals.begin = bool
        self._ddp.require_forward_param_sync = self._param_sync

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The outputs of the last synchronised forward that still exist, under ``find_unused_parameters``."""
        return [tensor for output in self._outputs if (tensor := output()) is not None]

    @uncompiled
    def _before_inner(self, *_: Any) -> None:
        if reducer.is_in_forward(self._ddp):
            raise JoinError(
                "DistributedDataParallel.forward was called directly, so Join did not see the call. Call the module"
                " itself: ddp(...). [J108]"
            )

    @uncompiled
    def _before(self, module: Any, *arguments: Any) -> None:
        if self.inner.is_kept:  # since a part of a LossGate ran, or since a forward that raised
            self.inner.restore()
        if self._direct_call_hook is not None:
            self._direct_call_hook.remove()  # the module itself is called, and will be in later steps
            self._direct_call_hook = None
        if objects.is_in_torch_join(self._ddp):
            raise JoinError(IN_TORCH_JOIN)
        channel = self._channel
        if channel.scaling.backward is not None and not autograd.in_backward():  # the last backward raised
            channel.scaling.backward = None
        if self.norms and any(norm.training for norm in self.norms.values()):
            refuse_in_plain_block(self._ddp, "which contains SyncBatchNorm in training mode", channel)
        step = channel.place.step
        watches = step.is_dummy or step.may_be_last
        if channel.late_use is not None:
            channel.late_use = channel.late_use.called(arguments)
        if self._buffers is not None:
            reducer.suppress_buffer_sync(self._ddp)
            self._buffers.notice_new_shapes()
        if torch.is_grad_enabled():
            if not self.arrivals.handles:  # a rank without data needs no hooks
                self.arrivals.watch(self._parameters)
            self.arrivals.arm()
            self._on_forward()
        if watches:
            self.inner.begin(arguments)
            self.inner.put()

    @uncompiled
    def _after(self, module: Any, args: Any, output: Any) -> None:
        if self.inner.is_kept:
            self.inner.restore()
        if not torch.is_grad_enabled():
            return
        if self._buffers is not None and self._buffers.is_pending:
            self._buffers.fulfil()  # the broadcast had to wait for the end of the forward
        is_one = isinstance(output, torch.Tensor) and output.requires_grad  # the usual case
        outputs = [output] if is_one else tensors_with_grad(output)
        synchronises = bool(self._ddp.require_backward_grad_sync)
        backward, step = self.next, self._channel.place.step
        backward.step, backward.synchronises = step, synchronises
        if synchronises:
            backward.is_armed = True
            if self._ddp.find_unused_parameters:
                self._outputs = [ref(tensor) for tensor in outputs]
        hook = partial(self._gradient_enters, synchronises, step)
        for tensor in outputs:
            handle = on_gradient(tensor, hook)
            if tensor.is_leaf:  # the user's own tensor, returned unchanged, outlives the graph
                self._handles.append(handle)

    def _gradient_enters(self, synchronises: bool, step: Step, gradient: torch.Tensor) -> None:
        """Prepare for a backward at the first gradient that enters outputs of the module.

        Args:
            synchronises: Whether DDP reduces gradients after the forward.
            step: The step of the forward.
            gradient: A gradient of the module's output.
        """
        if "_channel" not in vars(self):  # the block has ended, and this is an ordinary DDP module
            return
        call, backward = self._channel.scaling.enter_backward(), self.next
        if call is not backward.call:
            backward.call, backward.synchronises = call, synchronises
            self.arrivals.task = -1
            self.arrivals.arm()
        if step.is_dummy or step is not self._channel.place.step:
            self._check_step(step)

    def _check_step(self, step: Step) -> None:
        """Check that the backward of a forward in a step of a loop runs in this step, and keep a dummy's tensors."""
        current = self._channel.place.step
        if step.is_dummy:
            if not current.in_loop:
                refuse_backward_on_dummy(cast("object", self._ddp.module))
            self.inner.keep_in_backward()
        if step.window != current.window and step.in_loop and current.in_loop:
            raise JoinError(
                f"A backward of DistributedDataParallel ran in step {current.number} of join.iterate, but its forward"
                f" ran in step {step.number}. join.weight, join.shadowing and gradients belong to the batch that was"
                " read last. Run the backward before you read the next batch, and call next() only at the start of a"
                " step. [J701]"
            )

    def _arrive_first(self) -> None:
        """Find out which backward it is whose first gradient arrives, and begin it if it is a new one of the module."""
        arrivals = self.arrivals
        with self._lock:
            task, backward = backward_under_way(), self.next
            if task == arrivals.task:
                return
            call = backward.call
            if call.task != task:
                call = self._channel.scaling.enter_backward(may_be_inside=True)
            if call is not arrivals.current.call:
                is_hidden = call is not backward.call  # no gradient has entered outputs
                if is_hidden and reducer.is_in_forward(self._ddp):
                    name = type(cast("object", self._ddp.module)).__name__
                    raise JoinError(
                        f"A backward ran inside the forward of DistributedDataParallel({name}). It can neither be"
                        " announced nor shadowed there. Return the loss from the forward, and call backward() after it."
                        " [J109]"
                    )
                if is_hidden and backward.step is not None:
                    self._check_step(backward.step)
                    backward.call = call
                if backward.call is call:
                    self._on_backward(backward)
                else:  # it begins at a penalty on the parameters
                    backward = BackwardPass()
                arrivals.current = backward
            arrivals.task = task
            if arrivals.current.factor == 1.0:
                arrivals.rest()
