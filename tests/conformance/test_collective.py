"""One suite over every Collective: threads, gloo, and a process group without a CPU backend of its own."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from join.collectives import Collective, ThreadCollective, TorchCollective, collective_of, run_threads
from join.transfer import broadcast_tensors, broadcast_tree
from tests.pool import Pool

RANKS = 3


def conforms(collective: Collective) -> None:
    rank, size = collective.rank, collective.world_size
    assert size == RANKS
    for op, expected in {"sum": [3.0, 6.0], "min": [0.0, 2.0], "max": [2.0, 2.0]}.items():
        tensor = torch.tensor([float(rank), 2.0])
        collective.all_reduce(tensor, op).wait()  # type: ignore[arg-type]
        assert tensor.tolist() == expected
    for source in range(size):
        tensor = torch.full((2, 2), rank, dtype=torch.int64)
        collective.broadcast(tensor, source).wait()
        assert tensor.tolist() == [[source] * 2] * 2

    # several under way at once are matched by their order
    tensors = [torch.tensor([float(rank + step)]) for step in range(5)]
    for work in [collective.all_reduce(tensor) for tensor in tensors]:
        work.wait()
        assert work.is_completed()
    assert [tensor.item() for tensor in tensors] == [3.0 + 3 * step for step in range(5)]

    # waiting can end early and be taken up again
    tensor = torch.ones(1)
    if rank == 0:
        time.sleep(0.6)
    work = collective.all_reduce(tensor)
    if rank != 0:
        with pytest.raises(RuntimeError):
            work.wait(timedelta(seconds=0.1))
    work.wait()
    assert tensor.item() == size

    collective.set(f"key/{rank}", f"text of {rank}")
    assert [collective.get(f"key/{each}") for each in range(size)] == [f"text of {each}" for each in range(size)]
    assert collective.check("key/0")
    assert not collective.check("never set")
    collective.add("counter", rank + 1)
    collective.all_reduce(torch.zeros(1)).wait()
    assert collective.add("counter", 0) == 6

    value = {"list": [1, None, "two"], "rank": rank}
    assert collective.broadcast_object(value, 1) == {"list": [1, None, "two"], "rank": 1}
    assert collective.broadcast_object(None, 2) is None
    with pytest.raises(RuntimeError, match="rank 0 cannot pickle"):
        collective.broadcast_object(lambda: None, 0)

    tree = {"a": torch.full((3,), rank), "b": [torch.tensor(float(rank)), (rank, "x")], 5: torch.zeros(0)}
    received = broadcast_tree(collective, tree if rank == 2 else None, 2)
    assert torch.equal(received["a"], torch.full((3,), 2))
    assert received["b"][0].item() == 2.0
    assert received["b"][1] == (2, "x")
    assert received[5].shape == (0,)
    assert broadcast_tree(collective, [], 0) == []

    mixed = [torch.full((2, 3), rank).t(), torch.tensor(rank, dtype=torch.float64), torch.full((4,), float(rank))]
    broadcast_tensors(collective, mixed, 1)
    assert all(bool((tensor == 1).all()) for tensor in mixed)

    first = collective.next_block()
    assert collective.next_block() == first + 1


def test_threads() -> None:
    run_threads(RANKS, conforms)


def with_gloo(rank: int) -> None:
    assert collective_of(None) is collective_of(dist.group.WORLD)
    conforms(collective_of(None))


def without_cpu_backend(rank: int) -> None:
    group = dist.new_group(backend="cuda:gloo")
    assert "cpu:" not in dist.get_backend_config(group)
    collective = collective_of(group)
    assert isinstance(collective, TorchCollective)
    conforms(collective)
    assert collective._cpu_group is collective._cpu_group is not group


def in_sub_group(rank: int) -> None:
    group = dist.new_group([1, 2, 3])
    if rank:
        conforms(collective_of(group))


def test_gloo(pool: Pool) -> None:
    pool.run(with_gloo, ranks=RANKS)


def test_group_without_cpu_backend(pool: Pool) -> None:
    pool.run(without_cpu_backend, ranks=RANKS)


def test_sub_group(pool: Pool) -> None:
    pool.run(in_sub_group, ranks=4)


def test_threads_tell_mismatched_collectives() -> None:
    def rank_main(collective: ThreadCollective) -> Any:
        tensor = torch.zeros(2)
        return (collective.broadcast(tensor, 0) if collective.rank else collective.all_reduce(tensor)).wait()

    with pytest.raises(RuntimeError, match=r"ranks disagree on collective 0.*float32\[2\]"):
        run_threads(2, rank_main)


def test_threads_tell_a_missing_rank() -> None:
    def rank_main(collective: ThreadCollective) -> None:
        if collective.rank != 1:
            collective.all_reduce(torch.zeros(2)).wait()

    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not come"):
        run_threads(3, rank_main, timeout=0.3)


def test_threads_release_those_who_wait_for_a_rank_that_raised() -> None:
    def rank_main(collective: ThreadCollective) -> None:
        if collective.rank == 1:
            raise KeyError("rank 1")
        collective.all_reduce(torch.zeros(2)).wait()

    with pytest.raises(KeyError, match="rank 1"):
        run_threads(3, rank_main)
    with pytest.raises(ValueError, match="world_size=0"):
        run_threads(0, rank_main)


def released(rank: int) -> None:
    import gc
    import weakref

    import join.collectives
    from join import Join
    from tests.join.counter import Counter

    group = dist.new_group()
    for expected in (1, 2):
        with Join([Counter(collective_of(group))]):
            pass
        assert collective_of(group).next_block() == 2 * expected  # counted on, though the collective was made anew
        gc.collect()
        assert len(join.collectives._of_group) == 0
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert gone() is None


def test_a_group_is_not_kept_alive(pool: Pool) -> None:
    pool.run(released, ranks=2)
