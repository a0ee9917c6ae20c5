"""Forwards on dummies: :class:`DummyForward`.

*Modules that cannot take an empty batch.* In a loop over ``Join.iterate``, a rank without data runs such a module on
the arguments of its last call with data in this loop. If the rank had no data in the loop, it runs the module on rows
of ones. It returns the outputs with length 0 (a number, such as a loss, becomes 0), and backward through them produces
gradients of 0. Each rank does this by itself, without sending anything.

A DDP module is called with the empty batch first, since its forward has sent nothing when it raises. Its attributes and
the global random generators are then as they were before, so that a step counts once and draws once. A sharded module
may have issued some of its collectives by then, so it is never called with an empty batch.

*Own tensors.* A forward on a dummy leaves no trace in the tensors that this rank holds whole: its own tensors. These
are buffers, and *frozen* parameters, which do not require grad (a momentum encoder has such parameters). When the loop
ends, they may be out of date, and are copied from a rank with data (:meth:`DummyForward.synchronise`)::

    rank with data                                 rank that had dummies
    --------------                                 ---------------------
    all-gather of objects: checksums from when     the same
    the loop began, names of changed tensors
    broadcasts of the tensors to copy              the same

Sharded parameters change on dummies too, because the other ranks change their shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn
from zlib import crc32

import torch

from join import JoinError, ProtocolError, generators
from join.batch import PLAIN, has_empty_tensor, map_tensors, tensors_in
from join.collectives import Collective
from join.collectives._torch_private import Writes, after_backward, uncompiled, writes_to
from join.collectives.base import as_bytes
from join.collectives.broken import is_broken
from join.protocol.channel import Channel
from join.transfer import broadcast_tree, why_unlike
from joinables._torch import reducer
from joinables.attributes import kept_attributes
from joinables.modules import ModuleHook, Uncopied, hides_tensors, zero_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Norms = Mapping[str, torch.nn.SyncBatchNorm]


class DummyForward:
    """Forwards of one module on dummies: the arguments instead of an empty batch, and the own tensors.

    Frozen parameters that take more memory than the trained ones, such as the base of LoRA, are not copied for a dummy.
    If a forward on a dummy changes them nevertheless, they stay changed until the loop ends.

    Args:
        module: The module.
        channel: The block's channel.
        not_whole: The names of the parameters that are not own tensors.
        norms: The layers that compute with the samples of all ranks. Samples that replace an empty dummy would count
            there. The layers' buffers stay equal on all ranks, as they change on dummies too.
        compares: Whether own tensors may differ between ranks. They are copied when a loop ends if they were equal when
            it began. If ``False``, the engine or the user takes care of buffers, and frozen parameters are copied if a
            dummy changed them.
    """

    def __init__(
        self, module: torch.nn.Module, channel: Channel, not_whole: Set[str], norms: Norms, *, compares: bool
    ) -> None:
        self._module, self._channel, self._compares = module, channel, compares
        self._not_whole, self._norms = not_whole, norms
        self._calls: list[Arguments] = []  # the calls of the last step with data in the current loop, in order
        self._step, self._number = PLAIN, 0  # the step of the last call, and the number of its calls so far
        self._has_any = False  # whether there were own tensors in the last forward on a dummy
        self.is_kept = False
        """Whether own tensors were copied for the current forward or backward on a dummy, and are not restored yet."""
        self._copies: dict[str, torch.Tensor] = {}
        self._large: dict[str, torch.Tensor] = {}  # the frozen parameters that are not copied
        self._writes: Writes = []  # to them, before the forward
        self._changed = set[str]()  # the frozen parameters that dummies have changed in the loop
        self._at_start: dict[str, int] = {}  # checksums of the tensors that may be copied when the loop ends
        # If the parts of the module run before its forward (LossGate): the parts that have no hook yet.
        self._parts = list(module.modules()) if getattr(module, "forward_is_over", False) else []
        self.handles: list[Any] = []
        """Handles of hooks on these parts. The caller removes the hooks."""

    @uncompiled
    def called(self, arguments: Arguments) -> bool:
        """Record a call of the module, on a batch that may be this rank's last, or on a dummy.

        Returns:
            Whether the call is on an empty dummy, and other samples may replace it.
        """
        step = self._channel.place.step
        is_last = step.may_be_last
        if step is not self._step:
            self._step, self._number = step, 0
            if is_last:
                self._calls = []
        self._number += 1
        if is_last:
            with suppress(TypeError):  # which is raised again if a dummy needs these arguments
                arguments = map_tensors(torch.Tensor.detach, arguments)  # without the graphs that produced them
            self._calls.append(arguments)
        return step.is_empty and not self._norms and has_empty_tensor(arguments)

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

    def _own_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the own tensors that are copied for a dummy, and the others, by name."""
        buffers, frozen, trained = dict[str, torch.Tensor](), dict[str, torch.Tensor](), 0
        has_frozen = not all(map(attrgetter("requires_grad"), reducer.held_parameters(self._module)))
        for name, each in self._module.named_parameters() if has_frozen else ():  # the names take long
            if each.requires_grad:
                trained += each.nbytes
            elif name not in self._not_whole and not why_unlike(each):
                frozen[name], trained = each, trained - each.nbytes
        for name, each in self._module.named_buffers():
            if name.rpartition(".")[0] not in self._norms:
                buffers[name] = each
        return (buffers | frozen, {}) if trained >= 0 else (buffers, frozen)

    def begin(self, arguments: Arguments) -> None:
        """Copy the own tensors if a forward that begins is on a dummy, and does not evaluate other samples."""
        if self._parts:
            self._watch_parts()
        step, trains = self._channel.place.step, self._module.training or torch.is_grad_enabled()
        if step.is_dummy and (trains or not step.is_empty or has_empty_tensor(arguments)):
            self.keep()

    def keep(self) -> None:
        """Copy the own tensors, if there are any."""
        own, self._large = self._own_tensors()
        self._copies = {name: each.detach().clone() for name, each in own.items()}
        self._writes = writes_to(self._large.values()) if self._large else []
        self.is_kept = self._has_any = bool(own or self._large)

    def keep_in_backward(self) -> None:
        """Copy and restore them around the current backward, in which checkpointed layers run their forward again."""
        if self._has_any and not self.is_kept:
            self.keep()
            after_backward(self.restore)

    def restore(self) -> None:
        """Undo the writes to the own tensors since they were copied."""
        copies, self._copies, self.is_kept = self._copies, {}, False
        frozen = [(name, each) for name, each in self._module.named_parameters() if name in copies]
        self._changed |= {name for name, each in frozen if not torch.equal(each, copies[name])}
        written = zip(self._large, self._writes, writes_to(self._large.values()), strict=True)
        self._changed |= {name for name, before, after in written if before != after}
        reducer.set_tensors(self._module, copies)

    def begin_loop(self) -> None:
        """Record the own tensors that may be copied when the loop ends; called on all ranks in its first step."""
        if self._channel.place.step.number > 1:
            return
        self._calls, self._changed, self.is_kept, self._at_start = [], set[str](), False, {}
        for own in self._own_tensors():
            for name, each in own.items():
                if not why_unlike(each) and (self._compares or isinstance(each, torch.nn.Parameter)):
                    self._at_start[name] = _checksum(each) if self._compares else 0
        if self._channel.place.step.is_dummy:
            self._watch_parts()

    def synchronise(self, collective: Collective, source: int) -> None:
        """Copy own tensors from rank ``source``; called on all ranks when a loop ends. Later calls do nothing.

        Args:
            collective: The ranks.
            source: The rank whose tensors are sent.
        """
        at_start, self._at_start, self.is_kept = self._at_start, {}, False
        if not at_start:
            return
        ranks: list[tuple[dict[str, int], list[str]]]
        ranks = collective.all_gather_object([at_start, sorted(self._changed)], plain=True)
        wanted = set(at_start) if self._compares else {name for _, changed in ranks for name in changed}
        wanted -= {name for name in wanted for theirs, _ in ranks if theirs.get(name) != at_start.get(name)}
        held = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        own = {name: held[name] for name in at_start if name in wanted & held.keys()}
        reducer.set_tensors(self._module, broadcast_tree(collective, own, source))

    def _watch_parts(self) -> None:
        """Copy the own tensors before a part runs on a dummy, if the parts run before the forward of the module."""
        hook = ModuleHook(self._before_part)
        self.handles += [part.register_forward_pre_hook(hook) for part in self._parts]
        self._parts = []

    @uncompiled
    def _before_part(self, part: torch.nn.Module, *_: Any) -> None:
        if self._channel.place.step.is_dummy and not self.is_kept and (part.training or torch.is_grad_enabled()):
            self.keep()


def refuse_backward_on_dummy(module: object) -> NoReturn:
    """Raise a ``ProtocolError`` because a backward of a forward on a dummy runs outside the loop body."""
    raise ProtocolError(
        f"A backward of {type(module).__name__} ran after the loop over join.iterate in which its forward ran on a"
        " dummy, so it would count as data. Run the backward in the loop body. [J294]"
    )


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
            f"A module that cannot take an empty batch returns an object of type {type(output).__name__}, in which Join"
            " finds no tensor to empty. Return tensors, containers of them, or a dataclass, or use"
            " join.iterate(..., dummy='last'). [J115]"
        )
    # FSDP2 warns of outputs that are views.
    return map_tensors(lambda tensor: tensor[:0].clone() if tensor.dim() else zero_of(tensor, tensor), output)


class InnerForward(DummyForward, Uncopied):
    """Stand-in for the forward of the module inside a DDP module, for one call.

    If the module cannot take its empty batch, it runs on other arguments. The replacement is the module's ``forward``
    from ``put`` until it is called once, or removed. A hook could not catch the exception of a forward on an empty
    batch, and an attempt in a hook would run the module twice on each dummy that it accepts.

    Args:
        module: The module.
        channel: The block's channel.
        not_whole: The names of the parameters that are not own tensors.
        norms: As for :class:`DummyForward`.
    """

    def __init__(self, module: torch.nn.Module, channel: Channel, not_whole: Set[str], norms: Norms) -> None:
        super().__init__(module, channel, not_whole, norms, compares=False)
        self._refuses_empty = False  # whether the module cannot take an empty batch
        self._taken = set[int]()  # the numbers of calls in a step that took one, so that nothing has to be undone

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

    @partial(uncompiled, with_calls=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, or run it on other arguments."""
        self.remove()
        arguments = args, kwargs
        if self.called(arguments):
            return self._run_on_dummy(arguments)
        return self.original(*args, **kwargs)

    @uncompiled
    def _run_on_dummy(self, arguments: Arguments) -> Any:
        args, kwargs = arguments
        if not self._refuses_empty:
            undo, drawn = bool, dict[str, Any]()
            if self._number not in self._taken:
                undo, drawn = kept_attributes(self._module), generators.capture()
            try:
                output = self.original(*args, **kwargs)
            except Exception as error:
                if is_broken(error):
                    raise  # another rank has failed
                self._refuses_empty = True
                undo()  # the attempt may have written, counted and drawn before it raised
                generators.restore(drawn)
                self.restore()
                self.keep()
            else:
                self._taken.add(self._number)
                return output
        args, kwargs = self.instead_of(arguments)
        return emptied_output(self.original(*args, **kwargs))
