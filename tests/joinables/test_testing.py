"""``joinables.testing``: what a rank returns or raises comes home, nothing stays behind, and faults are found."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinTimeoutError
from join.collectives._torch_private import timeout_of
from joinables.testing import NotExact, RankFailed, assert_equals_one_process, concatenated, run_ranks, uneven
from tests.ending import Ending
from tests.harness import in_test_all
from tests.training import BATCH, FEATURES, TARGETS, build

run: Any = partial(run_ranks, start_method="forkserver")
check: Any = partial(assert_equals_one_process, start_method="forkserver")
pytestmark = pytest.mark.usefixtures("server")


def total(rank: int, samples: list[int]) -> int:
    count = torch.tensor(samples[rank])
    dist.all_reduce(count)
    return int(count)


def test_results_by_rank() -> None:
    assert run(total, 3, [5, 0, 2]) == [7, 7, 7]


def closure(rank: int) -> list[int]:
    return run_ranks(lambda rank: rank + total(rank, [1, 2]), 2, start_method="fork")


def test_forked_ranks_need_no_file(ending: Ending) -> None:
    assert ending.run(closure, ranks=1, group=False) == [[3, 4]]
    with pytest.raises(TypeError, match=r"cannot send .*<lambda>.*start_method='fork'\. \[J670\]"):
        run_ranks(lambda rank: rank, 2)


def raises(rank: int) -> None:
    with Join([], process_group=None) as join:
        for batch in join.iterate(range(3)):
            if rank == 1 and batch:
                raise ValueError("sample 7 is broken")


def raises_on_a_dummy(rank: int) -> None:
    with Join([], process_group=None) as join:
        for _ in join.iterate([torch.ones(1)] * (rank != 1)):
            if rank == 1:
                raise ValueError("no rows\nat all")  # Join adds a note about dummies


def dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exits(rank: int) -> None:
    if rank == 1:
        sys.exit(0)
    dist.barrier()


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (raises, "ValueError: sample 7 is broken"),
        (raises_on_a_dummy, "ValueError: no rows"),
        (dies, "it was killed by SIGKILL"),
        (exits, "it exited with code 0"),
    ],
)
def test_the_rank_that_failed_first_is_blamed(fn: Callable[[int], None], told: str) -> None:
    with pytest.raises(RankFailed, match=rf"^Ranks \[1\] failed: {told}\. Read") as caught:
        run(fn, 3)
    assert "-- rank 0" not in str(caught.value)


def hangs(rank: int) -> None:
    dist.barrier()  # or the others may still be connecting when rank 2 leaves
    if rank == 2:
        raise JoinTimeoutError("rank 1 is late")  # the rank waits for the cause before it ends
    while rank == 1:
        time.sleep(1)


def sleeps(rank: int) -> None:
    time.sleep(100)


@in_test_all
def test_ranks_that_hang_show_where(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"^Ranks \[2, 0, 1\] failed: .*rank 1 is late\. Read") as caught:
        run(hangs, 3, timeout=30)
    third, first, second = (text.partition("-- ")[0].rstrip() for text in str(caught.value).split("-- rank ")[1:])
    assert " in hangs" not in first and second.endswith(" in hangs") and "JoinTimeoutError: rank 1 is late" in third
    with pytest.raises(
        RankFailed, match=r"^Ranks \[0\] failed: it did not return in time\..*\[J671\]\n\n-- rank 0"
    ) as caught:
        run(sleeps, 1, timeout=1)
    assert str(caught.value).endswith(" in sleeps")


def limit_of_the_group(rank: int) -> float:
    return timeout_of(cast("Any", dist.group.WORLD)).total_seconds()


def test_a_rank_that_waits_is_still_there_at_the_limit() -> None:
    """If its operation timed out at the same time, its stack would be lost."""
    assert run(limit_of_the_group, 1, timeout=50) >= [60]


def leaves_a_process(rank: int, folder: Path) -> None:
    with (folder / str(rank)).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        subprocess.Popen(["sleep", "1000"], pass_fds=[file.fileno()])


def test_no_process_stays(tmp_path: Path) -> None:
    run(leaves_a_process, 2, tmp_path)
    for rank in range(2):
        with (tmp_path / str(rank)).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # it would wait for a process that holds the lock


def forks(rank: int) -> list[int]:
    if not os.fork():
        time.sleep(60)
    codes: list[int] = []
    for raises in (False, True):
        if not (pid := os.fork()):
            signal.alarm(30)
            if raises:
                raise OSError("in the fork")
            return []
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


def forking(rank: int) -> tuple[list[list[int]], float]:
    started = time.monotonic()
    return run_ranks(forks, 2, start_method="fork", timeout=None), time.monotonic() - started


def test_forks_of_ranks_are_not_ranks(ending: Ending) -> None:
    ((codes, seconds),) = ending.run(forking, ranks=1, group=False)
    assert (codes, seconds < 30) == ([[0, 1], [0, 1]], True)


def test_batches_are_distributed_in_the_order_of_steps() -> None:
    assert uneven("abcdef", (3, 0, 2, 1)) == [["a", "d", "f"], [], ["b", "e"], ["c"]]
    for counts in (3, 2), (7, -1), ():
        with pytest.raises(ValueError, match=r"do not distribute 6 batches.*\[J672\]"):
            uneven("abcdef", counts)


def test_batches_are_concatenated() -> None:
    one, other = ({"x": [torch.full((n, 2), n)], "task": "a"} for n in (1, 2))
    assert concatenated([one, other])["x"][0].tolist() == [[1, 1], [2, 2], [2, 2]]
    for wrong in (one | {"task": "b"}), (one | {"x": [torch.tensor(1)]}):
        with pytest.raises((ValueError, RuntimeError)):
            concatenated([one, wrong])


BATCHES = [(torch.randn(BATCH, FEATURES), torch.randn(BATCH, TARGETS)) for _ in range(8)]


def train(loader: list[Any], rank: int, world_size: int, *, correct: bool, keep: bool) -> Iterator[Any]:
    model = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Join([model, optimizer], divide_by_initial_world_size=not correct):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if keep:
                yield model.module.state_dict()
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(("keep", "told"), [(True, "rank 0 after step 1"), (False, "rank 0 at the end")])
def test_an_exact_loop_passes_and_another_one_does_not(keep: bool, told: str) -> None:
    check(partial(train, correct=True, keep=keep), BATCHES, [(3, 0, 5)])
    with pytest.raises(NotExact, match=rf"\[3, 0, 5\] batches .*: {told}\..*\[J675\]") as caught:
        check(partial(train, correct=False, keep=keep), BATCHES, [(3, 0, 5)])
    assert "0.bias']" in str(caught.value)


def nothing(loader: list[Any], rank: int, world_size: int) -> None:
    pass


def yields(loader: list[Any], rank: int, world_size: int) -> Iterator[Any]:
    yield torch.ones(1)


def a_text(loader: list[Any], rank: int, world_size: int) -> Any:
    return {"name": "a"}


@pytest.mark.parametrize("train", [nothing, yields, a_text])
def test_a_training_that_ends_with_nothing_is_not_exact(train: Any) -> None:
    with pytest.raises(ValueError, match=r"no tensor or number.*\[J674\]"):
        check(train, BATCHES, [(8, 0)])


def yields_more(loader: list[Any], rank: int, world_size: int) -> Iterator[Any]:
    yield from [torch.ones(1)] * world_size
    return torch.full((1,), world_size)


def test_ends_are_compared_after_unlike_numbers_of_steps() -> None:
    with pytest.raises(NotExact, match="rank 0 at the end"):
        check(yields_more, BATCHES, [(8, 0)])


@dataclass
class Result:
    value: Any
    loss: float = 0.0


def returns(loader: list[Any], rank: int, world_size: int, alone: Any, else_: Any) -> Any:
    return {"results": [Result(alone if world_size == 1 else else_)]}


def test_values_of_many_types_are_equal() -> None:
    alone = [numpy.zeros(2, dtype=numpy.int32), numpy.float32(1), {3, "a"}, Counter([7]), "a", None]
    else_ = [numpy.zeros(2)[::-1], 1.0, frozenset(["a", 3]), {7: 1}, "a", None]
    check(partial(returns, alone=alone, else_=else_), BATCHES, [(8, 0)])


@pytest.mark.parametrize("values", [(numpy.zeros(2), numpy.ones(2)), ("1", "3"), ({1}, {3}), (1, "1")], ids=repr)
def test_values_of_many_types_differ(values: Any) -> None:
    with pytest.raises(NotExact, match=r"(?s)rank 0 at the end.*\['results'\]\[0\]\['value'\]"):
        check(partial(returns, alone=values[0], else_=values[1]), BATCHES, [(8, 0)])


@pytest.mark.parametrize("value", [numpy.array(["a"]), torch.nn.Linear(1, 1)], ids=["texts", "module"])
def test_a_value_that_cannot_be_compared_is_named(value: Any) -> None:
    told = rf"result\['results'\]\[0\]\['value'\] is of type {type(value).__name__}, .*\[J736\]"
    with pytest.raises(RankFailed, match=told):
        check(partial(returns, alone=value, else_=value), BATCHES, [(8, 0)])


@pytest.mark.parametrize("counts", [[], (3, 0, 5)])
def test_counts_that_are_no_runs(counts: Any) -> None:
    with pytest.raises(ValueError, match=r"^counts=.*counts=\[\(3, 0, 5\)\].*\[J737\]"):
        check(nothing, BATCHES, counts)
