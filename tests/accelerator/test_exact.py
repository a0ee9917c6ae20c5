"""Uneven inputs on an accelerator: all ranks end as one process does that trains on the same global batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.accelerator import simulated
from tests.accelerator.target import SIMULATED, Target, device_of_rank
from tests.harness import Pool
from tests.training import (
    DDP,
    TOLERANCE_OF_GPUS,
    Case,
    Data,
    Loop,
    Model,
    Optimizer,
    Shards,
    Step,
    assert_same,
    batch,
    build,
    check,
    flat_state,
    shorter,
    train,
)

# The first two ranks alone have uneven data, too: with NCCL there may be no more.
COUNTS = Data(((0, 3, 1), (2, 0, 4), (3, 1, 0)))
WINDOWS = Data(((4, 2, 0), (3, 6, 1), (0, 5, 4)))
LOCKSTEP = Loop(iterate="empty")
NORM = Model("norm with a large eps", synchronised=True)
SGD = Optimizer("sgd")
CASES = {
    "sgd": Case(optimizer=SGD),
    "adam": Case(),
    "initial": Case(step=Step(initial=True)),
    "batch norm": Case(Model("norm"), optimizer=SGD),
    "weights": Case(data=replace(COUNTS, weighted=True)),
    "zero": Case(optimizer=Optimizer(zero=True)),
    "unused parameters": Case(Model("branches"), DDP({"find_unused_parameters": True})),
    "static graph": Case(wrapper=DDP({"static_graph": True})),
    "views": Case(wrapper=DDP({"gradient_as_bucket_view": True})),
    "zero_grad keeps tensors": Case(step=Step(to_none=False)),
    "accumulation": Case(data=WINDOWS, step=Step(accumulate=2)),
    "iterate": Case(loop=LOCKSTEP),
    "iterate, batch norm": Case(Model("norm"), optimizer=SGD, loop=LOCKSTEP),
    "iterate, weights": Case(data=replace(COUNTS, weighted=True), loop=LOCKSTEP),
    "iterate, window": Case(data=WINDOWS, step=Step(accumulate=2), loop=LOCKSTEP),
    "iterate, zero": Case(optimizer=Optimizer(zero=True), loop=LOCKSTEP),
    "iterate, last batch as a dummy": Case(loop=Loop(iterate="last")),
    "iterate, sharded": Case(wrapper=Shards(), loop=LOCKSTEP),
    "iterate, sharded, resharded, clipping": Case(wrapper=Shards(reshard=True), step=Step(clip=True), loop=LOCKSTEP),
    "iterate, sharded, weights, window": Case(
        wrapper=Shards(), data=replace(WINDOWS, weighted=True), step=Step(accumulate=2), loop=LOCKSTEP
    ),
    "iterate, synchronised norm": Case(NORM, loop=LOCKSTEP),
    "iterate, synchronised norm, sharded": Case(NORM, Shards(), loop=LOCKSTEP),
}


def skip_if_torch_dies(target: Target, name: str) -> None:
    if target == Target("cuda", "gloo") and isinstance(CASES[name].wrapper, Shards):
        pytest.skip("DTensor.full_tensor over gloo ends the process where shards are on a GPU")


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(target: Target, accelerator_pool: Pool, name: str) -> None:
    skip_if_torch_dies(target, name)
    check(accelerator_pool, target.place(shorter(CASES[name])), backend=target.backend)


needs_simulated = pytest.mark.skipif(bool(SIMULATED.why_not()), reason=SIMULATED.why_not())


def train_late(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """Results of collectives arrive some time after they were asked for: what does not wait for them reads others."""
    simulated.configure(delay=0.01)
    return train(rank, case)


LATE = [
    "adam",
    "batch norm",
    "weights",
    "zero",
    "unused parameters",
    "accumulation",
    "iterate, weights",
    "iterate, zero",
    "iterate, sharded",
]


@needs_simulated
@pytest.mark.parametrize("name", LATE)
def test_results_that_come_late(simulated_pool: Pool, name: str) -> None:
    check(simulated_pool, SIMULATED.place(shorter(CASES[name])), by=train_late, backend=SIMULATED.backend)


@pytest.mark.parametrize("name", ["adam", "batch norm", "weights", "zero", "iterate, weights", "iterate, sharded"])
def test_headers_over_the_group(target: Target, accelerator_pool: Pool, name: str) -> None:
    skip_if_torch_dies(target, name)
    check(accelerator_pool, target.place(shorter(CASES[name])), backend=target.backend, over_group=True)


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("name", ["batch norm", "weights", "iterate, weights"])
def test_a_group_with_a_backend_for_the_cpu(
    target: Target, accelerator_pool: Pool, name: str, over_group: bool
) -> None:
    if target.backend == "gloo":
        pytest.skip("a group of gloo's always has it")
    backend = f"cpu:gloo,{target.device}:{target.backend}"
    check(accelerator_pool, target.place(shorter(CASES[name])), backend=backend, over_group=over_group)


UNEVEN = 2, 5, 0


def train_mixed(rank: int, target: Target, how: str) -> dict[str, torch.Tensor]:
    """Train with what a loop on GPUs often has."""
    device = device_of_rank(target)
    model = DistributedDataParallel(build("mlp").to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=2, enabled="scaler" in how)
    listed = [model, optimizer, *([scaler] if "scaler" in how else [])]
    options: dict[str, Any] = {"timeout": 20.0} if "timeout" in how else {}
    with Join(listed, divide_by_initial_world_size=False, **options) as join:
        mine = [batch(rank, 0, step) for step in range(UNEVEN[rank])]
        for x, y in join.iterate(mine) if "iterate" in how else mine:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled="autocast" in how):
                output = model(x.to(device))
            scaler.scale((output.float() - y.to(device)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    return flat_state(model.module.state_dict(), optimizer.state_dict(), scaler.get_scale())


def train_mixed_alone(ranks: int, how: str) -> dict[str, torch.Tensor]:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = max(UNEVEN[:ranks])
    for step in range(steps):
        optimizer.zero_grad()
        active = [rank for rank in range(ranks) if step < UNEVEN[rank]]
        for rank in active:
            x, y = batch(rank, 0, step)
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
                output = model(x)
            ((output.float() - y).square().mean() / len(active)).backward()
        optimizer.step()
    scale = 1024.0 * 2 ** (steps // 2) if "scaler" in how else 1.0
    return flat_state(model.state_dict(), optimizer.state_dict(), scale)


@pytest.mark.parametrize("how", ["scaler", "scaler, iterate", "autocast", "autocast, iterate", "timeout"])
def test_mixed_precision(target: Target, accelerator_pool: Pool, how: str) -> None:
    ranks = target.ranks(len(UNEVEN))
    first, *others = accelerator_pool.run(train_mixed, target, how, ranks=ranks, backend=target.backend)
    for other in others:
        assert_same(first, other)
    coarse = "autocast" in how and not target.is_simulated  # GPUs round half precision in other places
    assert_same(first, train_mixed_alone(ranks, how), 1e-2 if coarse else TOLERANCE_OF_GPUS)
