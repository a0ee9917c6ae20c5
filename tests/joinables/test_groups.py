"""Modules on different process groups: an encoder over all ranks, and a decoder for the ranks of each task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.models import FEATURES, TARGETS, assert_same, batch, flat_state
from tests.pool import Pool

COUNTS = (2, 5, 3, 0)
TASKS = ([0, 1], [2, 3])  # ranks


def nets(task: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(task)
    decoder = nn.Linear(4, TARGETS)
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh()), decoder


def over_all_ranks(rank: int) -> dict[str, torch.Tensor]:
    """The way that J015 names: only objects on the group of all ranks are listed."""
    groups = [dist.new_group(ranks) for ranks in TASKS]
    encoder, decoder = nets(rank // 2)
    all_ranks = DistributedDataParallel(encoder)
    task: Any = DistributedDataParallel(decoder, process_group=groups[rank // 2])
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (encoder, decoder)]
    with pytest.raises(ValueError, match=r"List only .* \[J015\]"):
        Join([all_ranks, task])
    with Join([all_ranks, optimizers[0]], divide_by_initial_world_size=False) as join:
        for x, y in join.iterate([batch(rank, 0, step) for step in range(COUNTS[rank])]):
            for optimizer in optimizers:
                optimizer.zero_grad()
            join.scale((task(all_ranks(x)) - y).square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
    return flat_state(encoder.state_dict(), decoder.state_dict())


def test_one_block_on_the_group_of_all_ranks(pool: Pool) -> None:
    """A decoder's gradients are divided by the 2 ranks of its group, not by the 4 ranks: it has twice the rate."""
    encoder, first = nets(0)
    decoders = [first, nets(1)[1]]
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for decoder in decoders:
        optimizer.add_param_group({"params": decoder.parameters(), "lr": 0.2})
    for step in range(max(COUNTS)):
        ranks = [rank for rank in range(4) if step < COUNTS[rank]]
        optimizer.zero_grad()
        for rank in ranks:
            x, y = batch(rank, 0, step)
            ((decoders[rank // 2](encoder(x)) - y).square().mean() / len(ranks)).backward()
        optimizer.step()
    for rank, state in enumerate(pool.run(over_all_ranks, ranks=4)):
        assert_same(state, flat_state(encoder.state_dict(), decoders[rank // 2].state_dict()))


def in_two_blocks(rank: int, largest_first: bool) -> str:
    groups = [dist.new_group(ranks) for ranks in TASKS]
    modules = [DistributedDataParallel(nets(0)[0], process_group=group) for group in (None, groups[rank // 2])]
    outer, inner = modules if largest_first else reversed(modules)
    with pytest.raises(JoinError) as caught, Join([outer]), Join([inner]):
        raise AssertionError("it was entered")
    return str(caught.value)


@pytest.mark.parametrize(("largest_first", "sizes"), [(True, (2, 4)), (False, (4, 2))])
def test_blocks_inside_plain_blocks_of_other_groups(pool: Pool, largest_first: bool, sizes: tuple[int, int]) -> None:
    for text in pool.run(in_two_blocks, largest_first, ranks=4):
        assert text.startswith("A block on {} ranks was entered inside a plain block on another".format(*sizes))
        assert f"of {sizes[1]} ranks, " in text and text.endswith("[J548]")


def in_a_loop(rank: int) -> list[int]:
    """All ranks run the loop body, so a block of another group may be in it; so may a block of this rank alone."""
    groups = [dist.new_group(ranks) for ranks in ([0], [1], [2], [0, 1, 2])]
    counts = list[int]()
    with Join([], process_group=None) as outer:
        for _ in outer.iterate([torch.ones(1)] * COUNTS[rank]):
            with Join([], process_group=groups[3]) as inner:
                counts.append(len(list(inner.iterate(range(rank)))))
        with Join([], process_group=groups[rank]) as alone:
            counts.append(len(list(alone.iterate(range(rank)))))
    return counts


def test_blocks_of_other_groups_that_ranks_may_enter(pool: Pool) -> None:
    assert pool.run(in_a_loop, ranks=3) == [[2, 2, 2, 2, 2, rank] for rank in range(3)]
