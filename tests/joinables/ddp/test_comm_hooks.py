"""Comm hooks, buffer hooks and sub-groups.

Compressed gradients have no single-process reference. Theirs is plain DDP in which a rank without data feeds a batch
whose loss is multiplied by zero: the same collectives on the same numbers.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from join import Join
from tests.harness import Pool, all_or_each, first_and_last
from tests.training import TOLERANCE, Optimizer, assert_same, batch, build, flat_state, optimizer_of

COUNTS = first_and_last(((0, 3, 1), (2, 0, 4), (3, 1, 0)))
RANKS = 3
WAYS = ["plain", "iterate"]


def register(ddp: DistributedDataParallel, hook: str) -> None:
    group = ddp.process_group
    if hook == "allreduce":
        ddp.register_comm_hook(group, default_hooks.allreduce_hook)
    elif hook == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif hook == "builtin fp16":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=1,
            start_powerSGD_iter=3,
            min_compression_rate=0.5,  # pyright: ignore[reportArgumentType]
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def check_ways(pool: Pool, train: Any, hook: str, more: Any, padded: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every way to train ends the same on all ranks, and as padded DDP."""
    for way in WAYS:
        states = pool.run(train, hook, way, more, ranks=RANKS)
        for state in states:
            assert_same(state, states[0])
            assert_same(state, padded, tolerance)


def train(rank: int, hook: str, way: str, zero: bool) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(build("mlp"))
    register(ddp, hook)
    padded = way == "padded"
    optimizer = optimizer_of(Optimizer(zero=zero and not padded), ddp)
    for epoch, counts in enumerate(COUNTS):
        join = Join([ddp, optimizer])
        with nullcontext() if padded else join:
            steps = range(max(counts) if padded else counts[rank])
            for step in join.iterate(steps, dummy="last") if way == "iterate" else steps:
                x, y = batch(rank, epoch, step)
                optimizer.zero_grad()
                (((ddp(x) - y) ** 2).mean() * (step < counts[rank])).backward()
                optimizer.step()
    return flat_state(ddp.module.state_dict())


HOOKS = ["none", "allreduce", "fp16", "builtin fp16", "powersgd"]


@pytest.mark.parametrize(("hook", "zero"), all_or_each(product(HOOKS, [True, False])))
def test_comm_hook_equals_padded_ddp(pool: Pool, hook: str, zero: bool) -> None:
    padded = pool.run(train, hook, "padded", False, ranks=RANKS)
    check_ways(pool, train, hook, zero, padded[0], TOLERANCE)


def weight_of(rank: int, epoch: int, step: int) -> int:
    return 20_000 * (1 + (rank + epoch + 3 * step) % 4)


def train_weighted(rank: int, hook: str, way: str, accumulation: int) -> dict[str, torch.Tensor]:
    """Where it is padded, losses are multiplied by what makes a weighted mean of DDP's."""
    ddp = DistributedDataParallel(build("mlp"))
    register(ddp, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    padded = way == "padded"
    for epoch, counts in enumerate(COUNTS):
        steps = accumulation * (max(counts) if padded else counts[rank])
        join = Join([ddp, optimizer])
        batches: Any = range(steps)
        with nullcontext() if padded else join:
            if way == "iterate":
                weigh = partial(weight_of, rank, epoch)
                batches = join.iterate(batches, dummy="last", weigh=weigh, window=accumulation)
            for step, _ in enumerate(batches):
                window = range(step // accumulation * accumulation, step + 1)
                is_last = len(window) == accumulation
                weights = [
                    weight_of(each, epoch, within) * (step < accumulation * counts[each])
                    for each in range(RANKS)
                    for within in range(window[0], window[0] + accumulation)
                ]
                x, y = batch(rank, epoch, step)
                mine = weight_of(rank, epoch, step)
                factor = RANKS * mine / sum(weights) * (step < accumulation * counts[rank]) if padded else 1.0
                if way == "plain":
                    join.weight = mine
                with nullcontext() if is_last else ddp.no_sync():
                    value = ((ddp(x) - y) ** 2).mean() * factor
                    (value if padded else join.scale(value)).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
    return flat_state(ddp.module.state_dict())


@pytest.mark.parametrize(("hook", "accumulation"), all_or_each(product(HOOKS, [2, 1])))
def test_weights_under_a_comm_hook_equal_padded_ddp(pool: Pool, hook: str, accumulation: int) -> None:
    """Which is given parts of the weighted mean: they stay in the range of float16, and errors in their units."""
    padded = pool.run(train_weighted, hook, "padded", accumulation, ranks=RANKS)
    check_ways(pool, train_weighted, hook, accumulation, padded[0], 1e-4 if "fp16" in hook else TOLERANCE)


def buffer_hook(state: Any, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[Any]]:
    state["calls"] += 1
    return [dist.broadcast(buffer, 1, group=state["group"], async_op=True).get_future() for buffer in buffers.values()]


def train_with_buffer_hook(rank: int, location: str, way: str) -> tuple[dict[str, torch.Tensor], int]:
    ddp = DistributedDataParallel(build("norm"))
    state = {"group": ddp.process_group, "calls": 0}
    ddp._register_buffer_comm_hook(state, buffer_hook, _BufferCommHookLocation[location])
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    counts = [2, 5, 3]  # rank 1, from which the hook broadcasts, goes on longest
    steps = range(max(counts) if way == "padded" else counts[rank])
    join = Join([ddp, optimizer])
    with nullcontext() if way == "padded" else join:
        for step in join.iterate(steps, dummy="last") if way == "iterate" else steps:
            x, y = batch(rank, 0, step)
            optimizer.zero_grad()
            (((ddp(x) - y) ** 2).mean() * (step < counts[rank])).backward()
            optimizer.step()
    return flat_state(ddp.module.state_dict()), state["calls"]


@pytest.mark.parametrize("location", ["PRE_FORWARD", "POST_FORWARD"])
def test_buffer_comm_hook(pool: Pool, location: str) -> None:
    padded = pool.run(train_with_buffer_hook, location, "padded", ranks=RANKS)
    for way in WAYS:
        results = pool.run(train_with_buffer_hook, location, way, ranks=RANKS)
        assert [calls for _, calls in results] == [5, 5, 5]
        for state, _ in results:
            assert_same(state, padded[1][0], TOLERANCE)


def accumulate(rank: int, model: str, initial: bool) -> dict[str, torch.Tensor]:
    """The common loop, with zero_grad after the step and epochs that are no multiple of the accumulation."""
    ddp = DistributedDataParallel(build(model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch, counts in enumerate([(3, 0, 2), (4, 4, 0), (1, 1, 2)]):
        with Join([ddp, optimizer], divide_by_initial_world_size=initial):
            for step in range(counts[rank]):
                x, y = batch(rank, epoch, step)
                with nullcontext() if step % 2 else ddp.no_sync():
                    ((ddp(x) - y) ** 2).mean().backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    return flat_state(ddp.module.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_gradients_left_over_from_one_epoch_to_the_next(pool: Pool, model: str, initial: bool) -> None:
    states = pool.run(accumulate, model, initial, ranks=RANKS)
    for state in states[1:]:
        assert_same(state, states[0])


def drops_its_last_window(rank: int, unused: bool, initial: bool, weighted: bool) -> dict[str, torch.Tensor]:
    """A window that is not full when a rank has run out is zeroed, and contributes nothing."""
    ddp = DistributedDataParallel(build("mlp"), find_unused_parameters=unused)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp, optimizer], divide_by_initial_world_size=initial) as join:
        for step in range((3, 0, 6)[rank]):
            join.weight = 2 if weighted else None
            with nullcontext() if step % 2 else ddp.no_sync():
                join.scale(ddp(batch(rank, 0, step)[0]).pow(2).mean()).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
    return flat_state(ddp.module.state_dict())


@pytest.mark.parametrize(("initial", "weighted"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("unused", [False, True])
def test_a_window_that_is_dropped(pool: Pool, unused: bool, initial: bool, weighted: bool) -> None:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window, ranks in enumerate([[0, 2], [2], [2]]):
        optimizer.zero_grad()
        divisor = 2 * len(ranks) if weighted else RANKS if initial else len(ranks)
        for rank in ranks:
            for step in (2 * window, 2 * window + 1):
                (model(batch(rank, 0, step)[0]).pow(2).mean() / divisor).backward()
        optimizer.step()
    for state in pool.run(drops_its_last_window, unused, initial, weighted, ranks=RANKS):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)


def train_in_groups(rank: int, way: str) -> dict[str, torch.Tensor]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    ddp = DistributedDataParallel(build("norm"), process_group=group)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    count = (0, 2, 3, 5)[rank]
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        mine = [batch(rank, 0, step) for step in range(count)]
        for x, y in join.iterate(mine) if way == "iterate" else mine:
            optimizer.zero_grad()
            ((ddp(x) - y) ** 2).mean().backward()
            optimizer.step()
    assert [row.steps for row in join.report.ranks] == [[0, 3], [2, 5]][rank % 2]
    return flat_state(ddp.module.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_sub_groups(pool: Pool, way: str) -> None:
    states = pool.run(train_in_groups, way, ranks=4)
    assert_same(states[0], states[2])
    assert_same(states[1], states[3])
    model = build("norm")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):  # group (0, 2): rank 0 has no data at all
        x, y = batch(2, 0, step)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    expected = flat_state(model.state_dict(), optimizer.state_dict())
    assert_same(states[0], expected, TOLERANCE)


def clamped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.05, 0.05)


def clamp_accumulated(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.copy_(clamped(parameter.grad))


def train_clamped(rank: int, where: str, way: str) -> dict[str, torch.Tensor]:
    """Each rank's own gradients are clamped, in hooks of one of four kinds."""
    ddp = DistributedDataParallel(build("mlp"))
    if where == "comm hook":
        ddp.register_comm_hook(None, lambda _, bucket: reduce_clamped(ddp.process_group, bucket))
    for parameter in ddp.parameters():
        if where == "parameters":
            parameter.register_hook(clamped)
        elif where == "accumulated gradients":
            parameter.register_post_accumulate_grad_hook(clamp_accumulated)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    mine = [batch(rank, 0, step) for step in range((2, 5, 0)[rank])]
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for x, y in mine if way == "plain" else join.iterate(mine):
            optimizer.zero_grad()
            output = ddp(x)
            if where == "activations":
                output.register_hook(clamped)
            ((output - y) ** 2).mean().backward()
            optimizer.step()
    return flat_state(ddp.module.state_dict())


def reduce_clamped(group: Any, bucket: Any) -> Any:
    bucket.buffer().copy_(clamped(bucket.buffer()))
    return default_hooks.allreduce_hook(group, bucket)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["parameters", "accumulated gradients", "comm hook", "activations"])
def test_hooks_that_are_not_linear_get_gradients_that_are_not_scaled(pool: Pool, where: str, way: str) -> None:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        batches = [batch(rank, 0, step) for rank in range(3) if step < (2, 5, 0)[rank]]
        outputs = [model(x) for x, _ in batches]
        for output in outputs if where == "activations" else ():
            output.register_hook(clamped)
        losses = [((output - y) ** 2).mean() for output, (_, y) in zip(outputs, batches, strict=True)]
        of_ranks = [list(torch.autograd.grad(loss, list(model.parameters()))) for loss in losses]
        if where != "activations":
            of_ranks = [[clamped(part) for part in parts] for parts in of_ranks]
        for parameter, *parts in zip(model.parameters(), *of_ranks, strict=True):
            parameter.grad = sum(parts, torch.zeros(())) / len(parts)
        optimizer.step()
    for state in pool.run(train_clamped, where, way):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)


def train_summed(rank: int, way: str) -> dict[str, torch.Tensor]:
    """The comm hook sums what losses are that are divided by a constant."""
    ddp = DistributedDataParallel(build("mlp"))
    ddp.register_comm_hook(None, lambda _, bucket: summed(bucket.buffer()))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    mine = [batch(rank, 0, step) for step in range((2, 5, 0)[rank])]
    with Join([ddp, optimizer]) as join:
        for x, y in mine if way == "plain" else join.iterate(mine):
            optimizer.zero_grad()
            ((ddp(x) - y) ** 2).sum().div(12).backward()
            optimizer.step()
    return flat_state(ddp.module.state_dict())


def summed(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])  # pyright: ignore


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_sums_is_left_as_it_is_in_a_mean_over_all_ranks(pool: Pool, way: str) -> None:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        for x, y in [batch(rank, 0, step) for rank in range(3) if step < (2, 5, 0)[rank]]:
            ((model(x) - y) ** 2).sum().div(12).backward()
        optimizer.step()
    for state in pool.run(train_summed, way):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)
