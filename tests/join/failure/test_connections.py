"""After a failure, who closes the connections of the group, and who keeps them: others may wait for them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from join import EarlyTerminationError, Join
from join.collectives import ThreadCollective, collective_of, run_threads
from tests.ending import Ending
from tests.join.counter import Counter, Leading
from tests.meeting import tell, wait_for
from tests.shorter import using


def waiting(rank: int, how: str) -> str:
    """Rank 1 fails, and its process goes on; the watches of the others do not act meanwhile."""
    leading, follower, text = Leading(collective_of(None)), Counter(collective_of(None)), "fine"
    with using(abort=1000.0):
        try:
            with Join([leading, follower]):
                if rank == 1 and how == "posts":
                    follower()
                if rank == 1:
                    raise ValueError("mine")
                if rank == 2 and how == "passes on":
                    leading()
                if how == "passes on":
                    dist.recv(torch.ones(1), 2)  # has no connection with rank 1
                dist.all_reduce(torch.ones(1))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        tell()
        wait_for(range(3))
    return text


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "ValueError: mine"),
        ("posts", "JoinError: Counter notified, but the joinable that it follows in the list had announced no burst"),
    ],
)
def test_a_failing_rank_closes_its_connections(ending: Ending, how: str, told: str) -> None:
    zero, one, two = (end.result or "" for end in ending.ends(waiting, how, limit=30))
    assert one.startswith(told)
    for text in (zero, two):
        assert text.startswith(f"PeerError: rank 1 failed: {told}")


def test_a_rank_that_learns_of_a_failure_closes_its_connections(ending: Ending) -> None:
    for rank, end in enumerate(ending.ends(waiting, "passes on", limit=30)):
        assert (end.result or "").startswith("ValueError" if rank == 1 else "PeerError: rank 1 failed"), end.text


def ends(collective: ThreadCollective, raises: bool) -> list[str]:
    """What a block does to its group after an error."""
    done: list[str] = []
    patched: Any = collective
    patched.abort = lambda connections=False: bool(done.append(f"abort {connections}"))
    patched.hold = lambda: done.append("hold")
    counter = Counter(collective)
    with pytest.raises((EarlyTerminationError, ValueError)), Join([counter], throw_on_early_termination=True):
        if raises:
            raise ValueError("mine")
        for _ in range(collective.rank):
            counter()
    return done


def test_early_termination_leaves_the_group_whole() -> None:
    assert run_threads(2, lambda collective: ends(collective, False)) == [[], []]


def test_a_group_that_is_lost_is_never_destroyed() -> None:
    for done in run_threads(2, lambda collective: ends(collective, True)):
        assert done == ["abort True", "hold"]
