"""One suite over every Joinable of this repository: the interface that Join relies on, and steps of one rank alone.

Of each there is a :class:`Subject`: the object, what a step with it is, and what it ends with. One process that makes
the same steps on the same batches is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Burst, Join, Joinable, JoinHook
from join.collectives import SingleCollective, collective_of
from join.registry import joinables_of
from joinables import Mean
from tests.dropin.counter import Summer
from tests.harness import Pool, in_test_all
from tests.join.counter import Counter, Leading
from tests.training import TOLERANCE, assert_same, batch, build, flat_state, full_state, shard, whole

STEPS = 3
Batch = tuple[torch.Tensor, torch.Tensor]
Scale = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Subject:
    """What takes part in a block.

    Attributes:
        target: the object of which the suite is.
        step: what a rank does with a batch, and with what scales its loss.
        state: what is the same on all ranks after the block, as numbers and tensors.
        beside: what else is trained, and so listed with it.
        in_loop: whether it takes part in loops over ``join.iterate`` only.
    """

    target: Any
    step: Callable[[Batch, Scale], None]
    state: Callable[[], Any]
    beside: list[Any] = field(default_factory=list[Any])
    in_loop: bool = False


def as_it_is(loss: torch.Tensor) -> torch.Tensor:
    return loss


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def training(target: str, module: Any, optimizer: Any, inner: nn.Module, **options: Any) -> Subject:
    """A module, by which a loss is computed, and its optimizer, whose rate decays; either is the target."""

    def step(data: Batch, scale: Scale) -> None:
        x, y = data
        optimizer.zero_grad()
        scale(((module(x) - y) ** 2).mean()).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9

    def state() -> Any:
        rate = optimizer.param_groups[0]["lr"]
        return whole([inner.state_dict(), full_state(optimizer)["state"], rate])

    if target == "module":
        return Subject(module, step, state, [optimizer], **options)
    return Subject(optimizer, step, state, [module], **options)


def ddp(target: str, *, compiled: bool = False) -> Subject:
    net = build("norm")
    module = DistributedDataParallel(net)
    return training(target, torch.compile(module, backend="eager") if compiled else module, adam(net), net)


def zero() -> Subject:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = build("norm")
    module = DistributedDataParallel(net)
    return training("optimizer", module, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01), net)


def sharded(target: str) -> Subject:
    module = shard()
    return training(target, module, adam(module), module, in_loop=True)


def in_one_process(net: nn.Module) -> Subject:
    return training("module", net, adam(net), net)


def metric(*beside: Any) -> Subject:
    """Which communicates nothing in the block; ``beside`` it is what does."""
    from torchmetrics import MeanMetric

    target: Any = MeanMetric(sync_on_compute=False)  # or torchmetrics would merge what the block has not

    def step(data: Batch, scale: Scale) -> None:
        for other in beside:
            other()
        target.update(data[0])

    return Subject(target, step, target.compute, list(beside))


def mean(*beside: Any) -> Subject:
    target = Mean()

    def step(data: Batch, scale: Scale) -> None:
        for other in beside:
            other()
        target.update(data[0].mean(), len(data[0]))

    return Subject(target, step, target.compute, list(beside))


def scaled(module: Any) -> Subject:
    """A scaler, of which each second step that is finite raises the scale."""
    optimizer: Any = adam(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def step(data: Batch, scale: Scale) -> None:
        x, y = data
        optimizer.zero_grad()
        scaler.scale(scale(((module(x) - y) ** 2).mean())).backward()
        scaler.step(optimizer)
        scaler.update()

    return Subject(scaler, step, scaler.state_dict, [module, optimizer])


def average(*beside: Any) -> Subject:
    """A module that is changed by hand, as copies are of which somebody makes averages."""
    net = build("mlp")

    @torch.no_grad()
    def step(data: Batch, scale: Scale) -> None:
        for other in beside:
            other()
        for parameter in net.parameters():
            parameter.lerp_(data[0].mean(), 0.1)

    return Subject(net, step, net.state_dict, list(beside))


def calls(target: Any, counter: Any) -> Subject:
    return Subject(target, lambda data, scale: target(), lambda: counter.total)


def counter() -> Counter:
    return Counter(collective_of(None))


def summer() -> Subject:
    target = Summer()
    return calls(target, target)


def plain() -> Subject:
    target = counter()
    return calls(target, target)


def leading() -> Subject:
    target = Leading(collective_of(None))
    return calls(target, target.inner)


def calls_alone() -> Subject:
    target = Counter(SingleCollective())
    return calls(target, target)


MAKERS: dict[str, tuple[Callable[[], Subject], Callable[[], Subject]]] = {
    "DistributedDataParallel": (lambda: ddp("module"), lambda: in_one_process(build("norm"))),
    "compiled DistributedDataParallel": (
        lambda: ddp("module", compiled=True),
        lambda: in_one_process(build("norm")),
    ),
    "ZeroRedundancyOptimizer": (zero, lambda: in_one_process(build("norm"))),
    "Optimizer": (lambda: ddp("optimizer"), lambda: in_one_process(build("norm"))),
    "fully_shard": (lambda: sharded("module"), lambda: in_one_process(build("mlp"))),
    "Optimizer of fully_shard": (lambda: sharded("optimizer"), lambda: in_one_process(build("mlp"))),
    "Metric": (lambda: metric(counter()), metric),
    "Mean": (lambda: mean(counter()), mean),
    "GradScaler": (lambda: scaled(DistributedDataParallel(build("mlp"))), lambda: scaled(build("mlp"))),
    "Module": (lambda: average(counter()), average),
    "torch Joinable": (summer, calls_alone),
    "plain Joinable": (plain, calls_alone),
    "Burst": (leading, calls_alone),
}
"""By name, the subject of a rank and that of one process."""
COSTLY = ("Metric", "compiled DistributedDataParallel")
"""Ranks import torchmetrics, or torch's compiler, for these."""
NAMES = [pytest.param(name, marks=in_test_all if name in COSTLY else ()) for name in MAKERS]


def conforms(rank: int, name: str) -> list[tuple[str, bool, bool]]:
    target = MAKERS[name][0]().target
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
        with Join([target, counter()]):
            pass
    assert len({id(joinable.join_target) for joinable in joinables}) == 1
    return described


@pytest.mark.parametrize("name", NAMES)
def test_joinable_conforms(pool: Pool, name: str) -> None:
    first, second = pool.run(conforms, name, ranks=2)
    assert first == second


def test_order_of_a_ddp_modules_bursts(pool: Pool) -> None:
    described, _ = pool.run(conforms, "DistributedDataParallel", ranks=2)
    assert [name for name, _, _ in described] == ["BucketRebuild", "BufferSync", "GradientSync", "Unlisted"]


def steps(rank: int, name: str) -> dict[str, torch.Tensor]:
    """Rank 0 makes some, and the other has no data at all."""
    subject = MAKERS[name][0]()
    data = [batch(rank, 0, step) for step in range(0 if rank else STEPS)]
    with Join([*subject.beside, subject.target], divide_by_initial_world_size=False) as join:
        for pair in join.iterate(data) if subject.in_loop else data:
            subject.step(pair, join.scale if subject.in_loop else as_it_is)
    return flat_state(subject.state())


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_one_rank_are_those_of_one_process(pool: Pool, name: str) -> None:
    alone = MAKERS[name][1]()
    for step in range(STEPS):
        alone.step(batch(0, 0, step), as_it_is)
    expected = flat_state(alone.state())
    first, second = pool.run(steps, name, ranks=2)
    assert_same(first, second)
    assert_same(first, expected, TOLERANCE)
