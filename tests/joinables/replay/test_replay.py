"""Modules with collectives of their own: on uneven inputs they equal one process on the same batches."""

from __future__ import annotations

import operator
import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import EarlyTerminationError, Join, JoinError
from join.collectives import ThreadCollective, run_threads
from joinables import Replay, SharedCall
from tests.cases import DDP, Case, Data, Loop, Model, Optimizer, Shards, Step
from tests.ending import Ending, assert_blamed
from tests.join.counter import Counter
from tests.joinables.test_failures import group_works
from tests.models import TOLERANCE, Opaque, assert_same, batch, build, flat_state, value_of
from tests.pool import Pool
from tests.selection import all_or_some
from tests.sync_norm import sync_batch_norm_on_cpu
from tests.training import (
    batch_of,
    batches,
    check,
    loss_of,
    mesh_of,
    optimizer_of,
    placed,
    reference,
    shard,
    tolerance_of,
    weight_of,
    whole,
)

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


@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_one_process(pool: Pool, name: str) -> None:
    check(pool, CASES[name])


WAYS: dict[str, tuple[Loop, list[str]]] = {
    "declared": (
        Loop(declared=True),
        [name for name, case in CASES.items() if case.step.accumulate == 1 and case.step.to_none],
    ),
    "empty": (Loop(iterate="empty"), list(CASES)),
    "last": (Loop(iterate="last"), ["adamw with clipping", "replicas"]),
}
"""Other ways to train, and the cases that can be trained so."""


def parts_of(row: tuple[str, str]) -> dict[str, Any]:
    """How it is trained, and what of the case matters there."""
    name, way = row
    case = CASES[name]
    assert isinstance(case.wrapper, Shards)
    return {
        "model": case.model.kind,
        "initial": case.step.initial,
        "weighted": case.data.weighted,
        "accumulate": case.step.accumulate,
        "replicas": case.wrapper.replicas,
        "way": way,
    }


@pytest.mark.parametrize(
    ("name", "way"), all_or_some([(name, way) for way, (_, names) in WAYS.items() for name in names], parts_of)
)
def test_sharded_equals_one_process_in_another_way(pool: Pool, name: str, way: str) -> None:
    check(pool, replace(CASES[name], loop=WAYS[way][0]))


def forward(model: Any, case: Case, rank: int, epoch: int, step: int) -> torch.Tensor:
    return loss_of(model, case, 0, batch_of(case.data, rank, epoch, step))


IN_HALF = ((0, 3, 1, 2), (2, 0, 4, 1), (3, 1, 0, 0))


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
        steps = counts[rank] if how == "declared" else None
        with Join([model, optimizer], enable=how != "by hand", steps=steps) as join:
            for step, (x, y) in enumerate(join.iterate(mine) if how == "lockstep" else mine):
                optimizer.zero_grad()
                loss = ((model(x) - y) ** 2).mean()  # pyright: ignore[reportCallIssue]
                (loss if step < counts[rank] or how == "lockstep" else 0 * loss).backward()
                optimizer.step()
    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict()))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("replicas", [1, 2])
def test_mixed_precision(pool: Pool, replicas: int) -> None:
    by_hand = pool.run(in_half, replicas, "by hand", ranks=4)
    for how in ("block", "declared", "lockstep"):
        for state, expected in zip(pool.run(in_half, replicas, how, ranks=4), by_hand, strict=True):
            assert_same(state, expected)


def without_optimizer(rank: int, listed: bool) -> str:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(build("mlp"), mesh=mesh_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, Join([model, *([optimizer] if listed else [])]):
        warnings.simplefilter("always")
        for step in range(2 * (1 - rank)):
            forward(model, Case(), rank, 0, step).backward()
            optimizer.step()
    return " ".join(str(each.message) for each in caught)


def test_shards_that_nobody_steps_are_told(pool: Pool) -> None:
    active, joined = pool.run(without_optimizer, False, ranks=2)
    assert not active
    assert joined.count("rank 1 is out of data") == 1 and "List the optimizer" in joined
    assert pool.run(without_optimizer, True, ranks=2) == ["", ""]


LOOPS = {
    "evaluation between steps": (1, 1),
    "skipped backwards": (1, 1),
    "two forwards, one backward": (2, 1),
    "two forwards, two backwards": (2, 2),
    "gradients are kept": (1, 1),
}


def losses_of(model: Any, loop: str, rank: int, epoch: int, step: int) -> list[torch.Tensor]:
    """What a step runs backward, in this order."""
    if loop.startswith("evaluation"):
        model.eval()
        with torch.no_grad():
            model(batch(rank, epoch, step, stream=1)[0])
        model.train()
    if loop.startswith("skipped"):
        forward(model, Case(), rank, epoch, step + 10)
    forwards, backwards = LOOPS[loop]
    losses = [forward(model, Case(), rank, epoch, step + 20 * number) for number in range(forwards)]
    return losses if forwards == backwards else [sum(losses, torch.zeros(()))]


def run_loop(rank: int, loop: str) -> dict[str, torch.Tensor]:
    model = shard(shards=Shards(reshard=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch, counts in enumerate(Data.counts):
        with Join([model, optimizer], divide_by_initial_world_size=False):
            for step in range(counts[rank]):
                if loop != "gradients are kept":
                    optimizer.zero_grad()
                for loss in losses_of(model, loop, rank, epoch, step):
                    loss.backward()
                optimizer.step()
        optimizer.zero_grad()
    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict()))


def run_loop_in_one_process(loop: str) -> dict[str, torch.Tensor]:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch, counts in enumerate(Data.counts):
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


@pytest.mark.parametrize("loop", LOOPS)
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
    "ddp, evaluation and a skipped backward": Case(NORM, step=Step(evaluates=True)),
    "a plain module": Case(NORM),
    "a plain module, example": Case(NORM),
    "fully_shard": Case(NORM, Shards()),
}


def train_plain(rank: int, case: Case, has_example: bool) -> dict[str, torch.Tensor]:
    """Train a module that nothing wraps; the loop itself reduces gradients."""
    with sync_batch_norm_on_cpu():
        model = placed(case.model)
        listed = Replay(model, example=(torch.zeros(0, 4),) if has_example else None)
        optimizer = optimizer_of(case.optimizer, model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.optimizer.decay)

        def reduce() -> None:
            count = torch.tensor(float(any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())))
            dist.all_reduce(count)
            for parameter in model.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient)
                parameter.grad = gradient / count

        reduction = SharedCall(reduce)
        for epoch, counts in enumerate(case.data.counts):
            steps = counts[rank] if case.loop.declared else None
            joinables = [listed, reduction, optimizer, scheduler]
            with Join(joinables, divide_by_initial_world_size=False, steps=steps) as join:
                for x, y in batches(join, case, rank, epoch):
                    optimizer.zero_grad()
                    ((model(x) - y) ** 2).mean().backward()
                    reduction()
                    optimizer.step()
                    scheduler.step()
    return flat_state(model.state_dict(), optimizer.state_dict(), scheduler.state_dict())


def check_normed(pool: Pool, name: str, loop: Loop) -> None:
    case = replace(NORMED[name], loop=loop)
    if not name.startswith("a plain module"):
        check(pool, case)
        return
    expected = reference(case)
    for state in pool.run(train_plain, case, "example" in name):
        assert_same(state, expected, tolerance_of(case))


@pytest.mark.parametrize("name", NORMED)
def test_synchronised_norm_equals_one_process(pool: Pool, name: str) -> None:
    check_normed(pool, name, Loop())


@pytest.mark.parametrize(
    "name", [name for name, case in NORMED.items() if case.step.accumulate == 1 and not case.step.evaluates]
)
def test_synchronised_norm_equals_one_process_with_declared_steps(pool: Pool, name: str) -> None:
    check_normed(pool, name, Loop(declared=True))


@pytest.mark.parametrize("name", NORMED)
def test_synchronised_norm_equals_one_process_in_lockstep(pool: Pool, name: str) -> None:
    check_normed(pool, name, Loop(iterate="empty"))


def on_gpus(test: Any) -> Any:
    """Marks a test that has two ranks on one GPU, over gloo, or each on its own, over NCCL."""
    needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
    test = pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=needs_two)])(test)
    return pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test)


def on_gpu(case: Case) -> Case:
    return replace(case, model=replace(case.model, device="cuda"))


TWO = ((0, 3), (2, 1), (2, 4))
CASES_ON_GPUS = {
    "clipping, resharded": Case(wrapper=Shards(reshard=True), data=Data(TWO), step=Step(clip=True)),
    "weights, accumulation": Case(wrapper=Shards(), data=Data(TWO[-1:], weighted=True), step=Step(accumulate=2)),
    "lockstep": Case(wrapper=Shards(), data=Data(TWO), loop=Loop(iterate="empty")),
}
NORMED_ON_GPUS = {
    "ddp": Case(NORM, data=Data(TWO)),
    "ddp, lockstep": Case(NORM, data=Data(TWO), loop=Loop(iterate="empty")),
    "fully_shard": Case(NORM, Shards(), data=Data(TWO)),
}


@on_gpus
@pytest.mark.parametrize("name", CASES_ON_GPUS)
def test_sharded_equals_one_process_on_gpus(pool: Pool, name: str, backend: str) -> None:
    check(pool, on_gpu(CASES_ON_GPUS[name]), backend=backend)


@on_gpus
@pytest.mark.parametrize("name", NORMED_ON_GPUS)
def test_synchronised_norm_equals_one_process_on_gpus(pool: Pool, name: str, backend: str) -> None:
    check(pool, on_gpu(NORMED_ON_GPUS[name]), backend=backend)


def train_tensor_parallel(rank: int, how: str, way: str) -> dict[str, torch.Tensor]:
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
    case = tensor_parallel(way)
    for epoch, counts in enumerate(case.data.counts):
        steps = counts[pair] if way == "declared" else None
        join = Join([trained, optimizer, scheduler], divide_by_initial_world_size=False, steps=steps)
        with join:
            mine = range(counts[pair])
            for step in join.iterate(mine, dummy="last") if way == "lockstep" else mine:
                join.weight = weight_of(case.data, pair, epoch, step) if case.data.weighted else None
                optimizer.zero_grad()
                forward(trained, case, pair, epoch, step).backward()
                optimizer.step()
                scheduler.step()
    if how == "DDP":  # its first forward has made attributes of the parameters that are spread
        names = [f"{index}.{name}" for index in (0, 2, 4) for name in ("weight", "bias")]
        return flat_state({name: whole(operator.attrgetter(name)(model)) for name in names})
    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict()), scheduler.state_dict())


def tensor_parallel(way: str) -> Case:
    """What one process trains; ``counts`` are those of pairs of ranks."""
    return Case(data=Data(((0, 2), (3, 1), (2, 0)), weighted=way == "weights"))


@pytest.mark.parametrize("way", ["block", "declared", "lockstep", "weights"])
@pytest.mark.parametrize("how", ["fully_shard", "DDP"])
def test_tensor_parallel(pool: Pool, how: str, way: str) -> None:
    expected = reference(tensor_parallel(way))
    for state in pool.run(train_tensor_parallel, how, way, ranks=4):
        assert_same(state, {name: expected[name] for name in state}, TOLERANCE)


def with_statistics(rank: int, way: str, counts: tuple[int, ...]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The report of a block, and the running mean at the end of this rank's loop and after the block."""
    model = shard(Model("norm"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    statistics = model.get_submodule("1").running_mean
    with Join([model, optimizer], steps=counts[rank] if way == "declared" else None) as join:
        mine = [batch(rank, 0, step) for step in range(counts[rank])]
        for x, y in join.iterate(mine) if way == "lockstep" else mine:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        before = statistics.clone()
    return join.report, before, statistics


@pytest.mark.parametrize("counts", [(1, 4, 2), (3, 0, 1)])
@pytest.mark.parametrize("way", ["block", "declared", "lockstep"])
def test_report_and_statistics(pool: Pool, way: str, counts: tuple[int, ...]) -> None:
    """Statistics are those of the last rank that had data, each batch of which counts once."""
    results = pool.run(with_statistics, way, counts)
    last = counts.index(max(counts))
    assert results[last][1].any()
    for report, _, statistics in results:
        assert torch.equal(statistics, results[last][1])
        assert not report.even
        assert [(row.steps, row.shadowed) for row in report.ranks] == [(n, max(counts) - n) for n in counts]
        assert str(report) == str(results[0][0])


def weighs_synchronised(rank: int, way: str) -> str:
    with sync_batch_norm_on_cpu(), pytest.raises((ValueError, JoinError)) as caught:
        ddp = DistributedDataParallel(placed(NORM))
        join = Join([ddp], steps=2 if way == "declared" else None)
        join.weight = 3
        with join:
            mine = [batch(rank, 0, step)[0] for step in range(2)]
            for x in join.iterate(mine) if way == "lockstep" else mine:
                ddp.zero_grad()
                ddp(x).sum().backward()
    group_works()
    return str(caught.value)


@pytest.mark.parametrize("way", ["block", "declared", "lockstep"])
def test_weights_where_ranks_compute_together(pool: Pool, way: str) -> None:
    for text in pool.run(weighs_synchronised, way, ranks=2):
        assert "join.weight cannot weigh the gradients of DistributedDataParallel, in whose forward and" in text
        assert "leave it None and multiply the loss by what it should weigh" in text


class Refuses(torch.nn.Sequential):
    """Does not take empty batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.size(0):
            raise ValueError("no samples")
        return super().forward(x)


class Hides(torch.nn.Sequential):
    """Returns an object that nobody can look into."""

    def forward(self, x: torch.Tensor) -> Any:
        return Opaque(super().forward(x))


MADE_MORE = {"declared, one more": (1, 0, 0), "declared, one fewer": (0, -1, 0), "declared, some": (0, 0, 2)}


def outcome(rank: int, fault: str) -> str:
    """Train with a fault, and tell how it ended; the group works afterwards, if no steps are declared."""
    from torch.distributed.fsdp import fully_shard

    kind = {"refuses": Refuses, "example": Refuses, "hides": Hides}.get(fault, torch.nn.Sequential)
    model: Any = kind(*build("mlp"))  # pyright: ignore[reportGeneralTypeIssues]
    mesh = mesh_of()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[4], mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listed = Replay(model, example=(torch.ones(1, 4),)) if fault == "example" else model
    text = "fine"
    try:
        with Join([listed, optimizer], steps=(2, 3, 0)[rank] if "declared" in fault else None) as join:
            for step in range((2, 3, 0)[rank] + MADE_MORE.get(fault, (0, 0, 0))[rank]):
                if "accumulates" in fault:
                    model.set_requires_gradient_sync(step == 0 if "declared" in fault else rank == 0)
                if fault == "declared, evaluates" and step == 1:
                    with torch.no_grad():
                        model(batch(rank, 0, step)[0])
                if fault.startswith("weight") and (rank == 1 or "all" in fault):
                    join.weight = 0
                if fault == "declared, weighs late":
                    join.weight = 1
                if fault == "declared, stops" and rank == 0:
                    break
                if (fault, rank, step) in (("loading", 1, 1), ("declared, loading", 0, 0)):
                    raise OSError("disk")
                optimizer.zero_grad()
                output = model(batch(rank, 0, step)[0])
                if fault == "loss" and (rank, step) == (1, 1):
                    raise OSError("disk")
                if fault == "leaves" and (rank, step) == (1, 1):
                    break
                if fault == "diverges" and (rank, step) == (1, 1):
                    optimizer.step()
                output.sum().backward()
                if fault == "step" and (rank, step) == (1, 1):
                    raise OSError("disk")
                optimizer.step()
    except (JoinError, OSError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    if "declared" in fault:
        return text
    model.set_requires_gradient_sync(True)
    group_works()
    value_of(model(batch(rank, 1, 1)[0])).sum().backward()  # the module is at rest
    return text


@pytest.mark.parametrize("fault", ["loading", "loss", "step"])
def test_a_rank_that_raises(pool: Pool, fault: str) -> None:
    first, second, third = pool.run(outcome, fault)
    assert second == "OSError: disk"
    assert first == third == "PeerError: rank 1 failed: OSError: disk"


def test_a_rank_that_leaves_between_forward_and_backward(pool: Pool) -> None:
    assert pool.run(outcome, "leaves") == ["fine"] * 3


def test_ranks_that_diverge(pool: Pool) -> None:
    for text in pool.run(outcome, "diverges"):
        assert text.startswith("ProtocolError: 2 active ranks announced different bursts")


def test_ranks_of_which_one_alone_reduces(pool: Pool) -> None:
    for text in pool.run(outcome, "accumulates, one alone"):
        assert "is to reduce gradients in this backward on some ranks and not on others" in text


@pytest.mark.parametrize("fault", ["declared, accumulates", "declared, evaluates"])
def test_what_cannot_be_declared(ending: Ending, fault: str) -> None:
    first, second, third = ending.run(outcome, fault)
    assert first.startswith("ValueError: with steps=, each forward of FSDPSequential must be one that a backward")
    assert second.startswith("ValueError: with steps=, each forward of")
    assert third.startswith("PeerError: rank 0 failed: ValueError: with steps=, each forward of")


def test_who_was_to_tell_how_the_module_is_called_does_not_come_to_it(ending: Ending) -> None:
    assert_blamed(ending.run(outcome, "declared, loading"), 0, "OSError: disk")
    assert_blamed(ending.run(outcome, "declared, stops"), 0, "ProtocolError: rank 0 declared steps=2 and made 0")


def test_who_begins_to_weigh_after_steps_were_declared(ending: Ending) -> None:
    first, second, third = ending.run(outcome, "declared, weighs late")
    assert first == second
    assert first.startswith("JoinError: with steps=, all ranks must know on entering whether weights are in use")
    assert third.startswith(f"PeerError: rank 0 failed: {first}")


@pytest.mark.parametrize(
    ("fault", "who", "told"),
    [
        ("declared, one more", 0, "rank 0 declared steps=2 and began step 3"),
        ("declared, one fewer", 1, "rank 1 declared steps=3 and made 2"),
        ("declared, some", 2, "rank 2 declared steps=0 and began step 1"),
    ],
)
def test_wrong_declarations(ending: Ending, fault: str, who: int, told: str) -> None:
    assert_blamed(ending.run(outcome, fault), who, f"ProtocolError: {told}")


def test_a_module_that_takes_no_empty_batch(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(outcome, "refuses")):
        assert f"rank {rank} cannot run FSDPRefuses on an empty batch" in text
        assert "ValueError: no samples. Say with what, where the module is listed: Replay(module, example=...)" in text
    assert pool.run(outcome, "example") == ["fine"] * 3


def locked(rank: int) -> str:
    """In lockstep nothing is replayed: the module may refuse empty batches. One rank raises between two bursts."""
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(Refuses(*build("mlp")), mesh=mesh_of())  # pyright: ignore[reportGeneralTypeIssues]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with Join([model, optimizer]) as join:
            for x in join.iterate([batch(rank, 0, step)[0] for step in range(1 + rank)], dummy="last"):
                loss = model(x).sum()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    model(x)  # leaves the root's parameters gathered
        with Join([model, optimizer]) as join:
            for step, x in enumerate(join.iterate([batch(rank, 0, step)[0] for step in range(1 + rank)], dummy="last")):
                loss = model(x).sum()
                if (rank, step) == (1, 1):
                    raise OSError("disk")
                loss.backward()
                optimizer.step()
    except (JoinError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_a_module_that_takes_no_empty_batch_in_lockstep(ending: Ending) -> None:
    assert_blamed(ending.run(locked), 1, "OSError: disk")


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
            ((model(x.to_sparse() if len(x) else x) - y) ** 2).sum().backward()
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
                    ((model(x) - y) ** 2).mean().backward()
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
            "dummy='last' would count in the forward of FSDPSequential, which contains SyncBatchNorm"
        )


def test_a_module_that_hides_its_outputs(pool: Pool) -> None:
    for text in pool.run(outcome, "hides"):
        assert "FSDPHides returns a Opaque, in which Join finds no tensor" in text


def test_weights_that_make_no_sense(pool: Pool) -> None:
    for text in pool.run(outcome, "weight on one rank"):
        assert "join.weight is set on 1 ranks and not on 1; set it on all ranks or on none" in text
    for text in pool.run(outcome, "weight 0 on all"):
        assert "join.weight is 0 on all ranks at once" in text


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
        with Join([encoder, decoder, *optimizers], divide_by_initial_world_size=False, timeout=30):
            for x, y in (batch_of(Data(), rank, epoch, step) for step in range(counts[rank])):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                ((decoder(encoder(x)) - y) ** 2).mean().backward()
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
                (forward(model, Case(), rank, epoch, step) / len(ranks)).backward()
            optimizer.step()
    expected = flat_state(dict(zip("012345", model.parameters(), strict=True)))
    for state in pool.run(train_chain, encoder_is):
        assert_same(state, expected, TOLERANCE)


def stops(rank: int) -> str:
    model = shard()
    try:
        with Join([model], throw_on_early_termination=True):
            for step in range(1 + rank):
                model(batch(rank, 0, step)[0]).sum().backward()
    except EarlyTerminationError as error:
        return str(error)
    return "fine"


def test_early_termination(pool: Pool) -> None:
    first, *others = pool.run(stops)
    assert first == "Rank 0 exhausted all inputs."
    for other in others:
        assert other == "Detected at least one rank that exhausted inputs. Throwing across all ranks."


class AllReduce(torch.autograd.Function):
    """The sum over all ranks, and so of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return AllReduce.apply(gradients[0])


def changes(rank: int) -> None:
    """A module that communicates or not, as its caller wants; settings and hooks are as before afterwards."""

    class Sums(torch.nn.Linear):
        def forward(self, x: torch.Tensor, twice: bool) -> torch.Tensor:
            y = AllReduce.apply(super().forward(x).sum(0))
            return AllReduce.apply(y) if twice else y

    module = Sums(4, 2)
    with Join([Replay(module)]):
        for step in range(2 * rank):
            module(batch(rank, 0, step)[0], twice=step % 2 == 0).sum().backward()
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_calls_of_several_kinds(pool: Pool) -> None:
    pool.run(changes)


def test_a_shared_call_that_is_not_listed() -> None:
    def run(collective: ThreadCollective) -> None:
        call = SharedCall(lambda: 1, process_group=collective)
        assert call() == 1
        with Join([Counter(collective)]), pytest.raises(JoinError, match="does not list it; list it"):
            call()

    run_threads(2, run)


def train_on_what_requires_grad(rank: int, counts: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
    model = shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer]) as join:
        for epoch, of_ranks in enumerate(counts):
            for x, y in join.iterate([batch(rank, epoch, step) for step in range(of_ranks[rank])]):
                optimizer.zero_grad()
                ((model(x.requires_grad_()) - y) ** 2).sum().backward()
                optimizer.step()
    return flat_state(whole(model.state_dict()))


def test_who_tells_a_call_in_lockstep_changes(pool: Pool) -> None:
    """All ranks take a call for the same kind, whoever tells it: they agree on whether it was tried before."""
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


WINDOW_OVER_BLOCKS = Case(data=Data(((3, 3), (1, 1)), weighted=True))


def train_a_window_over_blocks(rank: int) -> dict[str, torch.Tensor]:
    """Each window has two steps; the second window begins in the first block, and ends in the other one."""
    case, begun = WINDOW_OVER_BLOCKS, 0
    model = shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, counts in enumerate(case.data.counts):
        join = Join([model, optimizer])
        join.weight = 1
        with join:
            for step in range(counts[rank]):
                join.weight = weight_of(case.data, rank, epoch, step)
                begun += 1
                model.set_requires_gradient_sync(begun % 2 == 0)
                forward(model, case, rank, epoch, step).backward()
                if begun % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return flat_state(whole(model.state_dict()))


def test_weights_of_a_window_over_blocks(pool: Pool) -> None:
    case = WINDOW_OVER_BLOCKS
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in ((0, 0), (0, 1)), ((0, 2), (1, 0)):
        batches_of_all = [(rank, epoch, step) for epoch, step in window for rank in range(2)]
        total = sum(weight_of(case.data, *each) for each in batches_of_all)
        optimizer.zero_grad()
        for each in batches_of_all:
            (forward(model, case, *each) * weight_of(case.data, *each) / total).backward()
        optimizer.step()
    for state in pool.run(train_a_window_over_blocks, ranks=2):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)


def steps_outside(rank: int, weighs: bool) -> dict[str, torch.Tensor]:
    """A window that is left open in a block is reduced outside of any; then comes another block."""
    model = shard()
    listed = [model, torch.optim.SGD(model.parameters(), lr=0.0)]
    with Join(listed, divide_by_initial_world_size=False) as join:
        join.weight = 10
        model.set_requires_gradient_sync(False)
        model(batch(rank, 0, 0)[0]).square().sum().backward()
    model.set_requires_gradient_sync(True)
    model(batch(rank, 0, 1)[0]).square().sum().backward()
    model.zero_grad()
    with Join(listed, divide_by_initial_world_size=False) as join:
        for step in range(rank):
            join.weight = 3 if weighs else None
            model(batch(rank, 1, step)[0]).square().sum().backward()
    return whole(gradients_of(model))


@pytest.mark.parametrize("weighs", [False, True])
def test_a_window_that_is_stepped_outside_a_block(pool: Pool, weighs: bool) -> None:
    model = build("mlp")
    model(batch(1, 1, 0)[0]).square().sum().backward()
    for found in pool.run(steps_outside, weighs, ranks=2):
        assert_same(found, gradients_of(model), TOLERANCE * 10)


def begins_to_weigh(rank: int) -> str:
    """In the middle of a window, on all ranks; the module is at rest afterwards."""
    model = shard()
    with pytest.raises(ValueError, match="window of accumulation") as caught, Join([model]) as join:
        model.set_requires_gradient_sync(False)
        model(batch(rank, 0, 0)[0]).sum().backward()
        join.weight = 2
        model.set_requires_gradient_sync(True)
        model(batch(rank, 0, 1)[0]).sum().backward()
    group_works()
    model(batch(rank, 0, 2)[0]).sum().backward()
    return str(caught.value)


def test_weights_of_a_part_of_a_window(pool: Pool) -> None:
    for text in pool.run(begins_to_weigh, ranks=2):
        assert text.startswith("join.weight was set or unset in a window of accumulation of FSDPMLP;")


def keeps_gradients(rank: int, window: int, blocks: list[range]) -> dict[str, torch.Tensor]:
    """Steps of ``window`` backwards each without zero_grad, in these blocks; rank 2 has no data."""
    model = DistributedDataParallel(build("mlp"))
    for block in blocks:
        with Join([Replay(model)], divide_by_initial_world_size=False):
            for step in block if rank < 2 else ():
                with nullcontext() if (step + 1) % window == 0 else model.no_sync():
                    model(batch(rank, 0, step)[0]).square().sum().backward()
    return gradients_of(model.module)


def gradients_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(("window", "blocks"), [(1, [range(4)]), (2, [range(4)]), (2, [range(1), range(1, 2)])])
def test_gradients_that_a_replayed_ddp_module_keeps(pool: Pool, window: int, blocks: list[range]) -> None:
    """The last result counts once, whatever the next one is scaled by; and a window may go over blocks."""
    model = build("mlp")
    for step in chain(*blocks):
        for rank in range(2):
            (model(batch(rank, 0, step)[0]).square().sum() / 2).backward()
    for found in pool.run(keeps_gradients, window, blocks, ranks=3):
        assert_same(found, gradients_of(model), TOLERANCE * 10)
