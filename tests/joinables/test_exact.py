"""On uneven inputs, DDP, ZeRO and optimizers equal one process on the same batches, and each other bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join
from joinables import ZeroStep
from tests.models import BATCH, OPTIMIZERS, TOLERANCE, assert_same, batch, build, flat_state, value_of
from tests.pool import Pool

EPOCHS = 3
RANKS = 3


@dataclass(frozen=True)
class Case:
    """One way to train; counts[epoch][rank] is the number of batches."""

    model: str = "mlp"
    optimizer: str = "adam"
    zero: bool = False
    initial: bool = False
    clip: bool = False
    accumulate: int = 1
    compiled: bool = False
    hook: str = ""
    ddp: dict[str, Any] = field(default_factory=dict)
    counts: tuple[tuple[int, ...], ...] = ((0, 3, 1), (2, 0, 4), (3, 1, 0))
    to_none: bool = True
    rate: float | None = None
    weighted: bool = False
    declared: bool = False
    iterate: str = ""  # how, if at all: "empty" or "last" dummies, with "declared" lengths, or "ahead" by two


CASES = {
    "sgd with momentum": Case(optimizer="sgd"),
    "sgd, initial world size": Case(optimizer="sgd", initial=True),
    "adam": Case(),
    "adam, initial world size": Case(initial=True),
    "adamw with clipping": Case(optimizer="adamw", clip=True),
    "zero over sgd": Case(optimizer="sgd", zero=True),
    "zero over adam": Case(zero=True),
    "zero over adam, initial world size": Case(zero=True, initial=True),
    "zero with clipping": Case(optimizer="adamw", zero=True, clip=True),
    "gradient_as_bucket_view": Case(ddp={"gradient_as_bucket_view": True}),
    "gradient_as_bucket_view, zero": Case(zero=True, ddp={"gradient_as_bucket_view": True}),
    "tiny buckets": Case(ddp={"bucket_cap_mb": 1e-5}),
    "tiny buckets, zero": Case(zero=True, ddp={"bucket_cap_mb": 1e-5}),
    "static_graph": Case(ddp={"static_graph": True}),
    "static_graph, zero, tiny buckets": Case(zero=True, ddp={"static_graph": True, "bucket_cap_mb": 1e-5}),
    "find_unused_parameters": Case(model="branches", ddp={"find_unused_parameters": True}),
    "find_unused_parameters, zero": Case(model="branches", zero=True, ddp={"find_unused_parameters": True}),
    "find_unused_parameters, views": Case(
        model="branches", ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True}
    ),
    "find_unused_parameters, accumulation": Case(
        model="branches",
        accumulate=3,
        initial=True,
        optimizer="sgd",
        ddp={"find_unused_parameters": True, "bucket_cap_mb": 1e-5},
        counts=((1, 5, 0), (2, 0, 1), (5, 0, 3)),
    ),
    "find_unused_parameters, accumulation, mean over contributors": Case(
        model="branches",
        accumulate=2,
        ddp={"find_unused_parameters": True},
        counts=((2, 4, 5), (0, 5, 2), (3, 0, 5)),
    ),
    "allreduce hook": Case(hook="allreduce"),
    "compiled": Case(compiled=True),
    "tuple": Case(model="tuple"),
    "dict": Case(model="dict"),
    "dataclass": Case(model="dataclass"),
    "an object of one's own": Case(model="opaque"),
    "an object of one's own, initial": Case(model="opaque", initial=True),
    "frozen parameters": Case(model="frozen"),
    "frozen parameters, zero, views": Case(model="frozen", zero=True, ddp={"gradient_as_bucket_view": True}),
    "frozen parameters, static_graph, initial": Case(model="frozen", initial=True, ddp={"static_graph": True}),
    "integer learning rate, zero": Case(optimizer="sgd", zero=True, rate=1, counts=((0, 2, 1), (1, 0, 1), (0, 1, 0))),
    "batch norm": Case(model="norm"),
    "batch norm, zero, initial": Case(model="norm", zero=True, initial=True),
    "batch norm, leaders leave in turn": Case(model="norm", counts=((1, 2, 4), (0, 3, 5), (2, 4, 3))),
    "accumulation": Case(accumulate=2, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4))),
    "accumulation, initial": Case(accumulate=2, initial=True, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4))),
    "accumulation, zero": Case(accumulate=3, zero=True, counts=((6, 4, 0), (3, 9, 5), (1, 6, 2))),
    "accumulation, views": Case(
        accumulate=2, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4)), ddp={"gradient_as_bucket_view": True}
    ),
    "batch norm, accumulation": Case(
        model="norm", accumulate=2, initial=True, counts=((4, 2, 0), (6, 3, 1), (4, 0, 3))
    ),
    "zero_grad keeps tensors": Case(to_none=False),
    "zero_grad keeps tensors, zero": Case(to_none=False, zero=True),
    "zero_grad keeps tensors, initial": Case(to_none=False, initial=True, optimizer="sgd"),
    "zero_grad keeps tensors, accumulation": Case(
        accumulate=2, to_none=False, initial=True, optimizer="sgd", counts=((2, 4, 4), (2, 2, 4), (0, 2, 4))
    ),
    "zero_grad keeps tensors, accumulation, batch norm": Case(
        model="norm", accumulate=3, to_none=False, optimizer="sgd", counts=((3, 2, 5), (6, 0, 0), (6, 0, 3))
    ),
    "zero_grad keeps tensors, batch norm, initial": Case(model="norm", to_none=False, initial=True),
    "weights": Case(weighted=True),
    "weights, zero, initial": Case(weighted=True, zero=True, initial=True),
    "weights, batch norm": Case(weighted=True, model="norm", counts=((1, 2, 4), (0, 3, 5), (2, 4, 3))),
    "weights, batch norm, initial": Case(weighted=True, model="norm", initial=True),
    "weights, accumulation, zero": Case(
        weighted=True, accumulate=3, zero=True, counts=((6, 4, 0), (3, 9, 5), (1, 6, 2))
    ),
    "weights, accumulation, initial": Case(
        weighted=True, accumulate=2, initial=True, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4))
    ),
    "weights, find_unused_parameters": Case(
        weighted=True, model="branches", ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True}
    ),
    "weights, static_graph, tiny buckets": Case(weighted=True, ddp={"static_graph": True, "bucket_cap_mb": 1e-5}),
    "weights, an object of one's own": Case(weighted=True, model="opaque"),
    "weights, tuple, compiled": Case(weighted=True, model="tuple", compiled=True),
    "weights, frozen parameters, clipping": Case(weighted=True, model="frozen", clip=True),
    "weights, allreduce hook": Case(weighted=True, hook="allreduce"),
    "even": Case(counts=((2, 2, 2), (3, 3, 3), (1, 1, 1))),
    "nothing at all": Case(counts=((0, 0, 0), (0, 2, 0), (0, 0, 0))),
}


def weight_of(case: Case, rank: int, epoch: int, step: int) -> int:
    """The number of samples in a batch; all the same, and no reason to weigh, unless the case has weights."""
    return 2 + (rank + epoch + 2 * step) % 4 if case.weighted else BATCH


def data_of(case: Case, rank: int, epoch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(rank, epoch, step)
    return x[: weight_of(case, rank, epoch, step)], y[: weight_of(case, rank, epoch, step)]


def batches(join: Join, case: Case, rank: int, epoch: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches of an epoch; in lockstep, if the case has it so, and then with dummies."""
    mine = [data_of(case, rank, epoch, step) for step in range(case.counts[epoch][rank])]
    if not case.iterate:
        return mine
    dummy = "last" if case.iterate == "last" else "empty"
    loader = mine if case.iterate == "declared" else iter(mine)
    return join.iterate(loader, dummy=dummy, lookahead=2 if case.iterate == "ahead" else 1)


def loss_of(model: Any, case: Case, branch: int, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = data
    output = model(x, branch) if case.model == "branches" else model(x)
    loss = ((value_of(output) - y) ** 2).mean()
    return loss if case.weighted else loss / case.accumulate  # weights make a mean of the micro-batches too


def full_state(optimizer: Any) -> Any:
    """The state dict; of a sharded optimizer, with all shards."""
    state = None
    for to in range(RANKS if hasattr(optimizer, "consolidate_state_dict") else 0):
        optimizer.consolidate_state_dict(to=to)  # drops what another rank holds, so each reads in its turn
        if dist.get_rank() == to:
            state = optimizer.state_dict()
    return state or optimizer.state_dict()


def train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(build(case.model), **case.ddp)
    if case.hook == "allreduce":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    model = torch.compile(ddp, backend="eager") if case.compiled else ddp
    cls, options = OPTIMIZERS[case.optimizer]
    options = options if case.rate is None else {**options, "lr": case.rate}
    if case.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(ddp.parameters(), cls, **options)
    else:
        optimizer = cls(ddp.parameters(), **options)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)

    stepper = ZeroStep(optimizer, transform_gradients=clip) if case.zero and case.clip else optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for epoch in range(EPOCHS):
        count = case.counts[epoch][rank]
        steps: Any = count // case.accumulate if case.declared else "loader" if case.iterate == "declared" else None
        join = Join([model, stepper, scheduler], divide_by_initial_world_size=case.initial, steps=steps)
        join.weight = 1 if case.weighted else None
        with join:
            for step, data in enumerate(batches(join, case, rank, epoch)):
                sync = (step + 1) % case.accumulate == 0
                join.weight = len(data[0]) if case.weighted else None
                if step % case.accumulate == 0:
                    optimizer.zero_grad(set_to_none=case.to_none)
                if sync:
                    loss_of(model, case, (rank + step) % 2, data).backward()
                    if case.clip:
                        clip()
                    optimizer.step()
                    scheduler.step()
                else:
                    with ddp.no_sync():
                        loss_of(model, case, (rank + step) % 2, data).backward()
    return flat_state(ddp.module.state_dict(), full_state(optimizer), scheduler.state_dict())


def reference(case: Case) -> dict[str, torch.Tensor]:
    """One process: the gradients of all ranks that have data, averaged; buffers of the lowest of them."""
    model = build(case.model)
    cls, options = OPTIMIZERS[case.optimizer]
    options = options if case.rate is None else {**options, "lr": case.rate}
    optimizer = cls(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    k = case.accumulate
    for epoch in range(EPOCHS):
        counts = case.counts[epoch]
        for window in range(max(counts) // k):
            optimizer.zero_grad(set_to_none=case.to_none)
            ranks = [rank for rank, count in enumerate(counts) if count > window * k]
            windows = {rank: range(window * k, min((window + 1) * k, counts[rank])) for rank in ranks}
            total = sum(weight_of(case, rank, epoch, step) for rank, steps in windows.items() for step in steps)
            divisor = len(counts) if case.initial else len(ranks)
            shared = [b.clone() for b in model.buffers()]
            kept = None
            for rank in ranks:
                for buffer, value in zip(model.buffers(), shared, strict=True):
                    buffer.copy_(value)
                for step in windows[rank]:
                    loss = loss_of(model, case, (rank + step) % 2, data_of(case, rank, epoch, step))
                    share = weight_of(case, rank, epoch, step) / total if case.weighted else 1 / divisor
                    (loss * share).backward()
                # The leader is the lowest rank that takes part in the synchronised step.
                if kept is None and counts[rank] >= (window + 1) * k:
                    kept = [b.clone() for b in model.buffers()]
            for buffer, value in zip(model.buffers(), kept or [], strict=True):
                buffer.copy_(value)
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
    return flat_state(model.state_dict(), optimizer.state_dict(), scheduler.state_dict())


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(pool: Pool, name: str) -> None:
    case = CASES[name]
    states = pool.run(train, case, ranks=RANKS)
    for other in states[1:]:
        assert_same(states[0], other)
    assert_same(states[0], reference(case), TOLERANCE)


# Not those where gradients are kept, whose steps cannot be declared.
DECLARED = [name for name, case in CASES.items() if case.to_none or not case.initial]


@pytest.mark.parametrize("name", DECLARED)
def test_equals_one_process_with_declared_steps(pool: Pool, name: str) -> None:
    case = replace(CASES[name], declared=True)
    states = pool.run(train, case, ranks=RANKS)
    for other in states[1:]:
        assert_same(states[0], other)
    assert_same(states[0], reference(case), TOLERANCE)


# Where dummies have samples of their own, or windows end between them.
OTHERWISE = [
    "adamw with clipping",
    "zero over adam, initial world size",
    "find_unused_parameters, accumulation",
    "batch norm, accumulation",
    "zero_grad keeps tensors, initial",
    "weights, accumulation, zero",
    "weights, find_unused_parameters",
    "nothing at all",
]


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "empty") for name in CASES] + [(name, how) for how in ("last", "declared", "ahead") for name in OTHERWISE],
)
def test_equals_one_process_in_lockstep(pool: Pool, name: str, how: str) -> None:
    case = replace(CASES[name], iterate=how)
    states = pool.run(train, case, ranks=RANKS)
    for other in states[1:]:
        assert_same(states[0], other)
    assert_same(states[0], reference(case), TOLERANCE)
