"""Modules with collectives of their own: over ``join.iterate`` they equal one process on the same batches."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.ending import Ending, assert_blamed
from tests.harness import Pool, all_or_each, first_and_last, in_test_all
from tests.sync_norm import sync_batch_norm_on_cpu
from tests.training import (
    DDP,
    TOLERANCE,
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
    loss_of,
    mesh_of,
    mlp_in_one_process,
    placed,
    reference,
    shard,
    shorter,
    whole,
)

LOCKSTEP = Loop(iterate="empty")
CASES = {
    "adam": Case(wrapper=Shards()),
    "sgd, initial world size": Case(wrapper=Shards(), optimizer=Optimizer("sgd"), step=Step(initial=True)),
    "the root alone": Case(wrapper=Shards(units=())),
    "adam, initial, resharded": Case(wrapper=Shards(reshard=True), step=Step(initial=True)),
    "never resharded": Case(wrapper=Shards(reshard=False), optimizer=Optimizer("sgd")),
    "adamw with clipping": Case(wrapper=Shards(), optimizer=Optimizer("adamw"), step=Step(clip=True)),
    "accumulation": Case(wrapper=Shards(), data=Data(((4, 2, 0), (3, 6, 1), (0, 5, 4))), step=Step(accumulate=2)),
    "accumulation, initial, resharded": Case(
        wrapper=Shards(reshard=True),
        data=Data(((4, 2, 0), (3, 6, 1), (0, 5, 4))),
        step=Step(accumulate=2, initial=True),
    ),
    "accumulation, each backward reduces": Case(
        wrapper=Shards(syncs="reduces each time"), data=Data(((4, 2, 0), (2, 6, 0), (0, 4, 4))), step=Step(accumulate=2)
    ),
    "zero_grad keeps tensors": Case(wrapper=Shards(), optimizer=Optimizer("sgd"), step=Step(to_none=False)),
    "weights": Case(wrapper=Shards(), data=Data(weighted=True)),
    "weights, accumulation": Case(
        wrapper=Shards(),
        data=Data(((6, 4, 0), (3, 9, 5), (1, 6, 2)), weighted=True),
        step=Step(initial=True, accumulate=3),
    ),
    "loss divided, weights, accumulation": Case(
        wrapper=Shards(),
        data=Data(((6, 4, 0), (3, 9, 5), (1, 6, 2)), weighted=True),
        step=Step(divided=True, accumulate=3),
    ),
    "weights, tuple": Case(Model("tuple"), wrapper=Shards(), data=Data(weighted=True)),
    "tuple": Case(Model("tuple"), wrapper=Shards()),
    "dict": Case(Model("dict"), wrapper=Shards()),
    "dataclass": Case(Model("dataclass"), wrapper=Shards()),
    "frozen parameters": Case(Model("frozen"), wrapper=Shards()),
    "replicas": Case(wrapper=Shards(replicas=2), data=Data(((0, 3, 1, 2), (2, 0, 4, 1), (3, 1, 0, 0)))),
    "replicas, initial, resharded": Case(
        wrapper=Shards(replicas=2, reshard=True),
        data=Data(((0, 3, 1, 2), (2, 0, 4, 1), (3, 1, 0, 0))),
        step=Step(initial=True),
    ),
    "replicas, accumulation, weights, clipping": Case(
        wrapper=Shards(replicas=2),
        data=Data(((4, 2, 0, 1), (3, 6, 1, 2), (0, 5, 4, 4)), weighted=True),
        step=Step(accumulate=2, clip=True),
    ),
    "replicas, accumulation, weights, partial reductions": Case(
        wrapper=Shards(replicas=2, syncs="all-reduces when it steps"),
        data=Data(((4, 2, 0, 1), (3, 6, 1, 2), (0, 5, 4, 4)), weighted=True),
        step=Step(accumulate=2),
    ),
    "replicas, accumulation, initial, partial reductions": Case(
        wrapper=Shards(replicas=2, syncs="all-reduces when it steps"),
        data=Data(((4, 2, 0, 1), (3, 6, 1, 2), (0, 5, 4, 4))),
        step=Step(initial=True, accumulate=2),
    ),
    "never resharded, clipping": Case(wrapper=Shards(reshard=False), step=Step(clip=True)),
    "never resharded, accumulation": Case(
        wrapper=Shards(reshard=False),
        data=Data(((4, 2, 0), (3, 6, 1), (0, 5, 4))),
        step=Step(accumulate=2, initial=True),
    ),
    "weights, clipping, initial": Case(wrapper=Shards(), data=Data(weighted=True), step=Step(clip=True, initial=True)),
    "even": Case(wrapper=Shards(), data=Data(((2, 2, 2), (3, 3, 3), (1, 1, 1)))),
    "nothing at all": Case(wrapper=Shards(), data=Data(((0, 0, 0), (0, 2, 0), (0, 0, 0)))),
}


def parts_of(case: Case) -> dict[str, Hashable]:
    assert isinstance(case.wrapper, Shards)
    step, wrapper = case.step, case.wrapper
    return {
        "model": case.model.kind,
        "optimizer": case.optimizer.kind,
        "weighted": case.data.weighted,
        "replicas": wrapper.replicas,
        "reshard": wrapper.reshard,
        "units": wrapper.units,
        "syncs": wrapper.syncs,
        "accumulate": step.accumulate,
        "initial": step.initial,
        "divided": step.divided,
        "clip": step.clip,
        "kept": step.to_none,
        "even": len(set(case.data.counts[0])) == 1,
    }


@in_test_all
@pytest.mark.parametrize("name", all_or_each(CASES, lambda name: parts_of(CASES[str(name)]), together=1))
def test_sharded_equals_one_process(pool: Pool, name: str) -> None:
    check(pool, shorter(replace(CASES[name], loop=LOCKSTEP)))


FEW = [
    CASES["adam"],
    CASES["accumulation, each backward reduces"],
    CASES["replicas, accumulation, weights, partial reductions"],
    replace(CASES["loss divided, weights, accumulation"], model=Model("dataclass")),
    Case(Model("dict"), Shards(reshard=True), Optimizer("adamw"), step=Step(clip=True, initial=True)),
    Case(Model("tuple"), Shards(units=()), Optimizer("sgd"), Data(((2, 2, 2), (3, 3, 3))), step=Step(to_none=False)),
    Case(Model("frozen"), Shards(reshard=False)),
]
"""What occurs in the cases of ``make test-all``, several in one."""


@pytest.mark.parametrize("at", range(len(FEW)))
def test_sharded_in_several_ways_equals_one_process(pool: Pool, at: int) -> None:
    check(pool, shorter(replace(FEW[at], loop=LOCKSTEP)))


def test_several_ways_are_those_of_all_cases() -> None:
    assert {part for case in FEW for part in parts_of(case).items()} >= {
        part for case in CASES.values() for part in parts_of(case).items()
    }


@pytest.mark.parametrize("name", ["adamw with clipping", pytest.param("replicas", marks=in_test_all)])
def test_sharded_equals_one_process_with_dummies_of_samples(pool: Pool, name: str) -> None:
    check(pool, replace(CASES[name], loop=Loop(iterate="last")))


IN_HALF = first_and_last(((0, 3, 1, 2), (2, 0, 4, 1), (3, 1, 0, 0)))


def in_half(rank: int, replicas: int, how: str) -> dict[str, torch.Tensor]:
    """Train with parameters in bfloat16; without Join, ranks that have no data take part with a loss of zero."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model, mesh = build("mlp"), mesh_of(replicas=replicas)
    for layer in model:  # pyright: ignore[reportGeneralTypeIssues]
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    model = fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # pyright: ignore[reportAttributeAccessIssue]
    for epoch, counts in enumerate(IN_HALF):
        mine = [batch(rank, epoch, step) for step in range(max(counts) if how == "by hand" else counts[rank])]
        with Join([model, optimizer], enable=how != "by hand") as join:
            for step, (x, y) in enumerate(join.iterate(mine)):
                optimizer.zero_grad()
                loss = ((model(x) - y) ** 2).mean()  # pyright: ignore[reportCallIssue]
                join.scale(loss if step < counts[rank] or how == "lockstep" else 0 * loss).backward()
                optimizer.step()
    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict()))  # pyright: ignore[reportAttributeAccessIssue]


@in_test_all
@pytest.mark.parametrize("replicas", [1, 2])
def test_mixed_precision(pool: Pool, replicas: int) -> None:
    by_hand = pool.run(in_half, replicas, "by hand", ranks=4)
    for state, expected in zip(pool.run(in_half, replicas, "lockstep", ranks=4), by_hand, strict=True):
        assert_same(state, expected)


LOOPS = {
    "evaluation between steps": (1, 1),
    "skipped backwards": (1, 1),
    "two forwards, one backward": (2, 1),
    "two forwards, two backwards": (2, 2),
    "gradients are kept": (1, 1),
}


def losses_of(
    model: Any, loop: str, rank: int, epoch: int, step: int, *, rows: int | None = None
) -> list[torch.Tensor]:
    """What a step runs backward, in this order, on the first rows of batches."""

    def loss(number: int) -> torch.Tensor:
        x, y = batch(rank, epoch, number)
        return loss_of(model, Case(), epoch, 0, (x[:rows], y[:rows]))

    if loop.startswith("evaluation"):
        model.eval()
        with torch.no_grad():
            loss(step + 30)
        model.train()
    if loop.startswith("skipped"):
        loss(step + 10)
    forwards, backwards = LOOPS[loop]
    losses = [loss(step + 20 * number) for number in range(forwards)]
    return losses if forwards == backwards else [sum(losses, torch.zeros(()))]


def run_loop(rank: int, loop: str) -> dict[str, torch.Tensor]:
    model = shard(shards=Shards(reshard=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch, counts in enumerate(first_and_last(Data.counts)):
        with Join([model, optimizer], divide_by_initial_world_size=False) as join:
            for step, _ in enumerate(join.iterate(range(counts[rank]))):
                if loop != "gradients are kept":
                    optimizer.zero_grad()
                for loss in losses_of(model, loop, rank, epoch, step, rows=0 if join.shadowing else None):
                    join.scale(loss).backward()
                optimizer.step()
        optimizer.zero_grad()
    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict()))


def run_loop_in_one_process(loop: str) -> dict[str, torch.Tensor]:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch, counts in enumerate(first_and_last(Data.counts)):
        for step in range(max(counts)):
            if loop != "gradients are kept":
                optimizer.zero_grad()
            ranks = [rank for rank in range(3) if step < counts[rank]]
            for rank in ranks:
                for loss in losses_of(model, loop, rank, epoch, step):
                    (loss / len(ranks)).backward()
            optimizer.step()
        optimizer.zero_grad()
    return flat_state(model.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("loop", [pytest.param(loop, marks=[in_test_all] * (LOOPS[loop] == (2, 1))) for loop in LOOPS])
def test_loops(pool: Pool, loop: str) -> None:
    states = pool.run(run_loop, loop)
    for state in states:
        assert_same(state, run_loop_in_one_process(loop), TOLERANCE)


NORM = Model("norm with a large eps", synchronised=True)
NORMED = {
    "ddp": Case(NORM),
    "ddp, initial": Case(NORM, step=Step(initial=True)),
    "ddp, zero, tiny buckets": Case(NORM, DDP({"bucket_cap_mb": 1e-5}), Optimizer(zero=True)),
    "ddp, views, accumulation": Case(
        NORM,
        DDP({"gradient_as_bucket_view": True}),
        data=Data(((4, 2, 0), (3, 6, 1), (0, 4, 3))),
        step=Step(accumulate=2),
    ),
    "ddp, initial, accumulation, unused parameters": Case(
        NORM,
        DDP({"find_unused_parameters": True}),
        data=Data(((4, 2, 0), (3, 6, 1), (0, 4, 3))),
        step=Step(accumulate=2, initial=True),
    ),
    "ddp, evaluation": Case(NORM, step=Step(evaluates=True)),
    "fully_shard": Case(NORM, Shards()),
}


@pytest.mark.parametrize("name", all_or_each(NORMED, lambda name: dict.fromkeys(str(name).split(", "))))
def test_synchronised_norm_equals_one_process(pool: Pool, name: str) -> None:
    check(pool, shorter(replace(NORMED[name], loop=LOCKSTEP)))


def accumulates(rank: int, how: str, window: int) -> str:
    """Gradients are reduced in every second step."""
    model: Any = build("mlp")
    if how == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        model = shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with Join([model, optimizer]) as join:
            for step, (x, y) in enumerate(
                join.iterate([batch(rank, 0, step) for step in range(2 * rank)], window=window)
            ):
                reduces = step % 2 == 1
                if how == "fully_shard":
                    model.set_requires_gradient_sync(reduces)
                with model.no_sync() if how == "FSDP1" and not reduces else nullcontext():
                    join.scale(((model(x) - y) ** 2).mean()).backward()
                if reduces:
                    optimizer.step()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("how", ["FSDP1", "fully_shard"])
def test_accumulation_that_the_loop_does_not_know(pool: Pool, ending: Ending, how: str) -> None:
    for text in ending.run(accumulates, how, 1):
        assert "Gradients of an earlier step are still unreduced" in text
    assert pool.run(accumulates, how, 2) == ["fine"] * 3


PAIRS = Case(data=Data(((0, 2), (3, 1), (2, 0))))
"""What one process trains; ``counts`` are those of pairs of ranks."""


def train_tensor_parallel(rank: int, how: str, iterates: bool) -> dict[str, torch.Tensor]:
    """Two ranks share a batch and a layer; two pairs of them are data parallel, by FSDP2 or DDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = build("mlp")
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if how == "fully_shard":
        fully_shard(model, mesh=mesh["data"])
        trained = model
    else:
        trained = DistributedDataParallel(model, device_mesh=mesh["data"])
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    pair = rank // 2
    for epoch, counts in enumerate(PAIRS.data.counts):
        with Join([trained, optimizer, scheduler], divide_by_initial_world_size=False) as join:
            mine = [batch(pair, epoch, step) for step in range(counts[pair])]
            for data in join.iterate(mine, dummy="last") if iterates else mine:
                optimizer.zero_grad()
                join.scale(loss_of(trained, PAIRS, epoch, 0, data)).backward()
                optimizer.step()
                scheduler.step()
    if how == "DDP":  # its first forward has made attributes of the parameters that are spread
        names = [f"{index}.{name}" for index in (0, 2, 4) for name in ("weight", "bias")]
        return flat_state({name: whole(operator.attrgetter(name)(model)) for name in names})
    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict()), scheduler.state_dict())


@in_test_all
@pytest.mark.parametrize(
    ("how", "iterates"), [("fully_shard", True), pytest.param("DDP", True, marks=in_test_all), ("DDP", False)]
)
def test_tensor_parallel(pool: Pool, how: str, iterates: bool) -> None:
    """In DDP, each rank reduces its part of the parameters with ranks that have the same part."""
    expected = reference(PAIRS)
    for state in pool.run(train_tensor_parallel, how, iterates, ranks=4):
        assert_same(state, {name: expected[name] for name in state}, TOLERANCE)


def steps_shards(rank: int) -> str:
    """Optimizer steps over shards in a plain block, of which rank 0 makes none."""
    ddp = DistributedDataParallel(build("mlp"))
    sharded = shard()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    try:
        with Join([ddp, optimizer]):
            for step in range(rank):
                ddp(batch(rank, 0, step)[0]).sum().backward()
                optimizer.step()
    except JoinError as error:
        return str(error)
    return "fine"


def test_steps_of_shards_that_ranks_made_unevenly_in_a_plain_block(pool: Pool) -> None:
    for text in pool.run(steps_shards, ranks=2):
        assert "Loop over join.iterate, which copies no state" in text


def with_statistics(rank: int, counts: tuple[int, ...]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The report of a block, and the running mean at the end of this rank's loop and after the block."""
    model = shard(Model("norm"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    statistics = model.get_submodule("1").running_mean
    with Join([model, optimizer]) as join:
        before = statistics.clone()
        for x, y in join.iterate([batch(rank, 0, step) for step in range(counts[rank])]):
            optimizer.zero_grad()
            join.scale(((model(x) - y) ** 2).mean()).backward()
            optimizer.step()
            before = statistics.clone()
    return join.report, before, statistics


@pytest.mark.parametrize("counts", [(1, 4, 2), (3, 0, 1)])
def test_report_and_statistics(pool: Pool, counts: tuple[int, ...]) -> None:
    """Statistics are those of the last rank that had data, each batch of which counts once."""
    results = pool.run(with_statistics, counts)
    last = counts.index(max(counts))
    assert results[last][1].any()
    for report, _, statistics in results:
        assert torch.equal(statistics, results[last][1])
        assert [(row.steps, row.shadowed) for row in report.ranks] == [(n, max(counts) - n) for n in counts]
        assert str(report) == str(results[0][0])


def sharded_by(how: str) -> Any:
    """A module with layers of its own; none of its batch norms are over all ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    if how == "fully_shard":
        return shard()
    inner = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu")))
    return FullyShardedDataParallel(inner, device_id=torch.device("cpu"))


PLAIN = {
    "fully_shard": "The forward of FSDPMLP, whose parameters are sharded, communicates by itself",
    "fully_shard, without grad": "The forward of FSDPMLP, whose parameters are sharded, communicates by itself",
    "fully_shard, a layer": "The forward of FSDPLinear, whose parameters are sharded, communicates by itself",
    "FSDP1": "The forward of FullyShardedDataParallel, whose parameters are sharded, communicates by itself",
    "SyncBatchNorm": "The forward of DistributedDataParallel, which contains SyncBatchNorm in training mode,",
    "after a loop": "The forward of FSDPMLP, whose parameters are sharded, communicates by itself",
}


def in_a_plain_block(rank: int, what: str) -> str:
    """The error; rank 1 has data."""
    with sync_batch_norm_on_cpu():
        how = "FSDP1" if what == "FSDP1" else "fully_shard"
        model = DistributedDataParallel(placed(NORM)) if what == "SyncBatchNorm" else sharded_by(how)
        called = (
            next(part for part in model.modules() if type(part).__name__ == "FSDPLinear") if "layer" in what else model
        )
        count: Any = int
        issued = 0
        try:
            with Join([model]) as join:
                if what == "after a loop":
                    for x in join.iterate([torch.ones(2, 4)] * rank):
                        model(x).sum().backward()
                count = join.collective.issued_counter()
                issued = count()
                if rank == 1:
                    with torch.no_grad() if "without grad" in what else nullcontext():
                        called(torch.ones(2, 4))
        except JoinError as error:
            assert rank != 1 or count() - issued <= 1  # the header by which it tells the others
            return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("what", PLAIN)
def test_a_forward_in_a_plain_block(ending: Ending, what: str) -> None:
    texts = ending.run(in_a_plain_block, what)
    assert_blamed(texts, 1, f"JoinError: {PLAIN[what]}")
    assert "for batch in join.iterate(loader)" in texts[1]


def evaluates_synchronised(rank: int) -> list[float]:
    """Backwards in evaluation mode, where SyncBatchNorm sends nothing; rank 0 has no data."""
    with sync_batch_norm_on_cpu():
        ddp = DistributedDataParallel(placed(NORM)).eval()
        with Join([ddp], divide_by_initial_world_size=False):
            for step in range(rank):
                ddp(batch(rank, 0, step)[0]).sum().backward()
    return [float(parameter.grad.sum()) for parameter in ddp.parameters() if parameter.grad is not None]


def test_a_synchronised_norm_that_evaluates_is_fine_in_a_plain_block(pool: Pool) -> None:
    model = build(str(NORM.kind)).eval()
    model(batch(1, 0, 0)[0]).sum().backward()
    expected = [float(parameter.grad.sum()) for parameter in model.parameters() if parameter.grad is not None]
    for found in pool.run(evaluates_synchronised, ranks=2):
        assert found == pytest.approx(expected, rel=1e-4)


def train_fsdp1(rank: int, counts: tuple[int, ...]) -> list[torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = sharded_by("FSDP1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Join([model], divide_by_initial_world_size=False) as join:
        for x, _ in join.iterate([batch(rank, 0, step) for step in range(counts[rank])]):
            optimizer.zero_grad()
            join.scale(model(x).square().sum()).backward()
            model.clip_grad_norm_(10.0)
            optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().flatten().clone() for parameter in model.parameters()]


def test_fsdp1_equals_one_process(pool: Pool) -> None:
    counts = 1, 3, 0
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        ranks = [rank for rank in range(3) if step < counts[rank]]
        for rank in ranks:
            (model(batch(rank, 0, step)[0]).square().sum() / len(ranks)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for found in pool.run(train_fsdp1, counts):
        torch.testing.assert_close(torch.cat(found)[: len(expected)], expected)


class Refuses(torch.nn.Sequential):
    """Does not take empty batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.size(0):
            raise ValueError("no samples")
        return super().forward(x)


def train_refusing(rank: int, counts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """One forward for training, and one without grad, which leaves the root's parameters gathered."""
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(Refuses(*build("mlp")), mesh=mesh_of())  # pyright: ignore[reportGeneralTypeIssues]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer]) as join:
        for x, y in join.iterate([batch(rank, 0, step) for step in range(counts[rank])]):
            optimizer.zero_grad()
            output = model(x)
            assert len(output) == len(x)
            join.scale(((output - y) ** 2).sum()).backward()
            optimizer.step()
            with torch.no_grad():
                model(x)
    return flat_state(whole(model.state_dict()))


def test_a_module_that_takes_no_empty_batch(pool: Pool) -> None:
    counts = 1, 3, 0
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(3):
            if step < counts[rank]:
                x, y = batch(rank, 0, step)
                (((model(x) - y) ** 2).sum() / 3).backward()
        optimizer.step()
    for state in pool.run(train_refusing, counts):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)


def outcome(rank: int, fault: str) -> str:
    """Train with a fault, and tell how it ended."""
    model = shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loader() -> Any:
        for step in range((2, 3, 0)[rank]):
            if (fault, rank, step) == ("loading", 1, 1):
                raise OSError("disk")
            yield batch(rank, 0, step)[0]

    try:
        with Join([model, optimizer]) as join:
            for step, x in enumerate(join.iterate(loader())):
                if fault == "leaves out dummies" and rank == 2:
                    continue
                optimizer.zero_grad()
                loss = model(x).sum()
                if (fault, rank, step) == ("loss", 1, 1):
                    raise OSError("disk")
                join.scale(loss).backward()
                if (fault, rank, step) == ("step", 1, 1):
                    raise OSError("disk")
                optimizer.step()
    except (JoinError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("fault", ["loading", "loss", "step"])
def test_a_rank_that_raises(ending: Ending, fault: str) -> None:
    assert_blamed(ending.run(outcome, fault), 1, "OSError: disk")


def test_a_rank_that_leaves_the_forward_of_a_dummy_out(ending: Ending) -> None:
    texts = ending.run(outcome, "leaves out dummies")
    assert_blamed(texts, 2, "ProtocolError: Rank 2 skipped the forward of FSDPMLP in step 1 of join.iterate")


class TakesSparse(torch.nn.Sequential):
    """Is called with a sparse matrix, whose rows cannot be taken away."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to_dense())


def with_sparse_calls(rank: int) -> dict[str, torch.Tensor]:
    """Rank 0 runs out first; its dummies are dense, and have no rows."""
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(TakesSparse(*build("mlp")), mesh=mesh_of())  # pyright: ignore[reportGeneralTypeIssues]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer]) as join:
        mine = [batch(rank, 0, step) for step in range(2 * rank)]
        for x, y in join.iterate(mine, dummy="empty"):
            optimizer.zero_grad()
            join.scale(((model(x.to_sparse() if len(x) else x) - y) ** 2).sum()).backward()
            optimizer.step()
    return flat_state(whole(model.state_dict()))


def test_calls_that_cannot_be_emptied(pool: Pool) -> None:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(1, 0, step)
        (((model(x) - y) ** 2).sum() / 2).backward()  # the mean over two ranks, of which one adds nothing
        optimizer.step()
    for state in pool.run(with_sparse_calls, ranks=2):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)


def train_two_loops(rank: int, in_one_block: bool) -> dict[str, torch.Tensor]:
    """A norm whose statistics are each rank's own; in the first loop rank 0 runs out first, in the second rank 1."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    model: Any = fully_shard(torch.nn.Sequential(*layers), mesh=mesh_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = (1, 3), (3, 1)
    for epochs in [(0, 1)] if in_one_block else [(0,), (1,)]:
        with Join([model, optimizer]) as join:
            for epoch in epochs:
                mine = [batch(rank, epoch, step) for step in range(counts[epoch][rank])]
                for x, y in join.iterate(mine, dummy="last"):
                    optimizer.zero_grad()
                    join.scale(((model(x) - y) ** 2).mean()).backward()
                    optimizer.step()
    return flat_state(whole(model.state_dict()))


def test_two_loops_in_lockstep_in_one_block(pool: Pool) -> None:
    in_one_block, in_two = (pool.run(train_two_loops, one, ranks=2) for one in (True, False))
    for state, expected in zip(in_one_block, in_two, strict=True):
        assert_same(state, expected)


def with_samples(rank: int) -> str:
    from torch.distributed.fsdp import fully_shard

    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SyncBatchNorm(8))
    model: Any = fully_shard(net, mesh=mesh_of())
    with (
        pytest.raises(ValueError, match="dummy='last'") as caught,
        Join([model, torch.optim.SGD(model.parameters())]) as join,
    ):
        join.iterate([], dummy="last")
    return str(caught.value)


def test_dummies_with_samples_where_ranks_compute_together(pool: Pool) -> None:
    for text in pool.run(with_samples, ranks=2):
        assert text.startswith(
            "dummy='last' is not free of samples, which would count in the forward of FSDPSequential, which contains"
            " SyncBatchNorm"
        )


def train_chain(rank: int, encoder_is: str) -> dict[str, torch.Tensor]:
    """Two modules, one after the other, in one backward."""
    from torch.distributed.fsdp import fully_shard

    layers = list(build("mlp").children())
    parts = torch.nn.ModuleList([torch.nn.Sequential(*layers[:2]), torch.nn.Sequential(*layers[2:])])
    encoder: Any = parts[0]
    mesh = mesh_of()
    encoder = fully_shard(encoder, mesh=mesh) if encoder_is == "sharded" else DistributedDataParallel(encoder)
    decoder: Any = fully_shard(parts[1], mesh=mesh)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (encoder, decoder)]
    for epoch, counts in enumerate(Data.counts):
        with Join([encoder, decoder, *optimizers], divide_by_initial_world_size=False, timeout=30) as join:
            mine = [batch(rank, epoch, step) for step in range(counts[rank])]
            for x, y in join.iterate(mine):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                join.scale(((decoder(encoder(x)) - y) ** 2).mean()).backward()
                for optimizer in optimizers:
                    optimizer.step()
    return flat_state(whole(dict(zip("012345", parts.parameters(), strict=True))))


@pytest.mark.parametrize("encoder_is", ["sharded", "ddp"])
def test_a_chain_of_modules(pool: Pool, encoder_is: str) -> None:
    model = build("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch, counts in enumerate(Data.counts):
        for step in range(max(counts)):
            optimizer.zero_grad()
            ranks = [rank for rank in range(3) if step < counts[rank]]
            for rank in ranks:
                (loss_of(model, Case(), epoch, 0, batch(rank, epoch, step)) / len(ranks)).backward()
            optimizer.step()
    expected = flat_state(dict(zip("012345", model.parameters(), strict=True)))
    for state in pool.run(train_chain, encoder_is):
        assert_same(state, expected, TOLERANCE)


def train_on_what_requires_grad(rank: int, counts: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
    model = shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer]) as join:
        for epoch, of_ranks in enumerate(counts):
            for x, y in join.iterate([batch(rank, epoch, step) for step in range(of_ranks[rank])]):
                optimizer.zero_grad()
                join.scale(((model(x.requires_grad_()) - y) ** 2).sum()).backward()
                optimizer.step()
    return flat_state(whole(model.state_dict()))


def test_calls_on_what_requires_grad(pool: Pool) -> None:
    counts = (2, 1, 1), (1, 2, 1)
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, of_ranks in enumerate(counts):
        for step in range(2):
            optimizer.zero_grad()
            for rank in range(3):
                if step < of_ranks[rank]:
                    x, y = batch(rank, epoch, step)
                    (((model(x) - y) ** 2).sum() / 3).backward()
            optimizer.step()
    for state in pool.run(train_on_what_requires_grad, counts):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)


def forgets_to_scale(rank: int) -> str:
    model = shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with Join([model, optimizer]) as join:
            for x, y in join.iterate([batch(rank, 0, step) for step in range(rank)]):
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
    except JoinError as error:
        return str(error)
    return "fine"


def test_a_loss_that_is_not_scaled(ending: Ending) -> None:
    for text in ending.run(forgets_to_scale):
        assert (
            "SGD stepped, but its loss was not scaled, although nothing else weighs the gradients of the forward"
            in text
        )


def train_replicated(rank: int) -> list[torch.Tensor]:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model: Any = build("mlp")
    replicate(model, mesh=mesh_of())
    optimizer = torch.optim.Adam(model.parameters())
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        for x, y in join.iterate([batch(rank, 0, step) for step in range((2, 4, 0)[rank])]):
            optimizer.zero_grad()
            join.scale((model(x) - y).square().mean()).backward()
            optimizer.step()
    return [parameter.to_local().detach() for parameter in model.parameters()]


def test_replicated_by_fsdp_equals_one_process(pool: Pool) -> None:
    pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    for found in pool.run(train_replicated):
        torch.testing.assert_close(found, mlp_in_one_process((2, 4, 0)))


def plain_after_a_break(rank: int) -> str:
    """Rank 1 leaves the loop alone, and calls the module after it."""
    model = shard()
    try:
        with Join([model]) as join:
            for x, _ in join.iterate([batch(rank, 0, step) for step in range(3)]):
                if rank == 1:
                    break
                join.scale(model(x).sum()).backward()
            model(torch.ones(2, 4))
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_a_plain_forward_after_a_break_of_one_rank_names_the_break(ending: Ending) -> None:
    assert_blamed(ending.run(plain_after_a_break), 1, "ProtocolError: Rank 1 left the loop over join.iterate in step 1")


def forgets_to_scale_a_norm(rank: int) -> str:
    with sync_batch_norm_on_cpu():
        ddp = DistributedDataParallel(placed(NORM))
        try:
            with Join([ddp]) as join:
                for x, y in join.iterate([batch(rank, 0, step) for step in range(rank)]):
                    ((ddp(x) - y) ** 2).mean().backward()
        except JoinError as error:
            return str(error)
    return "fine"


def test_a_loss_over_a_synchronised_norm_that_is_not_scaled(ending: Ending) -> None:
    for text in ending.run(forgets_to_scale_a_norm):
        assert "was not scaled, although nothing else weighs the gradients of the backward of DistributedData" in text
