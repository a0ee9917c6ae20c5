"""One suite over every Joinable of this repository: the interface that Join relies on, in blocks without a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Burst, Join, Joinable, JoinHook
from join.collectives import collective_of
from join.registry import joinables_of
from tests.join.counter import Counter, Leading
from tests.joinables.summer import Summer
from tests.models import build
from tests.pool import Pool
from tests.training import shard


def make_ddp() -> Any:
    return DistributedDataParallel(build("norm"))


def make_zero() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(make_ddp().parameters(), torch.optim.Adam, lr=0.1)


def make_sharded() -> Any:
    return shard()


def make_metric() -> Any:
    from torchmetrics import MeanMetric

    return MeanMetric()


MAKERS: dict[str, Callable[[], Any]] = {
    "DistributedDataParallel": make_ddp,
    "compiled DistributedDataParallel": lambda: torch.compile(make_ddp(), backend="eager"),
    "ZeroRedundancyOptimizer": make_zero,
    "Optimizer": lambda: torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]),
    "fully_shard": make_sharded,
    "Optimizer of fully_shard": lambda: torch.optim.Adam(make_sharded().parameters()),
    "Metric": make_metric,
    "GradScaler": lambda: torch.amp.GradScaler("cpu"),
    "Module": lambda: build("mlp"),
    "torch Joinable": Summer,
    "plain Joinable": lambda: Counter(collective_of(None)),
    "Burst": lambda: Leading(collective_of(None)),
}


def conforms(rank: int, name: str) -> list[tuple[str, bool, bool]]:
    target = MAKERS[name]()
    joinables = joinables_of(target)
    described: list[tuple[str, bool, bool]] = []
    for joinable in joinables:
        assert isinstance(joinable, Joinable)
        assert joinable.join_config == (False, False, False)
        assert isinstance(joinable.join_device, torch.device)
        assert joinable.join_name
        hook = joinable.join_hook()
        assert all(callable(getattr(hook, method)) for method in ("main_hook", "post_hook"))
        assert isinstance(hook, JoinHook) or name == "torch Joinable"
        if joinable.communicates:
            assert collective_of(joinable.join_process_group).world_size == 2
        if isinstance(joinable, Burst):
            assert len(joinable.flags(False)) == joinable.flag_count
            assert not joinable.is_pending
        described.append((type(joinable).__name__, joinable.communicates, isinstance(joinable, Burst)))
    for _ in range(2):  # attach and detach leave it ready for the next block
        with Join([target, Counter(collective_of(None))]):
            pass
    assert len({id(joinable.join_target) for joinable in joinables}) == 1
    return described


@pytest.mark.parametrize("name", MAKERS)
def test_joinable_conforms(pool: Pool, name: str) -> None:
    first, second = pool.run(conforms, name, ranks=2)
    assert first == second


def test_order_of_a_ddp_modules_bursts(pool: Pool) -> None:
    described, _ = pool.run(conforms, "DistributedDataParallel", ranks=2)
    assert [name for name, _, _ in described] == ["BucketRebuild", "BufferSync", "GradientSync"]
