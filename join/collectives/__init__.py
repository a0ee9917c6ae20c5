"""Collectives: what carries the protocol, and :func:`collective_of`, which finds it for a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from join.collectives.base import Collective, Line, ReduceOp, RollCall, Sum, Work
from join.collectives.single import SingleCollective
from join.collectives.threads import ThreadCollective, run_threads
from join.collectives.torch import TorchCollective
from join.collectives.torch import of_group as _of_group

__all__ = [
    "Collective",
    "Line",
    "ReduceOp",
    "RollCall",
    "SingleCollective",
    "Sum",
    "ThreadCollective",
    "TorchCollective",
    "Work",
    "collective_of",
    "run_threads",
]


def collective_of(group: Any) -> Collective:
    """Return the collective of ``group``, the same one for the same group as long as anybody holds it.

    Args:
        group: a ``ProcessGroup``, ``None`` for the default group, or a :class:`Collective`, which is returned as it is
            (a :class:`TorchCollective` only if it is the first of its group).

    Raises:
        ValueError: if ``group`` is ``None`` and ``torch.distributed`` is not initialised.
        TypeError: if ``group`` is something else.
    """
    if isinstance(group, TorchCollective):
        return _of_group.setdefault(group.group, group)
    if isinstance(group, Collective):
        return group
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "process group None means the default one, but torch.distributed is not initialised; call"
                " init_process_group() first, or give a group [J022]"
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{group!r} is neither a ProcessGroup nor a join.collectives.Collective; give one of these [J023]"
        )
    collective = _of_group.get(group)
    if collective is None:
        collective = _of_group[group] = TorchCollective(group)
    return collective
