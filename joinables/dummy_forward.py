"""Forwards on dummies: :class:`DummyForward`.

*Modules that cannot take an empty batch.* In a loop over ``Join.iterate``, a rank without data runs such a module on
the arguments of its last call with data. If the rank never had data, it runs the module on rows of ones. It returns the
outputs with length 0 (a number, such as a loss, becomes 0), and backward through them produces gradients of 0. Each
rank does this by itself, without sending anything.

A DDP module is called with the empty batch first, since its forward has sent nothing when it raises. A sharded module
may have issued some of its collectives by then, so it is never called with an empty batch.

*Own tensors.* A forward on a dummy leaves no trace in the tensors of which this rank holds all elements: buffers, and
*frozen* parameters, which do not require grad, such as those of a momentum encoder. So these tensors may be out of date
when the loop ends. They are copied from a rank with data then (:meth:`DummyForward.synchronise`)::

    rank with data                                 rank that had dummies
    --------------                                 ---------------------
    all-gather of objects: checksums from when     the same
    the loop began, names of changed tensors
    broadcasts of the tensors to copy              the same

Parameters of which each rank holds a part change on dummies too, because the other ranks change their parts.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NoReturn
from zlib import crc32

import torch

from join import JoinError, ProtocolError
from join.batch import StepBatch, has_empty_tensor, map_tensors, tensors_in
from join.collectives import Collective
from join.collectives.base import as_bytes
from join.collectives.broken import is_broken
from join.protocol.channel import Channel
from join.transfer import broadcast_tensors
from joinables._torch import autograd, reducer
from joinables._torch.objects import call_uncompiled, compiler_under_way, not_compiled, uncompiled
from joinables.modules import ModuleHook, Uncopied, hides_tensors, run_uncompiled, zero_of
from joinables.state import is_plain

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class DummyForward:
    """Forwards of one module on dummies: the arguments instead of an empty batch, and the own tensors.

    Frozen parameters that take more memory than the trained ones, such as the base of LoRA, are not copied for a dummy.
    A forward must not change them.

    Args:
        module: The module.
        channel: The block's channel.
        norms: The names of layers that compute with the samples of all ranks (SyncBatchNorm). Their buffers change on
            dummies too.
        not_whole: The ids of parameters that are not own tensors.
        compares: Whether own tensors may differ between ranks. They are copied when a loop ends if they were equal when
            it began. If ``False``, the engine or the user takes care of buffers, and frozen parameters are copied if a
            dummy changed them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        channel: Channel,
        norms: Container[str],
        not_whole: Container[int],
        compares: bool,
    ) -> None:
        self._module, self._channel, self._norms = module, channel, norms
        self._not_whole, self._compares = not_whole, compares
        self._calls: list[Arguments] = []  # the calls of the last step with data, in order
        self._step = self._number = 0
        self.is_kept = False
        """Whether own tensors were copied for the current forward or backward on a dummy, and are not restored yet."""
        self._copies: dict[str, torch.Tensor] = {}
        self._constant: list[torch.Tensor] = []  # the frozen parameters that are not copied
        self._writes: list[tuple[int, int]] = []  # the writes to them before the forward
        self._changed = set[str]()  # the frozen parameters that dummies have changed in the loop
        self._at_start: dict[str, int] = {}  # checksums of the tensors that may be copied when the loop ends
        # If the parts of the module run before its forward (LossGate): the parts that have no hook yet.
        self._parts = list(module.modules()) if getattr(module, "forward_is_over", False) else []
        self.handles: list[Any] = []
        """Handles of hooks on these parts. The caller removes the hooks."""

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
            # The tensors are kept without the graphs that produced them.
            self._calls.append(map_tensors(torch.Tensor.detach, arguments))
        # An evaluation on other samples may follow in the same step.
        trains = self._module.training or torch.is_grad_enabled()
        if channel.step.shadowing and (
            trains or channel.step.batch is not StepBatch.EMPTY or has_empty_tensor(arguments)
        ):
            self.keep()

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

    # -- own tensors --------------------------------------------------------------------------------------------------

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        parameters = dict(self._module.named_parameters())
        trained = sum(each.nbytes for each in parameters.values() if each.requires_grad)
        for name, each in list(parameters.items()):
            if each.requires_grad or id(each) in self._not_whole or not is_plain(each):
                del parameters[name]
        is_large = sum(each.nbytes for each in parameters.values()) > trained
        self._constant = list(parameters.values()) if is_large else []
        buffers = dict(self._module.named_buffers())
        own = {name: each for name, each in buffers.items() if name.rpartition(".")[0] not in self._norms}
        return own if is_large else own | parameters

    def keep(self) -> None:
        """Copy the own tensors before a forward on a dummy."""
        self._copies = {name: each.detach().clone() for name, each in self._own_tensors().items()}
        self._writes, self.is_kept = autograd.writes(self._constant), True

    def keep_in_backward(self) -> None:
        """Copy and restore them around the current backward, in which checkpointed layers run their forward again."""
        if not self.is_kept:
            self.keep()
            autograd.after_backward(self.restore)

    def restore(self) -> None:
        """Undo all writes to the own tensors since they were copied.

        Raises:
            JoinError: If a frozen parameter changed that was not copied.
        """
        copies, self._copies, self.is_kept = self._copies, {}, False
        if autograd.writes(self._constant) != self._writes:
            raise JoinError(
                f"On a dummy, a forward of {type(self._module).__name__} changed parameters without requires_grad. Join"
                " cannot undo this, because these parameters take more memory than the trained ones. Register the"
                " tensors that a forward changes as buffers. [J530]"
            )
        for name, parameter in self._module.named_parameters():
            if name in copies and not torch.equal(parameter, copies[name]):
                self._changed.add(name)
        reducer.set_tensors(self._module, copies)

    def begin_loop(self) -> None:
        """Record the own tensors that may be copied when the loop ends; called on all ranks in its first step."""
        self._changed, self.is_kept, own = set(), False, self._own_tensors()
        if self._compares:
            self._at_start = {name: _checksum(each) for name, each in own.items() if is_plain(each)}
        else:
            self._at_start = {name: 0 for name, each in own.items() if isinstance(each, torch.nn.Parameter)}
        if self._channel.step.shadowing:
            self.watch_parts()

    def synchronise(self, collective: Collective, source: int) -> None:
        """Copy own tensors from rank ``source``; called on all ranks when a loop ends. Later calls do nothing.

        Args:
            collective: The ranks.
            source: The rank whose tensors are sent.
        """
        at_start, self._at_start, self.is_kept = self._at_start, {}, False
        if not at_start:
            return
        held = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        ours = {name: (at_start[name], held[name].shape, held[name].dtype) for name in at_start.keys() & held.keys()}
        theirs: list[Any] = collective.all_gather_object((ours, ours if self._compares else self._changed))
        names = [name for name in at_start if any(name in changed for _, changed in theirs)]
        equal = [name for name in names if all(each.get(name) == ours.get(name) for each, _ in theirs)]
        broadcast_tensors(collective, [held[name] for name in equal], source)

    def watch_parts(self) -> None:
        """Copy the own tensors before a part runs on a dummy, if the parts run before the forward of the module."""
        hook = ModuleHook(run_uncompiled, self._before_part)
        self.handles += [part.register_forward_pre_hook(hook) for part in self._parts]
        self._parts = []

    def _before_part(self, part: torch.nn.Module, *_: Any) -> None:
        trains = part.training or torch.is_grad_enabled()
        if self._channel.step.shadowing and trains and not (self.is_kept or autograd.in_backward()):
            self.keep()


def refuse_backward_on_dummy(module: object) -> NoReturn:
    """Raise a ``ProtocolError`` because a backward of a forward on a dummy runs outside the loop body."""
    raise ProtocolError(
        f"A backward of {type(module).__name__} ran after the loop over join.iterate in which its forward ran on a"
        " dummy, so it would count as data. Run the backward in the loop body. [J294]"
    )


def is_on_empty_dummy(channel: Channel, arguments: Any) -> bool:
    """Return whether these arguments are the empty dummy of this step, rather than other samples to evaluate."""
    return channel.step.batch is StepBatch.EMPTY and has_empty_tensor(arguments)


def _checksum(tensor: torch.Tensor) -> int:
    data = bytearray(tensor.nbytes + 1)  # torch refuses an empty buffer
    torch.frombuffer(data, dtype=torch.uint8)[:-1].copy_(as_bytes(tensor.contiguous()))
    return crc32(data)


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
        dummy_forward: The forwards of the module on dummies.
        stands_in: Whether the module may run on other arguments; not if these would count (SyncBatchNorm).
    """

    def __init__(
        self, module: torch.nn.Module, channel: Channel, dummy_forward: DummyForward, *, stands_in: bool
    ) -> None:
        super().__init__(module.forward)
        self._module, self._channel, self._dummy_forward = module, channel, dummy_forward
        self._stands_in = stands_in
        self._refuses_empty = False  # whether the module cannot take an empty batch

    def put(self) -> None:
        """Replace the next forward, at the beginning of a loop over ``Join.iterate`` or when this rank's data ends."""
        self._dummy_forward.watch_parts()
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
                self._dummy_forward.restore()  # the attempt may have written before it raised
                self._dummy_forward.keep()
        args, kwargs = self._dummy_forward.instead_of(arguments)
        return emptied_output(self.original(*args, **kwargs))
