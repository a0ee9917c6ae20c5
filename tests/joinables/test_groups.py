"""Blocks inside blocks of other process groups; ``tests/docs/test_pages.py`` trains modules on several groups."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.harness import Pool
from tests.training import TOLERANCE, batch, build, mlp_in_one_process

COUNTS = (2, 5, 0)


def in_two_blocks(rank: int, largest_first: bool) -> str:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    modules = [DistributedDataParallel(nn.Linear(2, 2), process_group=group) for group in (None, groups[rank // 2])]
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


def in_two_threads(rank: int, lockstep: bool) -> list[torch.Tensor]:
    """Each thread trains a model of its own on a group of its own, while the block of the other thread is open."""
    modules = [DistributedDataParallel(build("mlp"), process_group=dist.new_group()) for _ in range(2)]
    both = threading.Barrier(2)

    def train(thread: int) -> None:
        ddp = modules[thread]
        optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
        data = [batch(rank, 0, step) for step in range(COUNTS[rank - thread])]
        for _ in range(2):
            both.wait(60)
            with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
                both.wait(60)
                for x, y in join.iterate(data) if lockstep else data:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(ddp(x), y).backward()
                    optimizer.step()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    return [parameter.detach() for ddp in modules for parameter in ddp.parameters()]


@pytest.mark.parametrize("lockstep", [False, True])
def test_blocks_of_two_threads(pool: Pool, lockstep: bool) -> None:
    first, second = (mlp_in_one_process(counts, epochs=2) for counts in (COUNTS, COUNTS[-1:] + COUNTS[:-1]))
    for found in pool.run(in_two_threads, lockstep, ranks=3):
        torch.testing.assert_close(found, first + second, atol=TOLERANCE, rtol=0)
