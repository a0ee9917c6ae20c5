"""Modules whose forward communicates by itself: ``fully_shard``, FSDP1, and modules that contain SyncBatchNorm.

A rank without data cannot shadow such a module, so in a plain block its forward raises before it sends anything
(:func:`refuse_in_plain_block`). In a loop over ``Join.iterate`` all ranks run it::

    rank with data                                 rank with a dummy
    --------------                                 -----------------
    forward   all-gathers of parameters            the same
    backward  all-gathers of parameters,           the same, with gradients of 0
              reduce-scatters of gradients

A DDP module with SyncBatchNorm has the same joinables as any other DDP module (``joinables.ddp``). The joinable of a
sharded module is :class:`ShardedModule`, which sends nothing. Its optimizer has the joinable of any optimizer, whose
state is not copied after such a loop (``joinables.state``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from typing_extensions import override

from join import Join, JoinError
from join.batch import Step
from join.collectives._torch_private import on_gradient, uncompiled
from join.protocol.channel import Channel
from join.scaling import refuse_unreduced
from joinables._torch import autograd
from joinables._torch.objects import divisors_of, fsdp1_groups, reducers_of, reduces
from joinables.adapter import Announcing
from joinables.dummy_forward import Arguments, DummyForward, emptied_output, refuse_backward_on_dummy
from joinables.modules import ModuleHook, synchronised_norms, tensors_with_grad, zero_of

_FSDP1 = "FullyShardedDataParallel"


class ShardedModule(Announcing):
    """Joinable of a module of ``fully_shard`` or FSDP1, or of a module that contains such modules.

    Each forward in a loop over ``Join.iterate`` is announced. The announcement sends nothing there, but it detects a
    rank that skips a forward.
    """

    join_keywords: ClassVar[frozenset[str] | None] = frozenset({"divide_by_initial_world_size"})
    tracks_leader = True  # a rank with data, whose buffers the others receive
    needs_scale = True

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, f"the forward of {type(module).__name__}")
        self._module, self._norms = module, synchronised_norms(module)
        self.mixes_ranks, self._group = mixing(self.join_name, self._norms), group_of(module)
        parts = filter(_is_sharded_itself, module.modules())
        self._reducers = [reducer for part in parts for reducer in reducers_of(part)]
        self._is_replaced = False  # whether the current forward runs on other arguments than it was called with

    @property
    @override
    def join_device(self) -> torch.device:
        parameter = next(self._module.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    @override
    def join_process_group(self) -> Any:
        return self._group

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self._unreduced = 0  # the number of the window that has ended without a reduction, if any
        # By name, since a module that has not been sharded again after its forward has other, plain parameters.
        parts = cast("Iterator[tuple[str, torch.nn.Module]]", self._module.named_modules())
        sharded = [(name, part) for name, part in parts if _is_sharded_itself(part)]
        not_whole = {name for prefix, part in sharded for name, _ in part.named_parameters(prefix)}
        self._dummy_forward = DummyForward(self._module, join.channel, not_whole, self._norms, compares=True)
        hooks = self._check, self._before, self._after, self._reach_all
        check, before, after, reach = [cast("Any", ModuleHook(hook)) for hook in hooks]
        inside = [part for _, part in sharded if part is not self._module]
        self._handles = [part.register_forward_pre_hook(check, prepend=True) for part in inside]
        self._handles.append(self._module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(self._module.register_forward_hook(after))
        self._handles += [norm.register_forward_hook(reach) for norm in self._norms.values()]

    @override
    def detach(self) -> None:
        super().detach()
        del self._dummy_forward  # it may hold a batch

    @override
    def hand_over(self, leader: int) -> None:
        self._dummy_forward.begin_loop()

    @override
    def check_divisor(self, world_size: int) -> None:
        others = {divisor for reducer in self._reducers for divisor in divisors_of(reducer)} - {None, world_size}
        if others:
            raise JoinError(
                f"The gradients of {self.join_name} are divided by {' and '.join(map(str, others))}, not by the"
                f" {world_size} ranks. If each loss is a mean over the rank's own batch, pass the divisor, times the"
                " number of ranks that share a batch: join.scale(loss, divided_over=number). If losses are divided by"
                " the samples of all ranks already, list nothing: Join([], process_group=None). [J535]"
            )

    @override
    def synchronise_own(self, source: int) -> None:
        self._dummy_forward.synchronise(self._collective, source)

    @uncompiled
    def _check(self, module: Any, args: Any) -> None:
        if not autograd.in_backward():  # a checkpointed module runs its forward again in the backward
            refuse_in_plain_block(module, "whose parameters are sharded", self._channel)

    @uncompiled
    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if autograd.in_backward():
            return None
        self._check(module, args)
        channel, step, arguments = self._channel, self._channel.place.step, (args, kwargs)
        self._is_replaced = False
        watches = step.is_dummy or step.may_be_last
        if channel.late_use is not None:
            channel.late_use = channel.late_use.called(arguments)
        if torch.is_grad_enabled():
            self._enter_window(step)
        channel.announce(self)
        if not watches:
            return None
        self._dummy_forward.begin(arguments)
        if not self._dummy_forward.called(arguments):
            return None
        self._is_replaced = True
        return self._dummy_forward.instead_of(arguments)

    def _enter_window(self, step: Step) -> None:
        if self._unreduced not in (0, step.window):
            refuse_unreduced(self.join_name)
        self._unreduced = step.window if step.ends_window and not all(map(reduces, self._reducers)) else 0

    @uncompiled
    def _after(self, module: Any, args: Any, output: Any) -> Any:
        if not self._channel.place.step.is_dummy or autograd.in_backward():
            return None
        if self._dummy_forward.is_kept:
            self._dummy_forward.restore()
        if self._is_replaced:
            self._is_replaced, output = False, emptied_output(output)
        for tensor in tensors_with_grad(output):
            on_gradient(tensor, self._gradient_enters)
        return output

    @uncompiled
    def _gradient_enters(self, gradient: torch.Tensor) -> None:
        if not self._handles:  # they are removed when the block ends
            return
        if not self._channel.place.step.in_loop:
            refuse_backward_on_dummy(self._module)
        self._dummy_forward.keep_in_backward()

    @uncompiled
    def _reach_all(
        self, norm: torch.nn.SyncBatchNorm, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        """Let gradients of 0 reach the layer's parameters, and the layers before it, on an empty batch.

        SyncBatchNorm itself produces no such gradients. FSDP would then omit parameters from a reduction in
        which other ranks have them.
        """
        if not self._channel.place.step.is_dummy:
            return output
        return output + sum(zero_of(tensor, output) for tensor in (*args, *norm.parameters()))


def refuse_in_plain_block(module: torch.nn.Module, why: str, channel: Channel) -> None:
    """Raise a ``JoinError`` unless all ranks run the module, in the body of a loop over ``Join.iterate``."""
    if channel.place.step.in_loop:
        return
    channel.end_left_loop()  # if a break ended the loop on this rank only, the other ranks leave it here, too
    raise JoinError(
        f"The forward of {type(module).__name__}, {why}, communicates by itself, but ranks without data would not call"
        " it in a plain block. Loop over join.iterate: for batch in join.iterate(loader). [J421]"
    )


def mixing(name: str, norms: dict[str, torch.nn.SyncBatchNorm]) -> str:
    """Return ``Joinable.mixes_ranks`` for a burst of this name, of a module that contains these layers."""
    return f"{name}, which contains SyncBatchNorm" if norms else ""


def is_dtensor(tensor: object) -> bool:
    """Return whether ``tensor`` is a ``DTensor``, without the import of that class, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether ``module`` or a part of it is sharded by ``fully_shard`` or FSDP1."""
    return any(_is_sharded_itself(part) for part in module.modules())


def _is_sharded_itself(module: torch.nn.Module, kinds: Sequence[str] = ("FSDPModule", _FSDP1)) -> bool:
    """Return whether a class of one of these names is among the classes of ``module``, without importing FSDP."""
    return any(cls.__name__ in kinds for cls in type(module).__mro__)


def group_of(module: torch.nn.Module) -> Any:
    """Return the process group of the ranks that share ``module``; ``None`` is the default group.

    Raises:
        ValueError: If it is sharded over a mesh of several dimensions that lacks some ranks, since no process group
            consists of just its ranks.
    """
    fsdp1 = next((part for part in module.modules() if _is_sharded_itself(part, [_FSDP1])), None)
    meshes: list[Any] = [cast("Any", tensor).device_mesh for tensor in module.parameters() if is_dtensor(tensor)]
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    groups: list[Any] = fsdp1_groups(fsdp1) if fsdp1 is not None else mesh.get_all_groups() if mesh is not None else []
    size = math.prod(group.size() for group in groups)
    if len(groups) == 1 and (fsdp1 is not None or size < dist.get_world_size()):
        return groups[0]
    if not groups or size == dist.get_world_size():
        return None
    raise ValueError(
        f"The parameters of {type(module).__name__} are sharded over {size} of {dist.get_world_size()} ranks, in"
        f" {len(groups)} dimensions. Make a process group of these ranks, pass it to"
        " Join([], process_group=group), and remove the module from the list. [J160]"
    )
