"""Blocks in which ranks communicate equally often, and still differ at the end: in local steps, and in buffers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join, ProtocolError
from tests.harness import Pool
from tests.training import Model, Shards, assert_same, batch, build, flat_state, shard, whole


def train_locally(rank: int, model: str, counts: tuple[int, ...]) -> tuple[bool, Any, Any]:
    """Synchronise every fourth backward, and step the optimizer each time, as torch's own test of uneven inputs does.

    Returns whether the report says that the ranks were even, and the state before and after the end of the block.
    """
    ddp = DistributedDataParallel(build(model))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)

    def state() -> dict[str, torch.Tensor]:
        return flat_state(ddp.module.state_dict(), optimizer.state_dict())

    with Join([ddp, optimizer]) as join:
        for step in range(counts[rank]):
            x, y = batch(rank, 0, step)
            with nullcontext() if step % 4 == 3 else ddp.no_sync():
                ((ddp(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = state()
    return join.report.even, before, state()


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("counts", [(5, 7, 4), (3, 2, 0), (7, 7, 6)])
def test_ranks_that_differ_in_local_steps_are_uneven(pool: Pool, model: str, counts: tuple[int, ...]) -> None:
    results = pool.run(train_locally, model, counts)
    _, longest, _ = results[counts.index(max(counts))]
    for even, _, after in results:
        assert not even
        assert_same(after, longest)


@pytest.mark.parametrize("count", [5, 1])
def test_ranks_with_as_many_local_steps_are_even(pool: Pool, count: int) -> None:
    for even, before, after in pool.run(train_locally, "mlp", (count, count, count)):
        assert even
        assert_same(after, before)  # each has its own, as without the block


def accumulate(rank: int, ddp: Any, optimizer: Any, count: int = 4, *, alone: bool = False) -> None:
    """Synchronise every second backward, and step after each of these, or alone after every backward."""
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for step in range(count):
            x, y = batch(rank, 0, step)
            with nullcontext() if step % 2 else ddp.no_sync():
                ((ddp(x) - y) ** 2).mean().backward()
            if alone or step % 2:
                optimizer.step()
                optimizer.zero_grad()


def one_rank_changes(rank: int, kinds: tuple[str, ...]) -> list[str]:
    """For each kind of blocks: what the next block says once rank 1 alone has changed its weights."""
    texts = list[str]()
    for kind in kinds:
        ddp = DistributedDataParallel(build("mlp"))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        train = partial(accumulate, rank, ddp, optimizer)
        train(alone=kind != "accumulates")
        train(0)  # an evaluation
        if kind == "averages":
            for parameter in ddp.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 3
        if kind == "uneven":
            train(2 * rank, alone=True)
        train()
        for parameter in ddp.parameters() if rank == 1 else ():
            parameter.data *= 1.5
        try:
            train(alone=kind == "stays apart")
            texts.append("fine")
        except ProtocolError as error:
            texts.append(str(error))
    return texts


def test_steps_alone_are_one_reason_to_differ_and_no_other(pool: Pool) -> None:
    kinds = ("accumulates", "averages", "uneven", "stays apart")
    for *others, apart in pool.run(one_rank_changes, kinds, ranks=3):
        assert apart == "fine"
        assert all(text.endswith("[J441]") and "squared norm" in text for text in others), others


def normalise(rank: int, how: str, way: str) -> tuple[bool, Any, Any]:
    trained: Any = DistributedDataParallel(build("norm")) if how == "DDP" else shard(Model("norm"), Shards(units=()))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with Join([trained, optimizer]) as join:
        mine = [batch(rank, 0, step) for step in range(3)]
        for x, y in join.iterate(mine) if way == "iterate" else mine:
            optimizer.zero_grad()
            join.scale(((trained(x) - y) ** 2).mean()).backward()
            optimizer.step()
        before = flat_state(dict(trained.named_buffers()))
    return join.report.even, before, flat_state(whole(dict(trained.named_buffers())))


@pytest.mark.parametrize(("how", "way"), [("DDP", "plain"), ("DDP", "iterate"), ("fully_shard", "iterate")])
def test_buffers_are_the_same_after_an_even_block(pool: Pool, how: str, way: str) -> None:
    results = pool.run(normalise, how, way)
    _, first, _ = results[0]
    for even, _, after in results:
        assert even
        assert_same(after, first)
