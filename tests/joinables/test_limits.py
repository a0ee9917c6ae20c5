"""The time limit of the process group's operations, which is that of bursts while a block has a ``timeout``."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import EarlyTerminationError, Join
from join.collectives._torch_private import timeout_of
from tests.harness import Pool
from tests.training import batch, build


def limit() -> float:
    return timeout_of(dist.distributed_c10d._get_default_group()).total_seconds()


class Watches:
    """State that notes the limit under which it is copied."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        self.limits.append(limit())
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.limits.append(limit())


def copies_state(rank: int) -> tuple[list[float], float]:
    ddp, watches = DistributedDataParallel(build("mlp")), Watches()
    before = limit()
    with Join([ddp, watches], timeout=30.0):
        assert limit() == 60.0
        for step in range((2, 1, 0)[rank]):
            ddp(batch(rank, 0, step)[0]).sum().backward()
    return watches.limits, before


def test_state_is_copied_under_the_limit_of_the_group(pool: Pool) -> None:
    for limits, before in pool.run(copies_state):
        on_entering, on_comparing, *copied = limits
        assert on_entering == on_comparing == 60.0
        assert copied and copied == [before] * len(copied)


def ends_early(rank: int) -> tuple[float, float]:
    ddp = DistributedDataParallel(build("mlp"))
    before = limit()
    with pytest.raises(EarlyTerminationError), Join([ddp], throw_on_early_termination=True, timeout=30.0):
        for step in range((2, 1, 0)[rank]):
            ddp(batch(rank, 0, step)[0]).sum().backward()
    return limit(), before


def test_the_limit_is_restored_after_an_error(pool: Pool) -> None:
    for after, before in pool.run(ends_early):
        assert after == before
