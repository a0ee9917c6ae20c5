"""Forwards on dummies for modules that cannot take an empty batch: :class:`DummyForward`.

In a loop over ``Join.iterate``, a rank without data runs such a module on the arguments of its last call with data. If
the rank never had data, it runs the module on rows of ones. It returns the outputs with length 0 (a number, such as a
loss, becomes 0), and backward through them produces gradients of 0. Each rank does this by itself, without sending
anything.

A DDP module is called with the empty batch first, since its forward has sent nothing when it raises. A sharded module
may have issued some of its collectives by then, so it is never called with an empty batch.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

import torch

from join import JoinError, ProtocolError
from join.batch import StepBatch, has_empty_tensor, map_tensors, tensors_in
from join.collectives.broken import is_broken
from join.protocol.channel import Channel
from joinables._torch.objects import call_uncompiled, compiler_under_way, not_compiled, uncompiled
from joinables.modules import Uncopied, hides_tensors, zero_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class DummyForward:
    """Arguments on which a module can run, on this rank, instead of an empty batch."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls: list[Arguments] = []  # the calls of the last step with data, in order
        self._step = self._number = 0

    def called(self, arguments: Arguments) -> None:
        """Record a call of the module, on a batch that may be this rank's last, or on a dummy.

        Raises:
            ProtocolError: If it is on a dummy of a loop that has ended.
        """
        channel = self._channel
        if channel.late_use is not None:
            channel.late_use.used(arguments)
        is_last = channel.step.batch is StepBatch.LAST
        if channel.step.number != self._step:
            self._step, self._number = channel.step.number, 0
            if is_last:
                self._calls = []
        self._number += 1
        if is_last:
            with suppress(TypeError):  # which is raised again if a dummy needs these arguments
                arguments = map_tensors(torch.Tensor.detach, arguments)  # without the graphs that produced them
            self._calls.append(arguments)

    def instead_of(self, arguments: Arguments) -> Arguments:
        """Return arguments for the current call, to replace the empty ones, which then receive gradients of 0."""
        calls = self._calls
        instead = calls[min(self._number, len(calls)) - 1] if calls else map_tensors(_with_rows, arguments)
        sources = [tensor for tensor in tensors_in(arguments) if tensor.requires_grad]

        def linked(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor.clone()
            return tensor.detach() + sum(zero_of(source, tensor) for source in sources)

        return map_tensors(linked, instead)


def refuse_backward_on_dummy(module: object) -> NoReturn:
    """Raise a ``ProtocolError`` because a backward of a forward on a dummy runs outside the loop body."""
    raise ProtocolError(
        f"A backward of {type(module).__name__} ran after the loop over join.iterate in which its forward ran on a"
        " dummy, so it would count as data. Run the backward in the loop body. [J294]"
    )


def is_on_empty_dummy(channel: Channel, arguments: Any) -> bool:
    """Return whether these arguments are the empty dummy of this step, rather than other samples to evaluate."""
    return channel.step.batch is StepBatch.EMPTY and has_empty_tensor(arguments)


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return two rows of ones for an empty tensor, as most modules accept ones, and BatchNorm refuses a single row."""
    if tensor.dim() == 0 or len(tensor):
        return tensor
    return torch.ones(2, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)


def emptied_output(output: Any) -> Any:
    """Return the output with tensors of length 0 and numbers of 0; a backward from them gives gradients of 0.

    Raises:
        JoinError: If ``output`` may contain tensors, but none is found.
    """
    tensors = tensors_in(output)
    if not tensors and hides_tensors(output):
        raise JoinError(
            f"A module that cannot take an empty batch returns a {type(output).__name__}, in which Join finds no tensor"
            " to empty. Return tensors, containers of them, or a dataclass, or use join.iterate(..., dummy='last')."
            " [J115]"
        )
    # FSDP2 warns of outputs that are views.
    return map_tensors(lambda tensor: tensor[:0].clone() if tensor.dim() else zero_of(tensor, tensor), output)


class InnerForward(Uncopied):
    """Stand-in for the forward of the module inside a DDP module, for one call.

    If the module cannot take its empty batch, it runs on other arguments. The replacement is the module's ``forward``
    from ``put`` until it is called once, or removed. A hook could not catch the exception of a forward on an empty
    batch, and an attempt in a hook would run the module twice on each dummy that it accepts.

    Args:
        module: The module.
        channel: The block's channel.
        stands_in: Whether the module may run on other arguments; not if these would count (SyncBatchNorm).
    """

    def __init__(self, module: torch.nn.Module, channel: Channel, *, stands_in: bool) -> None:
        super().__init__(module.forward)
        self._module, self._channel, self._dummy_forward = module, channel, DummyForward(channel)
        self._stands_in = stands_in
        self._refuses_empty = False  # whether the module cannot take an empty batch

    def put(self) -> None:
        """Replace the next forward, at the beginning of a loop over ``Join.iterate`` or when this rank's data ends."""
        attributes = vars(self._module)
        if attributes.get("forward") is self:
            return  # DDP raised before the forward that it was put for
        self._attribute = attributes.get("forward")  # the user's own attribute, if any
        self.original = self._module.forward
        attributes["forward"] = self

    def remove(self) -> None:
        """Restore the module's own forward."""
        attributes = vars(self._module)
        if attributes.get("forward") is self:
            del attributes["forward"]
            if self._attribute is not None:
                attributes["forward"] = self._attribute

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, or run it on other arguments."""
        self.remove()
        compiled, arguments = compiler_under_way() is not None, (args, kwargs)
        if call_uncompiled(self._is_on_empty_dummy, arguments) if compiled else self._is_on_empty_dummy(arguments):
            return self._run_on_dummy(arguments)
        return self.original(*args, **kwargs)

    def _is_on_empty_dummy(self, arguments: Arguments) -> bool:
        """Record the call and return whether it is on an empty dummy."""
        self._dummy_forward.called(arguments)
        return self._stands_in and is_on_empty_dummy(self._channel, arguments)

    @uncompiled
    def _run_on_dummy(self, arguments: Arguments) -> Any:
        args, kwargs = arguments
        if not self._refuses_empty:
            try:
                return self.original(*args, **kwargs)
            except Exception as error:
                if is_broken(error):
                    raise  # another rank has failed
                self._refuses_empty = True
        args, kwargs = self._dummy_forward.instead_of(arguments)
        return emptied_output(self.original(*args, **kwargs))
