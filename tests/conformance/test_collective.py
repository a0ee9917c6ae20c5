"""The suite over every Collective."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from join import Join
from join.collectives import (
    DONE,
    Collective,
    SingleCollective,
    ThreadCollective,
    TorchCollective,
    collective_of,
    run_threads,
)
from join.collectives.base import GroupLine
from join.collectives.board import LocalBoard
from tests.conformance.collective_suite import conforms, fails, operates, times_out
from tests.conformance.own_collective import OverStore
from tests.ending import Ending
from tests.harness import Pool, all_or_each, in_test_all
from tests.join.counter import Counter

RANKS = 3


def test_single() -> None:
    conforms(SingleCollective())
    assert DONE.get_future().done()


def test_a_collective_of_one_rank_goes_to_other_processes() -> None:
    pickle.loads(pickle.dumps(SingleCollective())).barrier()


@pytest.mark.parametrize("ranks", [1, RANKS, pytest.param(16, marks=in_test_all)])
def test_threads(ranks: int) -> None:
    run_threads(ranks, conforms)


def with_gloo(rank: int) -> None:
    assert collective_of(None) is collective_of(dist.group.WORLD)
    conforms(collective_of(None))


def has_one_collective(rank: int) -> None:
    """One group has one collective, whichever way it was reached."""
    assert dist.group.WORLD is not None
    collective, other = TorchCollective(dist.group.WORLD), TorchCollective(dist.group.WORLD)
    assert collective_of(collective) is collective is collective_of(None) is collective_of(other)
    del collective
    assert collective_of(other) is other is collective_of(None)


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
    pool.run(with_gloo, ranks=1)


def test_a_group_has_one_collective(pool: Pool) -> None:
    pool.run(has_one_collective, ranks=1)


def test_group_without_cpu_backend(pool: Pool) -> None:
    pool.run(without_cpu_backend, ranks=RANKS)


def test_a_group_that_was_destroyed(pool: Pool) -> None:
    pool.run(is_asked_about_a_group_that_was_destroyed, ranks=RANKS)


@in_test_all
def test_sub_group(pool: Pool) -> None:
    pool.run(in_sub_group, ranks=4)


# -- a collective of one's own -----------------------------------------------------------------------------------------


def over_store(store: Any, rank: int, world_size: int, check: Callable[[Collective], None]) -> None:
    collective = OverStore(store)
    with pytest.raises(ValueError, match=r"OverStore. that is not set up.*\[J818\]"):
        Join([], process_group=collective)
    with pytest.raises(ValueError, match=r"rank=3, world_size=3.* which is not set up\..*\[J817\]"):
        collective.setup(3, 3)
    before = None
    for _ in range(2):
        collective.setup(rank, world_size)
        assert collective.kept is not before
        before = collective.kept
        check(collective)
        collective.teardown()
        collective.teardown()
        assert not collective.is_open
        if check is not operates:  # the ranks are in different places after a failure
            return
        collective.store = dist.PrefixStore("again", store)


def in_threads(ranks: int, check: Callable[[Collective], None]) -> None:
    store = dist.HashStore()
    run_threads(ranks, lambda thread: over_store(store, thread.rank, ranks, check))


def in_processes(rank: int, check: Callable[[Collective], None]) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    over_store(dist.PrefixStore("own", store), rank, dist.get_world_size(), check)


def over_gloo_in_processes(rank: int, check: Callable[[Collective], None]) -> None:
    check(collective_of(None))


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_own_in_threads(ranks: int) -> None:
    in_threads(ranks, operates)


def test_ranks_of_one_process_share_no_memory() -> None:
    """They would take each other for ended, because the process has the locks."""

    def rank_main(store: Any, rank: int) -> None:
        collective = OverStore(store)
        collective.setup(rank, RANKS)
        assert isinstance(collective.line(), GroupLine)

    store = dist.HashStore()
    run_threads(RANKS, lambda thread: rank_main(store, thread.rank))


@in_test_all
def test_own_in_processes(pool: Pool) -> None:
    pool.run(in_processes, operates, ranks=RANKS)


ENDS = [fails, times_out]


@pytest.mark.parametrize("check", ENDS)
def test_ends_in_threads(check: Callable[[Collective], None]) -> None:
    in_threads(RANKS, check)
    run_threads(RANKS, check)


@pytest.mark.parametrize(("kind", "check"), all_or_each(product([in_processes, over_gloo_in_processes], ENDS)))
def test_ends_in_processes(ending: Ending, kind: Callable[..., None], check: Callable[[Collective], None]) -> None:
    for end in ending.ends(kind, check):
        assert end.code == 0, end.text


def test_a_store_that_one_rank_cannot_reach() -> None:
    """All ranks do without it, and none waits."""
    made = dist.TCPStore

    def unreachable(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "rank 1":
            raise dist.DistNetworkError("no route")
        return made(*args, **options)

    def rank_main(store: Any, rank: int) -> None:
        collective = OverStore(store)
        collective.setup(rank, RANKS)
        assert isinstance(collective.line(), GroupLine)
        assert isinstance(collective.board(), LocalBoard)

    store = dist.HashStore()
    with mock.patch.object(dist, "TCPStore", unreachable):
        run_threads(RANKS, lambda thread: rank_main(store, thread.rank))


def test_operations_of_a_companion_of_threads_do_not_mix() -> None:
    def rank_main(collective: Collective) -> None:
        tensors = [(collective, torch.ones(1)), (collective.companion(), torch.ones(2))]
        works = [each.all_reduce(tensor) for each, tensor in (tensors if collective.rank else tensors[::-1])]
        assert all(work.wait() for work in works) and [tensor.tolist() for _, tensor in tensors] == [[2.0], [2.0, 2.0]]

    run_threads(2, rank_main, timeout=5.0)


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
        # It is counted on, though the collective was made anew.
        assert collective_of(group).kept.watch.block.number == expected
        deadline = time.monotonic() + 10  # the watch may just be reading the progress of the block
        while group in join.collectives._of_group and time.monotonic() < deadline:
            gc.collect()
        assert group not in join.collectives._of_group
    gone = weakref.ref(group)
    dist.destroy_process_group(group)  # pyright: ignore[reportArgumentType]
    del group
    gc.collect()
    assert gone() is None


def test_a_group_is_not_kept_alive(pool: Pool) -> None:
    pool.run(released, ranks=2)
