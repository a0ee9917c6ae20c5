"""Who reduces the gradients of a module that is replayed, and how: :class:`Reduction` and its kinds.

A plain module's gradients are left alone, since nobody knows what the loop does with them. DDP's and FSDP's are divided
by the size of the group; what makes the mean over contributors of it, or the weighted one, is multiplied on afterwards.
"""

from __future__ import annotations

from collections.abc import Generator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from joinables._torch import autograd, reducer
from joinables.sharding import is_dtensor, is_sharded


class Reduction:
    """What reduces a replayed module's gradients; this base is for a module of which nothing is known to do so."""

    scales = False
    """Whether gradients may be scaled."""

    weighs = False
    """Whether ``join.weight`` may be applied where gradients reach their parameters: not where ranks compute gradients
    together (SyncBatchNorm), for there each rank has parts of all ranks' losses."""

    accumulates_in_grad = True
    """Whether what is not reduced yet is in ``grad`` as well, and must not be cleared there."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.mixes_ranks = any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())
        """Whether the module computes with the samples of all ranks together."""
        self.seen: list[torch.nn.Parameter] = []
        """The parameters that autograd sees; filled by ``forwarded``."""
        # How often gradients were written to, in place, when the last reduction ended.
        self._written: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        self._aside: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # the last results, during a reduction

    def attach(self) -> None:
        """Prepare the module for a block; called when it is entered."""

    def detach(self) -> None:
        """Undo what was changed; called when the block is left."""

    @property
    def holds_accumulated(self) -> bool:
        """Whether gradients are there that may have been accumulated before this block and not reduced."""
        return any(bool(_local(gradient).any()) for gradient in self._gradients())

    @property
    def inner(self) -> torch.nn.Module:
        """What a probe can run without reducing or broadcasting anything."""
        return self._module

    @property
    def entrances(self) -> list[torch.nn.Module]:
        """The modules whose outputs gradients may enter first."""
        return [self._module]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose ``grad`` has the result."""
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    @property
    def replicated(self) -> list[torch.Tensor]:
        """Parameters and buffers that are the same on all ranks."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return [tensor for tensor in tensors if not is_dtensor(tensor)]

    def forwarded(self) -> None:
        """Note the parameters that autograd sees; called after a forward."""
        if not self.seen:
            self.seen.extend(self.parameters)

    @property
    def prepares(self) -> bool:
        """Whether the forward that comes prepares a reduction, where that makes a difference to forwards."""
        return True

    @property
    def will_reduce(self) -> bool:
        """Whether the backward of the forward that comes reduces gradients, completely."""
        return all(self.reduces)

    @property
    def reduces(self) -> tuple[bool, bool]:
        """Whether the backward that comes reduces gradients, and whether their sum over all ranks is complete then."""
        return True, True

    def reducing(self, reduces: bool, completely: bool) -> AbstractContextManager[None]:
        """A context in which forwards and backwards reduce gradients, or do not, whatever the module is set to.

        Args:
            reduces: whether they reduce at all.
            completely: whether the sum over all ranks is complete then; a mesh of two dimensions may do one part.
        """
        return nullcontext()

    def set_aside(self, *, accumulated: bool) -> None:
        """Keep what the last reduction has left in ``grad`` out of the next one, whose result will be scaled.

        Args:
            accumulated: whether gradients were accumulated since the last one.
        """

    def scale(self, factor: float) -> None:
        """Multiply the result of the reduction that is over, and add what was set aside."""
        with torch.no_grad():
            for parameter in self.parameters if factor != 1 else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Add what was set aside to the gradients."""
        for parameter, kept in self._aside:
            parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)
        self._aside.clear()

    # -- what the loop does with gradients between reductions ---------------------------------------------------------

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def note_writes(self) -> None:
        """Remember how often gradients were written to until now."""
        for gradient in self._gradients():
            self._written[gradient] = autograd.writes(gradient)

    def emptiness(self) -> tuple[bool, bool]:
        """Whether all gradients are ``None``, and whether those that are not were zeroed, so nothing is kept.

        A rank's shard may be zero, or empty, where others are not; if it was zeroed, something wrote to it, too.
        """
        gradients = self._gradients()
        kept = any(
            self._written.get(gradient) == autograd.writes(gradient) or bool(_local(gradient).any())
            for gradient in gradients
        )
        return not gradients, not kept

    def clear(self, *, to_none: bool, to_zero: bool, unreduced: bool) -> None:
        """Clear gradients as active ranks have, if they have; not those that hold what is ``unreduced``."""
        if unreduced and self.accumulates_in_grad:
            return
        for parameter in self.parameters:
            if to_none:
                parameter.grad = None
            elif to_zero and parameter.grad is not None:
                _local(parameter.grad).zero_()

    # -- buffers, and what went wrong ---------------------------------------------------------------------------------

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether the forward that comes broadcasts buffers."""
        return False

    def suppress_buffer_sync(self) -> None:
        """Keep the forward that comes from broadcasting buffers by itself; :meth:`sync_buffers` does that."""

    def sync_buffers(self, source: int) -> None:
        """Take over buffers from rank ``source``."""

    def reset(self) -> None:
        """Bring the module to rest, after an exception in the middle of something."""


class DDPReduction(Reduction):
    """DDP's reducer, as it is: a joined rank goes through forward and backward like any other."""

    scales = True

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__(module)
        self._ddp = module
        self._armed = False  # a synchronised forward lets the reducer reduce in whichever backward comes next

    @override
    def attach(self) -> None:
        self._param_sync = self._ddp.require_forward_param_sync

    @override
    def detach(self) -> None:
        self._ddp.require_forward_param_sync = self._param_sync

    @property
    @override
    def inner(self) -> torch.nn.Module:
        return cast("torch.nn.Module", self._ddp.module)

    @property
    @override
    def parameters(self) -> list[torch.nn.Parameter]:
        return reducer.reduced_parameters(self._ddp)

    @override
    def forwarded(self) -> None:
        super().forwarded()
        self._armed |= self.prepares

    @property
    @override
    def prepares(self) -> bool:
        return bool(self._ddp.require_backward_grad_sync)

    @property
    @override
    def will_reduce(self) -> bool:
        return self.prepares

    @property
    @override
    def reduces(self) -> tuple[bool, bool]:
        return self._armed, self._armed

    @contextmanager
    @override
    def reducing(self, reduces: bool, completely: bool) -> Generator[None]:
        kept, self._ddp.require_backward_grad_sync = self._ddp.require_backward_grad_sync, reduces
        try:
            yield
        finally:
            self._ddp.require_backward_grad_sync = kept

    @override
    def set_aside(self, *, accumulated: bool) -> None:
        if not accumulated:  # else what is in ``grad`` is to be reduced
            for parameter in self.parameters:
                if parameter.grad is not None:
                    self._aside.append((parameter, parameter.grad.clone()))
                    parameter.grad.zero_()  # in place: it may be a view of a bucket

    @override
    def scale(self, factor: float) -> None:
        self._armed = False
        super().scale(factor)

    @property
    @override
    def broadcasts_buffers(self) -> bool:
        return reducer.broadcasts_buffers(self._ddp) and not reducer.syncs_buffers_after_forward(self._ddp)

    @override
    def suppress_buffer_sync(self) -> None:
        if self.broadcasts_buffers:
            reducer.suppress_buffer_sync(self._ddp)

    @override
    def sync_buffers(self, source: int) -> None:
        reducer.sync_buffers(self._ddp, source)


class ShardedReduction(Reduction):
    """``fully_shard``: each rank gets its shard of the reduced gradients, and they add up in ``grad``."""

    scales = True
    accumulates_in_grad = False

    def __init__(self, module: torch.nn.Module) -> None:
        from joinables._torch import fsdp  # which imports FSDP

        super().__init__(module)
        self._fsdp = fsdp
        self.weighs = not self.mixes_ranks

    @property
    @override
    def entrances(self) -> list[torch.nn.Module]:
        found = self._fsdp.sharded_modules(self._module)
        return found if self._module in found else [*found, self._module]

    @property
    @override
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._fsdp.sharded_parameters(self._module) if parameter.requires_grad]

    @property
    @override
    def replicated(self) -> list[torch.Tensor]:
        # A forward without backward leaves them in the module.
        gathered = {id(parameter) for parameter in self._fsdp.unsharded_parameters(self._module)}
        return [tensor for tensor in super().replicated if id(tensor) not in gathered]

    @override
    def forwarded(self) -> None:
        if not self.seen:
            self.seen.extend(each for each in self._fsdp.unsharded_parameters(self._module) if each.requires_grad)

    @property
    @override
    def reduces(self) -> tuple[bool, bool]:
        return self._fsdp.reduces(self._module)

    @override
    def reducing(self, reduces: bool, completely: bool) -> AbstractContextManager[None]:
        return self._fsdp.reducing(self._module, reduces, completely)

    @property
    @override
    def holds_accumulated(self) -> bool:
        return self._fsdp.holds_accumulated(self._module)

    @override
    def set_aside(self, *, accumulated: bool) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    @override
    def reset(self) -> None:
        self._fsdp.reset(self._module)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is on this rank."""
    return cast("Any", tensor).to_local() if is_dtensor(tensor) else tensor


def reduction_of(module: torch.nn.Module) -> Reduction:
    """What reduces the gradients of ``module``."""
    if isinstance(module, DistributedDataParallel):
        return DDPReduction(module)
    return ShardedReduction(module) if is_sharded(module) else Reduction(module)
