"""Which tensors and modules are sharded over ranks, and over which: ``DTensor``, FSDP."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import torch.distributed as dist


def is_dtensor(tensor: object) -> bool:
    """Whether ``tensor`` is a ``DTensor``; does not import that class, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to ``module`` or to a part of it."""
    return any(_has_base(each, "FSDPModule") for each in module.modules())


def is_fsdp1(module: object) -> TypeGuard[torch.nn.Module]:
    """Whether ``module`` is a ``FullyShardedDataParallel``."""
    return _has_base(module, "FullyShardedDataParallel")


def _has_base(obj: object, name: str) -> bool:
    """Whether a class of this name is among the classes of ``obj``; FSDP is not imported to find out."""
    return any(cls.__name__ == name for cls in type(obj).__mro__)


def group_of(tensors: Iterable[torch.Tensor], name: str) -> Any:
    """The process group over which ``tensors`` are sharded; ``None`` is the default group.

    Args:
        tensors: parameters; those that are no ``DTensor`` are ignored.
        name: the name of the object that has them, for the error.

    Raises:
        ValueError: if they are sharded over a mesh of several dimensions that lacks some ranks: no group has just its
            ranks.
    """
    meshes: list[Any] = [tensor.device_mesh for tensor in tensors if is_dtensor(tensor)]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    if not meshes:
        return None
    mesh = max(meshes, key=lambda each: each.size())
    if mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    raise ValueError(
        f"the parameters of {name} are spread over {mesh}, which has {mesh.size()} of {dist.get_world_size()} ranks and"
        " several dimensions; make a process group of these ranks and give Replay(module, process_group=...),"
        " ShardStep(optimizer, process_group=...) [J160]"
    )
