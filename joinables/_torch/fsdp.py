"""Every private API of ``fully_shard`` that this package calls, each with what it stands in for.

By itself because it needs FSDP, which only those import who use it. Nothing else in
``joinables`` touches a name of FSDP that starts with an underscore.
"""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from joinables._torch.versions import NEEDED_TO_RESET, param_groups, require, reset_iter_state

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
require(
    {
        "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
        f"{_FULLY_SHARD}._fsdp_common:HSDPMeshInfo": ("replicate_process_group",),
        f"{_FULLY_SHARD}._fsdp_param:FSDPParam": ("_unsharded_param", "sharded_param", "unsharded_accumulated_grad"),
        f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup": (
            "_partial_reduce_output",
            "all_reduce_grads",
            "fsdp_params",
            "mesh_info",
            "reduce_grads",
        ),
        f"{_FULLY_SHARD}._fsdp_state:FSDPState": ("_fsdp_param_groups|_fsdp_param_group", "_is_root"),
    }
)
if not hasattr(FSDPModule, "reset_iter_state"):
    require(NEEDED_TO_RESET)


def sharded_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules in ``module`` to which ``fully_shard`` was applied."""
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def _groups(module: torch.nn.Module) -> Iterator[Any]:
    """What is communicated together. Stands in for getters of the settings below: there are setters only."""
    seen: set[int] = set()
    for each in sharded_modules(module):
        for group in param_groups(cast("Any", each)._get_fsdp_state()):
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def sharded_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that an optimizer steps. Stands in for ``parameters()``, which may have the unsharded ones."""
    return [each.sharded_param for group in _groups(module) for each in group.fsdp_params]


def unsharded_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that autograd sees, as far as a forward has made them. They stay the same from then on."""
    found = [getattr(each, "_unsharded_param", None) for group in _groups(module) for each in group.fsdp_params]
    return [each for each in found if each is not None]


def holds_accumulated(module: torch.nn.Module) -> bool:
    """Whether gradients are there that were accumulated and not reduced over all ranks, since the settings say so.

    Stands in for asking FSDP, which keeps them beside ``grad`` of the sharded parameters.
    """
    for group in _groups(module):
        if group._partial_reduce_output is not None:
            return True
        for each in group.fsdp_params:
            if each.unsharded_accumulated_grad is not None:
                return True
    return any(parameter.grad is not None for parameter in unsharded_parameters(module))


def reduces(module: torch.nn.Module) -> tuple[bool, bool]:
    """Whether a backward reduces gradients, and whether over all replicas, too (HSDP; without, the same)."""
    groups = list(_groups(module))
    reduces = any(group.reduce_grads for group in groups)
    replicated = [group for group in groups if hasattr(group.mesh_info, "replicate_process_group")]
    return reduces, reduces and (not replicated or any(group.all_reduce_grads for group in replicated))


@contextmanager
def reducing(module: torch.nn.Module, reduces: bool, all_reduces: bool) -> Generator[None]:
    """Within the context, backwards reduce gradients or not, as told."""
    kept = [(group, group.reduce_grads, group.all_reduce_grads) for group in _groups(module)]
    for group, _, _ in kept:
        group.reduce_grads, group.all_reduce_grads = reduces, all_reduces
    try:
        yield
    finally:
        for group, reduces_before, all_reduces_before in kept:
            group.reduce_grads, group.all_reduce_grads = reduces_before, all_reduces_before


def reset(module: torch.nn.Module) -> None:
    """Bring a module back to rest in whose forward or backward an exception came up."""
    for each in sharded_modules(module):
        if cast("Any", each)._get_fsdp_state()._is_root:  # only known from the first forward on
            reset_iter_state(each)
