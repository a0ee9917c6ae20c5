"""The suite over every Collective."""

from __future__ import annotations

import os
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from join import Join
from join.collectives import SingleCollective, ThreadCollective, TorchCollective, collective_of, run_threads
from tests.conformance.collective_suite import check_lifecycle, check_refuses_when_not_set_up, conforms
from tests.join.counter import Counter
from tests.pool import Pool

RANKS = 3


def alone(rank: int) -> None:
    conforms(TorchCollective(dist.group.WORLD))


def test_single() -> None:
    collective = SingleCollective()
    check_lifecycle(collective, 0, 1)
    collective.barrier()  # there is nothing to connect


@pytest.mark.parametrize("cls", [SingleCollective, TorchCollective])
def test_a_trainers_collective_goes_to_other_processes(cls: type[Any]) -> None:
    assert not pickle.loads(pickle.dumps(cls())).is_set_up


@pytest.mark.parametrize("ranks", [1, RANKS, 16])
def test_threads(ranks: int) -> None:
    run_threads(ranks, conforms)


def test_threads_leave_and_come_back() -> None:
    def rank_main(collective: ThreadCollective) -> None:
        rank, size = collective.rank, collective.world_size
        with pytest.raises(RuntimeError, match="is already set up"):
            collective.setup(rank, size)
        collective.teardown()
        check_refuses_when_not_set_up(collective)
        check_lifecycle(collective, rank, size, again=False)

    run_threads(RANKS, rank_main)


def with_gloo(rank: int) -> None:
    assert collective_of(None) is collective_of(dist.group.WORLD)
    conforms(collective_of(None))


def leave_group(folder: str) -> None:
    """Destroy the pool's group once all ranks have it: one that is early closes connections that others still make."""
    store = dist.FileStore(f"{folder}/left", RANKS)
    store.add("ranks", 1)
    while store.add("ranks", 0) < RANKS:
        time.sleep(0.01)
    dist.destroy_process_group()


def set_up(rank: int, folder: str) -> None:
    """The whole life of a collective that makes the default group."""
    leave_group(folder)
    collective = TorchCollective(backend="gloo", store=dist.FileStore(f"{folder}/store", RANKS), timeout=timedelta(60))
    check_refuses_when_not_set_up(collective)
    check_lifecycle(collective, rank, RANKS, contradicts=False)
    check_refuses_when_not_set_up(collective)
    assert not dist.is_initialized()


def set_up_with_one_store(rank: int, folder: str) -> None:
    """What one collective has left in a store must not be met by the next that is given it."""
    leave_group(folder)
    store = dist.FileStore(f"{folder}/store", RANKS)
    for _ in range(2):
        collective = TorchCollective(backend="gloo", store=store, timeout=timedelta(seconds=20))
        collective.setup(rank, RANKS)
        assert collective.all_gather_object(rank) == list(range(RANKS))
        collective.barrier()
        time.sleep(0.3)  # whoever closes its connections first may break the last operation of others
        collective.teardown()


def set_up_as_by_torchrun(rank: int, folder: str, port: int) -> None:
    """The launcher's store outlives every group, and what an earlier group left in it must not be met by the next."""
    leave_group(folder)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with mock.patch.dict(os.environ, told):
        for collective in (first := TorchCollective(backend="gloo"), first, TorchCollective(backend="gloo")):
            time.sleep(0.3 * (rank == 0))  # while the others look for it
            collective.setup(rank, RANKS)
            assert collective.all_gather_object(rank) == list(range(RANKS))
            collective.teardown()


def takes_the_default_group(rank: int) -> None:
    with pytest.raises(RuntimeError, match=r"backend='nccl' contradicts the default group"):
        TorchCollective(backend="nccl").setup(rank, RANKS)
    collective = TorchCollective(backend="gloo")
    check_lifecycle(collective, rank, RANKS, again=False)
    check_refuses_when_not_set_up(collective)
    assert dist.is_initialized()  # it was there before

    # One group has one collective, whichever way it was reached.
    collective.setup(rank, RANKS)
    assert collective_of(collective) is collective is collective_of(None)
    other = TorchCollective()
    other.setup(rank, RANKS)
    assert collective_of(other) is collective
    collective.teardown()
    assert collective_of(other) is other is collective_of(None)


def leaves_a_group_that_it_was_given(rank: int) -> None:
    collective = collective_of(None)
    collective.teardown()
    collective.barrier()
    with pytest.raises(ValueError, match="Remove group"):
        TorchCollective(dist.group.WORLD, backend="gloo")


def without_cpu_backend(rank: int) -> None:
    group = dist.new_group(backend="cuda:gloo")
    assert "cpu:" not in dist.get_backend_config(group)  # pyright: ignore[reportArgumentType]
    collective = collective_of(group)
    assert isinstance(collective, TorchCollective)
    conforms(collective)
    assert collective._cpu_group is None and collective.companion() is collective.companion()


def is_asked_about_a_group_that_was_destroyed(rank: int) -> None:
    group: Any = dist.new_group()
    dist.destroy_process_group(group)
    with Join([Counter(collective_of(None))]):
        assert not Join.is_open_on(group)


def connects_when_used(rank: int) -> None:
    """Else it would take as many connections as there are ranks."""
    collective, new_group, seen = collective_of(dist.new_group(backend="cuda:gloo")), dist.new_group, list[Any]()

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(os.environ.get("TORCH_GLOO_LAZY_INIT"))
        return new_group(*args, **options)

    with mock.patch.object(dist, "new_group", noted):
        collective.barrier()
    assert seen == ["1"] and "TORCH_GLOO_LAZY_INIT" not in os.environ


def in_sub_group(rank: int) -> None:
    group = dist.new_group([1, 2, 3])
    if rank:
        conforms(collective_of(group))


def test_gloo(pool: Pool) -> None:
    pool.run(with_gloo, ranks=RANKS)


def test_a_companion_connects_when_it_is_used(pool: Pool) -> None:
    pool.run(connects_when_used, ranks=4)


def test_gloo_alone(pool: Pool) -> None:
    pool.run(alone, ranks=1)


def test_gloo_setup(pool: Pool, tmp_path: Path) -> None:
    pool.run(set_up, str(tmp_path), ranks=RANKS)


def test_gloo_setup_with_one_store(pool: Pool, tmp_path: Path) -> None:
    pool.run(set_up_with_one_store, str(tmp_path), ranks=RANKS)


def test_gloo_setup_as_by_torchrun(pool: Pool, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool.run(set_up_as_by_torchrun, str(tmp_path), store.port, ranks=RANKS)


def test_gloo_takes_the_default_group(pool: Pool) -> None:
    pool.run(takes_the_default_group, ranks=RANKS)


def test_gloo_leaves_a_group_that_it_was_given(pool: Pool) -> None:
    pool.run(leaves_a_group_that_it_was_given, ranks=RANKS)


def test_group_without_cpu_backend(pool: Pool) -> None:
    pool.run(without_cpu_backend, ranks=RANKS)


def test_a_group_that_was_destroyed(pool: Pool) -> None:
    pool.run(is_asked_about_a_group_that_was_destroyed, ranks=RANKS)


def test_sub_group(pool: Pool) -> None:
    pool.run(in_sub_group, ranks=4)


def test_threads_tell_mismatched_collectives() -> None:
    def rank_main(collective: ThreadCollective) -> Any:
        tensor = torch.zeros(2)
        return (collective.broadcast(tensor, 0) if collective.rank else collective.all_reduce(tensor)).wait()

    with pytest.raises(RuntimeError, match=r"float32\[2\] as collective 0, but rank"):
        run_threads(2, rank_main)


def test_threads_tell_a_missing_rank() -> None:
    def rank_main(collective: ThreadCollective) -> None:
        if collective.rank != 1:
            collective.all_reduce(torch.zeros(2)).wait()

    with pytest.raises(RuntimeError, match=r"rank 1 has ended"):
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
        assert group not in join.collectives._of_group
    gone = weakref.ref(group)
    dist.destroy_process_group(group)  # pyright: ignore[reportArgumentType]
    del group
    gc.collect()
    assert gone() is None


def test_a_group_is_not_kept_alive(pool: Pool) -> None:
    pool.run(released, ranks=2)
