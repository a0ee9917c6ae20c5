"""A rank fails on an accelerator: it shows its own exception, and all others end soon, with that as the cause.

With NCCL no rank is told that a peer is gone. The device hangs in a collective. A rank that reads a value then waits
until the communicator is aborted, or until a watchdog aborts the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join
from tests.accelerator import simulated
from tests.accelerator.target import Target, device_of_rank, prepare_simulated
from tests.ending import End, Ending, Running, say
from tests.harness import assert_soon, in_quiet
from tests.shorter import using
from tests.training import batch, build

SECONDS = 10.0  # that the others may take
STALL = 1.0
AT_ONCE = 5
COUNTS = 6, 6, 2
FAILS, FAILS_AT = 1, 3
JOINED = 2
STOPPED = SECONDS + 5  # seconds, until a rank that was stopped is killed


@dataclass(frozen=True)
class Cell:
    """One way to fail."""

    loop: str
    how: str
    where: str
    reads: bool  # each rank reads its loss at each step
    over_group: bool = False  # headers go over a group, as between machines
    cpu: bool = False  # the group has a backend for the CPU, too

    @property
    def victim(self) -> int:
        """The rank that fails."""
        return JOINED if self.where == "joined" else FAILS

    @override
    def __str__(self) -> str:
        more = {", reads losses": self.reads, ", over a group": self.over_group, ", CPU backend": self.cpu}
        return f"{self.loop}, {self.how} in the {self.where}" + "".join(name for name, holds in more.items() if holds)


CELLS = [
    Cell(*each) for each in product(["plain", "iterate"], ["raises", "killed"], ["forward", "backward"], [False, True])
]
CELLS += [
    Cell("plain", "killed", "backward", reads=True, over_group=True),
    Cell("iterate", "killed", "forward", reads=True, over_group=True),
    Cell("iterate", "raises", "backward", reads=True, over_group=True),
    Cell("plain", "stopped", "backward", reads=True, over_group=True),
    Cell("iterate", "stopped", "forward", reads=False, over_group=True),
    Cell("plain", "killed", "joined", reads=False),
    Cell("plain", "killed", "joined", reads=True, over_group=True),
    Cell("plain", "killed", "backward", reads=True, cpu=True),
    Cell("plain", "raises", "forward", reads=False, over_group=True, cpu=True),
    Cell("iterate", "killed", "forward", reads=True, over_group=True, cpu=True),
    Cell("iterate", "killed", "joined", reads=True, cpu=True),
    Cell("iterate", "stopped", "backward", reads=True, over_group=True, cpu=True),
]


def fail(cell: Cell) -> None:
    say("failed", time.time())
    if cell.how == "killed":
        if cell.over_group:
            time.sleep(1.0)  # until its watch has said once that it lives: without that, it may be about to enter
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.how == "stopped":
        subprocess.Popen(["sh", "-c", f"sleep {STOPPED}; kill -9 {os.getpid()}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("mine")


def train(rank: int, target: Target, cell: Cell) -> None:
    with using(beat=0.5, silent=2.0):  # seconds, after which a rank is taken to be gone that does not say that it lives
        _train(rank, target, cell)


def _train(rank: int, target: Target, cell: Cell) -> None:
    device = device_of_rank(target)
    model = DistributedDataParallel(build("mlp").to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = [tuple(part.to(device) for part in batch(rank, 0, step)) for step in range(COUNTS[rank])]
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        if cell.where == "joined" and rank == JOINED:
            threading.Timer(1.0, fail, [cell]).start()
        for step, (x, y) in enumerate(join.iterate(mine) if cell.loop == "iterate" else mine):
            if cell.where == "joined":
                time.sleep(0.5)
            fails = rank == cell.victim and step == FAILS_AT
            if step == FAILS_AT - 1 and target.is_simulated:
                simulated.configure(stall=STALL, watchdog=2 * SECONDS)  # only now: until then, ranks may come late
            optimizer.zero_grad()
            if fails and cell.where == "forward":
                fail(cell)
            loss = (model(x) - y).square().mean()
            if fails and cell.where == "backward":
                model.module[0].weight.register_hook(lambda gradient: fail(cell))
            loss.backward()
            optimizer.step()
            if cell.reads:
                loss.item()


@pytest.fixture(scope="module")
def started() -> Iterator[dict[tuple[Target, Cell], Running]]:
    """Those that were started and not waited for yet."""
    found: dict[tuple[Target, Cell], Running] = {}
    yield found
    for running in found.values():  # of tests that did not come to run
        running.ends()


def start(ending: Ending, target: Target, cell: Cell) -> Running:
    prepare = prepare_simulated if target.is_simulated else None
    backend = f"cpu:gloo,{target.device}:{target.backend}" if cell.cpu and target.backend != "gloo" else target.backend
    how: Any = {"backend": backend, "prepare": prepare, "over_group": cell.over_group}
    return ending.start(train, target, cell, ranks=target.ranks(len(COUNTS)), **how)


@in_quiet
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_end(
    request: pytest.FixtureRequest,
    ending: Ending,
    started: dict[tuple[Target, Cell], Running],
    target: Target,
    cell: Cell,
) -> None:
    """The cells of the next tests are started with this one: most of what they do is to wait."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    coming = [
        cast("Cell", item.callspec.params["cell"])
        for item in items
        if item.originalname == request.node.originalname and item.path == request.path
        if item.callspec.params["target"] == target
    ]
    for each in coming[(at := coming.index(cell)) : at + AT_ONCE]:
        if (target, each) not in started:
            started[target, each] = start(ending, target, each)
    check(cell, started.pop((target, cell)).ends())


def check(cell: Cell, ends: list[End]) -> None:
    told = "\n".join(f"--- rank {rank}: {end.code}\n{end.text}" for rank, end in enumerate(ends))
    failed: Any = ends[cell.victim]
    if cell.how != "raises":
        assert failed.code == -signal.SIGKILL, told
    else:
        assert failed.code == 1 and failed.error == "ValueError: mine", told
    rest = "failed: ValueError: mine" if cell.how == "raises" else "is gone"
    cause = f"PeerError: rank {cell.victim} {rest}"
    failed_at = float(failed.said("failed"))
    for rank, end in enumerate(ends):
        if rank != cell.victim:
            assert end.code == 1 and end.error.startswith(cause), told
            assert_soon(end.at - failed_at, SECONDS, f"rank {rank} took {end.at - failed_at:.1f} s\n{told}")
