"""One of many ranks fails: all others end within ten seconds, with that as the cause."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join, PeerError
from join.collectives import ThreadCollective, run_threads
from tests.ending import Ending, say
from tests.harness import assert_soon, at_night, in_quiet
from tests.join.counter import Counter
from tests.training import batch, build

THREADS, PROCESSES = 64, 32
FAILS, AT = 5, 3
SECONDS = 10.0


def count(collective: ThreadCollective, iterates: bool) -> tuple[str, float]:
    """Train on as many batches as the rank's number; one rank raises."""
    counter, rank = Counter(collective), collective.rank
    try:
        with Join([counter]) as join:
            for step, _ in enumerate(join.iterate([0] * rank) if iterates else range(rank)):
                if (rank, step) == (FAILS, AT):
                    raise ValueError("mine")
                counter()
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic()
    return "fine", time.monotonic()


@in_quiet
@pytest.mark.parametrize("iterates", [False, True])
def test_threads(iterates: bool) -> None:
    ends = run_threads(THREADS, lambda collective: count(collective, iterates))
    own, failed_at = ends[FAILS]
    assert own == "ValueError: mine"
    for text, ended_at in ends[:FAILS] + ends[FAILS + 1 :]:
        assert text.startswith(f"PeerError: rank {FAILS} failed: ValueError: mine")
        assert_soon(ended_at - failed_at, SECONDS)


def train(rank: int, how: str, iterates: bool) -> None:
    try:
        train_until_it_fails(rank, how, iterates)
    except PeerError:
        say("told", time.time())  # for all of these processes to end takes seconds more
        raise


def train_until_it_fails(rank: int, how: str, iterates: bool) -> None:
    model = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = [batch(rank, 0, step) for step in range(AT + 2 if rank % 4 else 0)]
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        for step, (x, y) in enumerate(join.iterate(mine) if iterates else mine):
            if (rank, step) == (FAILS, AT):
                say("failed", time.time())
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("mine")
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()


@at_night
@in_quiet
@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize(("how", "iterates"), [("killed", False), ("raises", False), ("killed", True)])
def test_processes(ending: Ending, how: str, iterates: bool, over_group: bool) -> None:
    ends = ending.ends(train, how, iterates, ranks=PROCESSES, over_group=over_group, limit=200)
    cause = f"PeerError: rank {FAILS} " + ("is gone" if how == "killed" else "failed: ValueError: mine")
    failed_at = float(ends[FAILS].said("failed") or 0)
    for rank, end in enumerate(ends):
        if rank != FAILS:
            assert end.code == 1 and end.error.startswith(cause), end.text
            assert_soon(float(end.said("told") or 0) - failed_at, SECONDS, end.text)
