"""Collectives, which carry the protocol, and :func:`collective_of`, which returns the collective of a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from join.collectives.base import Collective, ReduceOp
from join.collectives.line import DONE, Line, Sum, Work
from join.collectives.single import SingleCollective
from join.collectives.threads import ThreadCollective, run_threads
from join.collectives.torch import TorchCollective
from join.collectives.torch import of_group as _of_group

__all__ = [
    "DONE",
    "Collective",
    "Line",
    "ReduceOp",
    "SingleCollective",
    "Sum",
    "ThreadCollective",
    "TorchCollective",
    "Work",
    "collective_of",
    "run_threads",
]


def collective_of(group: Any) -> Collective:
    """Return the collective of ``group``.

    The same group has the same collective as long as the collective is referenced.

    Args:
        group: A ``ProcessGroup``; ``None`` for the default group; or a :class:`Collective`, which is returned unchanged
            (a :class:`TorchCollective` only if it is the first of its group).

    Raises:
        ValueError: If ``group`` is ``None`` and ``torch.distributed`` is not initialised, or if ``group`` is a
            :class:`Collective` that is not set up.
        TypeError: If ``group`` is something else.
    """
    if isinstance(group, TorchCollective):
        return _of_group.setdefault(group.group, group)
    if isinstance(group, Collective):
        if not hasattr(group, "rank"):
            raise ValueError(
                f"process_group is a collective ({type(group).__name__}) that is not set up. Call its setup(rank,"
                " world_size) on all ranks first, which calls super().setup(rank, world_size). [J818]"
            )
        return group
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "process_group=None is the default process group, but torch.distributed is not initialised. Call"
                " torch.distributed.init_process_group() first, or pass a process group. [J022]"
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group={group!r} is neither a ProcessGroup nor a join.collectives.Collective. Pass one of these."
            " [J023]"
        )
    return _of_group.get(group) or _of_group.setdefault(group, TorchCollective(group))
