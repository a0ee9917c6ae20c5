"""A rank that can have no more threads or files when the first block opens: all ranks do without, or get an error."""

from __future__ import annotations

import os
import resource
import threading

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.ending import End, Ending
from tests.harness import in_test_all
from tests.training import TOLERANCE, batch, build, mlp_in_one_process

COUNTS, LACKS = (3, 2, 0), 1  # batches by rank, and which rank lacks something


def take_threads(name: str) -> None:
    """Start no thread any more whose name begins so."""
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(self)

    threading.Thread.start = limited


def training(rank: int, lacks: str, spare: int) -> list[torch.Tensor] | str:
    """The parameters or the error."""
    ddp = DistributedDataParallel(build("mlp"))
    optimizer, found = torch.optim.Adam(ddp.parameters(), lr=1e-3), "fine"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == LACKS and lacks == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + spare, hard))
    elif rank == LACKS:
        take_threads(lacks)
    try:
        with Join([ddp, optimizer], divide_by_initial_world_size=False):
            for step in range(COUNTS[rank]):
                x, y = batch(rank, 0, step)
                optimizer.zero_grad()
                ((ddp(x) - y) ** 2).mean().backward()
                optimizer.step()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    parameters = [parameter.detach() for parameter in ddp.module.parameters()]
    return parameters if found == "fine" else found


def are_exact(ends: list[End]) -> bool:
    """Whether the ranks have trained exactly; all of them, or all have an error."""
    texts = "\n".join(f"-- rank {rank}: {end.code} {end.result}\n{end.text}" for rank, end in enumerate(ends))
    assert [end.code for end in ends] == [0] * len(ends), texts
    results = [end.result for end in ends]
    if all(isinstance(result, str) for result in results):
        assert all("rank 1 " in result for rank, result in enumerate(results) if rank != LACKS), texts
        return False
    assert not any(isinstance(result, str) for result in results), texts
    for result in results:
        torch.testing.assert_close(result, mlp_in_one_process(COUNTS), atol=TOLERANCE, rtol=0)
    return True


@pytest.mark.parametrize("over_group", [False, True])
def test_without_a_thread_that_watches_the_log_says_so(ending: Ending, over_group: bool) -> None:
    ends = ending.ends(training, "join watch", 0, over_group=over_group, tidies=False, limit=25)
    assert are_exact(ends) and "rank 1 cannot watch the other ranks" in ends[LACKS].stderr


def failing(rank: int) -> str:
    """Rank 1 fails without any thread, and its process lives on until the others have ended."""
    if rank == LACKS:
        take_threads("join")
    try:
        with Join([], process_group=None) as join:
            for step, _ in enumerate(join.iterate(range(3))):
                if (rank, step) == (LACKS, 1):
                    raise ValueError("mine")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("over_group", [False, True])
def test_a_failure_is_told_without_any_thread(ending: Ending, over_group: bool) -> None:
    first, second, third = ending.run(failing, over_group=over_group, limit=40)
    assert second == "ValueError: mine"
    assert first.startswith("PeerError: rank 1 failed: ValueError: mine") and third.startswith("PeerError: rank 1 ")


@pytest.mark.parametrize("over_group", [False, pytest.param(True, marks=in_test_all)])
def test_too_few_files(ending: Ending, over_group: bool) -> None:
    how = {"over_group": over_group, "tidies": False, "limit": 40}
    started = [ending.start(training, "files", spare, **how) for spare in (0, 3, 30)]
    exact = [are_exact(running.ends()) for running in started]
    assert exact[-1], exact
