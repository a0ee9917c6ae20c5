"""The suite over every Line, and what only the one through shared memory has to do."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from join import Join
from join.collectives import Collective, Line, SingleCollective, collective_of, run_threads
from join.collectives import shared_memory as memory
from join.collectives.base import GroupLine
from join.collectives.broken import BrokenCollective
from join.collectives.shared_memory import SharedMemoryLine
from tests.ending import Ending
from tests.harness import Pool
from tests.join.counter import Counter
from tests.meeting import tell, wait_for

RANKS = 3


def sums_in_order(collective: Collective, line: Line) -> None:
    rank, size = collective.rank, collective.world_size
    for step in range(20):
        work = line.sum(rank << 20 | step, 30)
        work.wait()
        assert work.total() == (sum(range(size)) << 20) + size * step


def sums_of_any_length(collective: Collective, line: Line) -> None:
    """Also where there is something to carry at every place."""
    rank, size = collective.rank, collective.world_size
    for bits in (1, 31, 32, 33, 62, 63, 64, 65, 500, 2559, 2560, 2561, 5000):
        largest = ((1 << bits) - 1) // size
        work = line.sum(largest - (rank if bits > 20 else 0), bits)
        work.wait()
        assert work.total() == size * largest - (sum(range(size)) if bits > 20 else 0)
        assert work.nbytes * 8 >= bits or size == 1


def sums_of_large_numbers(collective: Collective, line: Line) -> None:
    """Each rank fills bits of its own, as roll calls do."""
    rank, size = collective.rank, collective.world_size
    for bits in (1, 3, 40):
        work = line.sum((1 << bits) - 1 << bits * rank, bits * size)
        work.wait()
        assert work.total() == (1 << bits * size) - 1


def starts_without_waiting(collective: Collective, line: Line) -> None:
    rank, size = collective.rank, collective.world_size
    if rank == size - 1:
        collective.barrier()  # the others come to it with a sum under way
    work = line.sum(1, 5)
    if rank < size - 1:
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="imed out"):
            work.wait(timedelta(seconds=0.05))
        collective.barrier()
    work.wait()
    work.wait()
    assert work.is_completed() and work.total() == size


def sums_of_floats(collective: Collective, line: Line) -> None:
    rank, size = collective.rank, collective.world_size
    for number in (0.0, 1.0, -0.1, 1e300, 5e-324, float("inf")):
        work = line.sum_float(number * (rank + 1))
        work.wait()
        mine = work.total()
        assert mine == pytest.approx(number * size * (size + 1) / 2)
        assert set(collective.all_gather_object(mine)) == {mine}  # to the bit
        whole = line.sum(1, 9)
        whole.wait()
        assert whole.total() == size


def one_operation_may_be_read_late(collective: Collective, line: Line) -> None:
    rank, size = collective.rank, collective.world_size
    for later in (1, 2, 3, 4, 5, 9):
        late = line.sum(rank + 1, 9)
        for step in range(later):
            if rank == (step + later) % size:
                time.sleep(0.002)  # the others are as far ahead as they may be
            work = line.sum(step, 9)
            work.wait()
            assert work.total() == size * step
        late.wait()
        assert late.total() == size * (size + 1) // 2


def long_sums_do_not_mix_with_the_group(collective: Collective, line: Line) -> None:
    ones = torch.ones(1)
    if collective.rank == 0:
        work, other = line.sum(1 << 2600, 2700), collective.all_reduce(ones)
    else:
        other, work = collective.all_reduce(ones), line.sum(1 << 2600, 2700)
    work.wait()
    other.wait()
    assert work.total() == collective.world_size << 2600
    assert ones.item() == collective.world_size


def sums_do_not_mix_with_the_group(collective: Collective, line: Line) -> None:
    ones = torch.ones(3)
    if collective.rank == 0:
        work, other = line.sum(1, 9), collective.all_reduce(ones)
    else:
        other, work = collective.all_reduce(ones), line.sum(1, 9)
    work.wait()
    other.wait()
    assert work.total() == ones[0].item() == collective.world_size


def bytes_are_gathered(collective: Collective, line: Line) -> None:
    rank, size = collective.rank, collective.world_size
    for length in (1, 4, 273, 1000):  # the last does not fit into shared memory
        rows = [bytes((each + at) % 256 for at in range(length)) for each in range(size)]
        work = line.gather(rows[rank])
        work.wait()
        assert work.is_completed()
        assert work.total() == rows
        total = line.sum(1, 9)
        total.wait()
        assert total.total() == size


CHECKS: list[Callable[[Collective, Line], None]] = [
    sums_in_order,
    sums_of_floats,
    sums_of_any_length,
    sums_of_large_numbers,
    one_operation_may_be_read_late,
    long_sums_do_not_mix_with_the_group,
    sums_do_not_mix_with_the_group,
    bytes_are_gathered,
]


def conforms(collective: Collective) -> None:
    line = collective.line()
    for check in CHECKS:
        check(collective, line)
    if collective.world_size > 1:
        starts_without_waiting(collective, line)


def over_gloo(rank: int, kind: type[Line]) -> None:
    collective = collective_of(None)
    assert isinstance(collective.line(), kind)
    conforms(collective)


def test_single() -> None:
    conforms(SingleCollective())


@pytest.mark.parametrize("ranks", [2, 16])
def test_threads(ranks: int) -> None:
    run_threads(ranks, conforms)


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_gloo(pool: Pool, ranks: int, over_group: bool) -> None:
    kind = GroupLine if over_group else SharedMemoryLine
    pool.run(over_gloo, kind, ranks=ranks, over_group=over_group)


# -- without pickles ---------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.putenv, ("EVIL", "1")


def pickles(rank: int) -> None:
    """Rank 1 sends a pickle, as an earlier version did; nothing unpickles it."""
    collective: Collective = collective_of(None)
    if rank == 1:
        with pytest.raises(pickle.UnpicklingError):
            collective.all_gather_object(Evil())
    else:
        with mock.patch.object(pickle, "loads", side_effect=AssertionError), pytest.raises(RuntimeError, match="J571"):
            collective.all_gather_object([1], plain=True)


def test_a_pickle_is_not_read(pool: Pool) -> None:
    pool.run(pickles, ranks=2)


def done(work: Any) -> Any:
    work.wait()
    return work


def sends_all_kinds(rank: int) -> None:
    collective: Collective = collective_of(None)
    with mock.patch.multiple(pickle, loads=mock.Mock(side_effect=AssertionError), dumps=mock.DEFAULT):
        line = collective.line()
        assert done(line.sum(1, 5)).total() == 3
        assert done(line.sum_float(0.1 * rank)).total() == pytest.approx(0.3)
        assert done(line.gather(b"%d" % rank)).total() == [b"0", b"1", b"2"]


@pytest.mark.parametrize("over_group", [False, True])
def test_lines_need_no_pickle(pool: Pool, over_group: bool) -> None:
    pool.run(sends_all_kinds, ranks=3, over_group=over_group)


# -- through shared memory ---------------------------------------------------------------------------------------------


def one_cannot(rank: int, how: str, which: int) -> None:
    collective, broken = collective_of(None), rank == which

    def full(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    faults: dict[str, Any] = {
        "no /proc": mock.patch.object(memory, "_here", full),
        "no name": mock.patch.object(os, "readlink", full),
        "no file": mock.patch.object(os, "open", full),
        "no lock": mock.patch.object(memory.fcntl, "lockf", full),
        "no memory": mock.patch.object(os, "memfd_create", full),
        "switched off": mock.patch.dict(os.environ, {memory.SWITCH: "0"}),
        "other processor": mock.patch.object(memory.platform, "machine", mock.Mock(return_value="aarch64")),
        "another machine": mock.patch.object(memory, "_here", mock.Mock(return_value="another")),
        "no room": mock.patch.object(os, "posix_fallocate", full),
        "no address space": mock.patch.object(memory.mmap, "mmap", full),
    }
    before = memory_files()
    if broken:
        with faults[how]:
            line = collective.line()
    else:
        line = collective.line()
    assert isinstance(line, GroupLine)
    assert memory_files() == before
    sums_in_order(collective, line)


def open_files() -> list[str]:
    return [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]


def memory_files() -> dict[str, str]:
    """The shared memory that is open: its name, and a path to it."""
    gc.collect()  # what a test before has left must not go between two looks
    found = {os.path.realpath(each): each for each in open_files()}
    return {name: path for name, path in found.items() if "join-" in name}


def has_no_name(rank: int) -> None:
    """So nothing is left of it, whenever a process ends."""
    before = memory_files()
    collective_of(None).line()
    dist.barrier()
    assert not [name for name in os.listdir("/dev/shm") if "join" in name]
    ((name, path),) = memory_files().items() - before.items()
    assert name.startswith("/memfd:join-")
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_the_memory_has_no_name(pool: Pool) -> None:
    pool.run(has_no_name, ranks=2)


ON_ANY_RANK = ["switched off", "other processor", "another machine", "no address space", "no /proc", "no lock"]


@pytest.mark.parametrize(
    ("how", "which"),
    [
        *((how, which) for how in ON_ANY_RANK for which in (0, 1)),
        *(("no room", 0), ("no memory", 0), ("no file", 1), ("no name", 1)),
    ],
)
def test_all_ranks_use_the_group_if_a_call_fails_on_one(pool: Pool, how: str, which: int) -> None:
    """Each call that opens the memory fails once, on a rank that creates it or on one that opens it."""
    pool.run(one_cannot, how, which, ranks=RANKS)


def in_sub_groups(rank: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    collective = collective_of(groups[rank % 2])
    for _ in range(2):
        with Join([counter := Counter(collective)]):
            for _ in range(rank):
                counter()
        assert counter.total == sum(each for each in range(4) if each % 2 == rank % 2)


def test_sub_groups(pool: Pool) -> None:
    pool.run(in_sub_groups, ranks=4)


def killed(rank: int) -> str:
    line = collective_of(None).line()
    sums_in_order(collective_of(None), line)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(BrokenCollective) as caught:
        line.sum(1, 5).wait()
    assert caught.value.ranks == (1,)
    assert 1 in collective_of(None).board().ended()  # the other one may have ended since
    return str(caught.value)


def test_a_killed_rank_is_missed(ending: Ending) -> None:
    first, second, third = ending.ends(killed, ranks=RANKS)
    assert first.result == third.result == "the process of rank 1 has ended, or has left the group", first.text
    assert second.code == -signal.SIGKILL


def killed_behind_one_that_is_stuck(rank: int) -> tuple[int, ...]:
    collective: Any = collective_of(None)
    line = collective.line()
    sums_in_order(collective, line)
    if rank == 1:
        wait_for([0])  # it is in something else, for as long as it takes
        return ()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(BrokenCollective) as caught:
        line.sum(1, 5).wait(timedelta(seconds=20))
    tell()
    return caught.value.ranks


def test_a_killed_rank_is_missed_behind_one_that_is_stuck(ending: Ending) -> None:
    first, *_ = ending.ends(killed_behind_one_that_is_stuck, ranks=RANKS)
    assert first.result == (2,), first.text


def looks_in_turn(rank: int) -> list[int]:
    """Rank 2 ends, and the others look for it one after the other."""
    board, ended = collective_of(None).line() and collective_of(None).board(), list[int]()
    if rank == 2:
        os._exit(0)
    if rank == 1:
        wait_for([0])
    while not ended:
        ended = board.ended()
        time.sleep(0.01)
    tell()
    wait_for([0, 1])
    return ended


def test_each_rank_sees_that_a_process_has_ended(ending: Ending) -> None:
    """Whoever has looked for it holds no lock in its place."""
    first, second, _ = ending.ends(looks_in_turn, limit=20)
    assert first.result == second.result == [2]


def late_and_gone(rank: int) -> None:
    """Another process holds no lock; and a number that was given counts, whatever became of who gave it."""
    collective = collective_of(None)
    line = collective.line()
    assert collective.board().ended() == []
    time.sleep(0.6 * rank)
    work = line.sum(5, 9)
    work.wait()  # longer than a look at whether the other is alive
    assert work.total() == 10
    collective.barrier()
    if rank == 0:  # goes on alone, as after an error; it may do so a few times before others read the first
        for _ in range(6):
            line.sum(1, 5)
    collective.barrier()
    if rank == 1:
        with pytest.raises(BrokenCollective, match="rank 0 has continued without this rank 1"):
            line.sum(1, 5).wait()


def test_ranks_that_are_late_or_went_on(pool: Pool) -> None:
    pool.run(late_and_gone, ranks=2)


def counts_begin_anew(rank: int) -> None:
    """Where a count's bits are all 0 again, one more than a cell is another answer."""
    collective = collective_of(None)
    line: Any = collective.line()
    line._lane.count = memory.LOW - 3 - memory.PLACES
    for _ in range(memory.PLACES):
        line.sum(0, 1)
    collective.barrier()
    for call in range(8):
        expected = [b"4", b"5" if call > 2 else b"4"]
        assert done(line.gather(expected[rank])).total() == expected


def test_counts_that_begin_anew(pool: Pool) -> None:
    pool.run(counts_begin_anew, ranks=2)


def impatient(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    line = collective_of(group).line()
    if rank == 0:
        with pytest.raises(BrokenCollective, match=r"timed out after 1 s: rank 1 did not arrive"):
            line.sum(1, 5).wait()
        work = line.sum(1, 5)
        for _ in range(200):  # as whoever looks at notes meanwhile
            with pytest.raises(RuntimeError) as caught:
                work.wait(timedelta(seconds=0.02))
            if isinstance(caught.value, BrokenCollective):
                break
        else:
            pytest.fail("each wait has begun the limit again")
    dist.barrier()


def test_the_timeout_is_that_of_the_group(pool: Pool) -> None:
    pool.run(impatient, ranks=2)


def freed(rank: int) -> None:
    collective_of(None).line()  # whatever is opened once
    before, named_before = len(open_files()), memory_files().keys()
    group = dist.new_group()
    collective_of(group).line()
    dist.barrier()
    (new,) = memory_files().keys() - named_before
    dist.destroy_process_group(group)  # pyright: ignore[reportArgumentType]
    del group
    gc.collect()
    deadline = time.monotonic() + 10  # gloo closes its connections in a thread
    while len(open_files()) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(open_files()) <= before and new not in memory_files()


def test_memory_is_freed_with_the_group(pool: Pool) -> None:
    pool.run(freed, ranks=2)
