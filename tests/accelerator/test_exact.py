"""Uneven inputs on an accelerator: all ranks end as one process does that trains on the same global batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator.target import Target
from tests.cases import DDP, Case, Data, Loop, Model, Optimizer, Shards, Step
from tests.pool import Pool
from tests.training import check, train

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


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(target: Target, accelerator_pool: Pool, name: str) -> None:
    check(accelerator_pool, target.place(CASES[name]), backend=target.backend)
