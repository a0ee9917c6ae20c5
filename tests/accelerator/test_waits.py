"""A step makes the host wait for the device nowhere in the library, once the first step is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from joinables import Mean
from tests.accelerator.target import Target, Wait, device_of_rank, waits
from tests.harness import Pool
from tests.training import Model, Optimizer, batch, build, learn_graph, optimizer_of, shard

# The functions that wait at each step, by the way of training in which they do. It is exact: what is mended must leave.
EXCEPTIONS: dict[str, set[str]] = {}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "initial": {"initial": True},
    "batch norm": {"model": "norm"},
    "weights": {"weights": True},
    "weights, batch norm": {"weights": True, "model": "norm"},
    "zero": {"zero": True},
    "unused parameters": {"model": "branches", "ddp": {"find_unused_parameters": True}},
    "static graph": {"ddp": {"static_graph": True}},
    "zero_grad keeps tensors": {"to_none": False},
    "zero_grad keeps tensors, initial": {"to_none": False, "initial": True},
    "accumulation": {"accumulate": 2},
    "scaler": {"scaler": True},
    "timeout": {"timeout": 30.0},
    "iterate": {"iterate": True},
    "iterate, batch norm": {"iterate": True, "model": "norm"},
    "iterate, weights": {"iterate": True, "weights": True},
    "iterate, zero": {"iterate": True, "zero": True},
    "iterate, unused parameters": {
        "iterate": True,
        "model": "branches",
        "ddp": {"find_unused_parameters": True},
    },
    "iterate, zero_grad keeps tensors": {"iterate": True, "to_none": False},
    "iterate, window": {"iterate": True, "accumulate": 2},
    "iterate, sharded": {"iterate": True, "sharded": True},
    "iterate, mean": {"iterate": True, "mean": True},
    "listed mean": {"mean": True},
}
OVER_GROUP = ["plain", "batch norm", "weights", "zero", "timeout", "iterate", "iterate, weights"]
COUNTS = 4, 6, 0


def loop(join: Join, mine: list[Any], options: dict[str, Any]) -> Iterable[Any]:
    if not options.get("iterate"):
        return mine
    weigh = (lambda data: len(data[0])) if options.get("weights") else None
    return join.iterate(mine, weigh=weigh, window=options.get("accumulate", 1))


def train(rank: int, target: Target, options: dict[str, Any]) -> list[Wait]:
    """How the host waits in the loop, but for its first step; in that of the first window, if there are windows."""
    device, kind = device_of_rank(target), options.get("model", "mlp")
    if options.get("sharded"):
        model: Any = shard(Model(kind, device=target.device))
    else:
        model = DistributedDataParallel(build(kind).to(device), **options.get("ddp", {}))
    learn_graph(model, lambda: model(batch(rank, 0, 0)[0].to(device)).sum())
    optimizer = optimizer_of(Optimizer(zero=options.get("zero", False)), model)
    scaler = torch.amp.GradScaler(device.type, enabled=options.get("scaler", False))
    mine = [tuple(part.to(device) for part in batch(rank, 0, step)) for step in range(COUNTS[rank])]
    mean = Mean() if options.get("mean") else None
    listed = [model, optimizer, *([scaler] if scaler.is_enabled() else []), mean]
    accumulate = options.get("accumulate", 1)
    more = {"timeout": options["timeout"]} if "timeout" in options else {}
    initial = options.get("initial", False)
    with Join(listed, divide_by_initial_world_size=initial, **more) as join, waits(target) as found:
        first_steps = last_step = 0
        for step, (x, y) in enumerate(loop(join, mine, options)):
            if step == accumulate:
                first_steps = len(found)
            if options.get("weights") and not options.get("iterate"):
                join.weight = float(len(x))
            if step % accumulate == 0:
                optimizer.zero_grad(set_to_none=options.get("to_none", True))
            branch = [(rank + step) % 2] if kind == "branches" else []
            ends_window = (step + 1) % accumulate == 0
            with nullcontext() if ends_window or options.get("sharded") else model.no_sync():
                loss = (model(x, *branch) - y).square().mean()
                scaled = join.scale(loss) if options.get("weights") or options.get("iterate") else loss
                scaler.scale(scaled).backward()
            if ends_window:
                scaler.step(optimizer)
                scaler.update()
            if mean is not None and options.get("iterate"):
                join.mean({"loss": loss, "samples": len(x)}, weight=torch.full((), len(x), device=device))
            if mean is not None:
                mean.update(loss, len(x))
            last_step = len(found)
    return found[first_steps:last_step]


@pytest.mark.parametrize(("way", "over_group"), [*((way, False) for way in WAYS), *((way, True) for way in OVER_GROUP)])
def test_a_step_does_not_wait(target: Target, accelerator_pool: Pool, way: str, over_group: bool) -> None:
    options: Any = {"ranks": target.ranks(len(COUNTS)), "backend": target.backend, "over_group": over_group}
    found = accelerator_pool.run(train, target, WAYS[way], **options)
    ours = {wait.function for each in found for wait in each if wait.is_ours}
    # That of a static graph is in C++ without the GIL; CUDA writes it to stderr instead of warning of it.
    expected = EXCEPTIONS.get(way, set()) if target.is_simulated else set()
    assert ours == expected, [wait for each in found for wait in each if wait.is_ours]


def test_exceptions_are_of_ways_that_are_tried() -> None:
    assert EXCEPTIONS.keys() <= WAYS.keys()
    assert set(OVER_GROUP) <= WAYS.keys()


def make_host_wait(rank: int, target: Target) -> None:
    """Do what makes the host wait, and what does not."""
    device = device_of_rank(target)
    numbers, pinned = torch.arange(4.0, device=device), torch.zeros(2).pin_memory()
    waiting: list[Callable[[], Any]] = [
        lambda: numbers[1].item(),
        lambda: numbers.tolist(),
        lambda: torch.equal(numbers, numbers + 1),
        lambda: torch.tensor([1.0, 2.0], device=device),
        lambda: numbers[numbers > 1],
    ]
    going_on: list[Callable[[], Any]] = [
        lambda: (numbers * 2).sum().clamp(max=1.0).fill_(3.0),
        lambda: pinned.to(device, non_blocking=True),
        lambda: pinned.copy_(numbers[:2], non_blocking=True),
    ]
    for action in [*waiting, *going_on]:
        with waits(target) as found:
            action()
        assert bool(found) == (action in waiting)
        assert all(wait.who[0].startswith("tests/accelerator/test_waits.py:") for wait in found)


def test_waits_are_found(target: Target, accelerator_pool: Pool) -> None:
    accelerator_pool.run(make_host_wait, target, ranks=1, backend=target.backend)
