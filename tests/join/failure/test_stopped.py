"""A rank that is stopped while ranks enter or leave a block: the others wait for it as long as ``timeout`` says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import join.block
from join import Join
from join.collectives import TorchCollective, base
from join.protocol.channel import Lockstep
from tests.ending import Ending, Running
from tests.harness import cases_that_run, in_test_all
from tests.meeting import store_file
from tests.shorter import using
from tests.training import batch, build

PLACES: dict[str, tuple[Any, str]] = {
    "memory": (base, "opened"),
    "connections": (TorchCollective, "companion"),
    "copy": (join.block, "copy_state"),
    "break": (Lockstep, "agree_to_leave"),
}
NEVER = 1e9  # seconds


def arriving(rank: int, place: str, timeout: float | None, seconds: float, silent: float = 30.0) -> str:
    """Run an uneven block; rank 1 comes late to a place by some seconds, or never."""
    (owner, name), text = PLACES[place], "fine"
    then: Any = getattr(owner, name)
    folder = store_file().parent  # ranks meet there, since rank 1 may hold the lock of the store
    if rank == 1:
        (folder / "pid-1").write_text(str(os.getpid()))

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(seconds) if seconds < NEVER else os.kill(os.getpid(), signal.SIGSTOP)
        return then(*args, **options)

    with pytest.MonkeyPatch.context() as patch, using(silent=silent, note=0.5):
        if rank == 1:
            patch.setattr(owner, name, late)
        module = DistributedDataParallel(build("mlp"))
        dist.barrier()  # a busy machine may take long until here
        try:
            with Join([module], timeout=timeout) as block:
                batches = [batch(rank, 0, step)[0] for step in range((2, 1, 0)[rank])]
                for x in block.iterate(batches) if place == "break" else batches:
                    module(x).sum().backward()
                    if place == "break":
                        break
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    if seconds == NEVER:
        (folder / f"through-{rank}").touch()
        while rank == 0 and not (folder / "through-2").exists():
            time.sleep(0.02)
        if rank == 0:
            os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
    return text


Stop = tuple[str, bool, float | None]
STOPS: list[Stop] = [("memory", False, 2.0), ("connections", True, 2.0), ("copy", False, 2.0), ("copy", True, 2.0)]
STOPS += [("memory", False, None), ("connections", True, None), ("break", False, None)]
SLOW: dict[Stop, float] = {("copy", False, 5.0): 6.0, ("copy", True, 5.0): 6.0}
"""Copies that take longer than the timeout, in seconds."""


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, ending: Ending) -> Iterator[dict[Stop, Running]]:
    """All at once: most of what they do is to wait."""
    running = dict[Stop, Running]()
    for stop in cases_that_run(request, "stop"):
        (place, over_group, timeout), seconds = stop, SLOW.get(stop, NEVER)
        how = (timeout, seconds, 2.0 if seconds == NEVER else 30.0)
        running[stop] = ending.start(arriving, place, *how, over_group=over_group, tidies=False, limit=40)
    yield running
    for each in running.values():  # whose tests run elsewhere
        each.ends()


@in_test_all
@pytest.mark.parametrize("stop", STOPS)
def test_a_stopped_rank_is_named(started: dict[Stop, Running], stop: Stop) -> None:
    ends = started.pop(stop).ends()
    told = "PeerError: rank 1 is gone" if stop[2] is None else "JoinTimeoutError: "
    for rank in (0, 2):
        assert (ends[rank].result or "").startswith(told), ends[rank].result or ends[rank].text
        assert stop[2] is None or "Ranks [1] announced no collective within timeout=2 s" in ends[rank].result


@pytest.mark.parametrize("stop", SLOW)
def test_a_copy_may_take_longer(started: dict[Stop, Running], stop: Stop) -> None:
    assert [end.result for end in started.pop(stop).ends()] == ["fine"] * 3
