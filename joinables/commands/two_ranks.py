"""Trains on two ranks of this machine, and compares with one process: :func:`look_at_training`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    spawn,  # pyright: ignore[reportUnknownVariableType]
)
from torch.nn.parallel import DistributedDataParallel

from join import Join
from join.collectives import collective_of
from join.collectives.shared_memory.segment import SharedBoard
from join.errors import described
from joinables.commands.findings import Finding
from joinables.commands.network import INTERFACE

STEPS = (120, 40)
"""How many batches each rank has."""
LIMIT = 90.0
"""Seconds the ranks may take, most of which they need for importing torch."""
_TOLERANCE = 1e-9  # of doubles
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Told:
    """What a rank tells: what it has trained, how long that took, and how headers went; or what went wrong."""

    parameters: Sequence[float] = ()
    seconds: float = 0.0
    shares_memory: bool = False
    error: str = ""


def look_at_training(limit: float = LIMIT) -> list[Finding]:
    """Two ranks train together, one of them on a third of the batches.

    Args:
        limit: seconds they may take.
    """
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    answers: Any = multiprocessing.get_context("spawn").SimpleQueue()
    ranks: Any = spawn(_work, (store.port, limit, answers), nprocs=len(STEPS), join=False, daemon=True)
    deadline = time.monotonic() + limit
    told: dict[int, Told] = {}
    try:
        while not ranks.join(max(deadline - time.monotonic(), 0)) and time.monotonic() < deadline:
            pass  # one of them has ended
    except (ProcessExitedException, ProcessRaisedException) as error:
        told[error.error_index] = Told(error=str(error).strip().splitlines()[-1])
    for process in ranks.processes:
        process.kill()
        process.join()
    while not answers.empty():
        rank, answer = answers.get()
        told[rank] = answer
    return judged(told, limit)


def judged(told: dict[int, Told], limit: float) -> list[Finding]:
    """Make findings of what the ranks have told; one that has told nothing was too slow, or died."""
    wrong = [f"rank {rank}: {each.error}" for rank, each in sorted(told.items()) if each.error]
    if wrong:
        advice = (
            f"if it is about connections, set {INTERFACE} (lo reaches this machine); else report it, with this text"
        )
        return [Finding("two ranks could not train: " + "; ".join(wrong), "to do", advice)]
    if len(told) < len(STEPS):
        missing = sorted(set(range(len(STEPS))) - set(told))
        advice = f"set {INTERFACE}=lo, and run this again: if that helps, the interface above is not reachable"
        return [Finding(f"rank {missing[0]} did not come back within {limit:g} s", "to do", advice)]
    expected = _alone()
    difference = max(
        (torch.tensor(each.parameters, dtype=torch.float64) - expected).abs().max().item() for each in told.values()
    )
    told_of = f"two ranks, {STEPS[0]} and {STEPS[1]} batches: largest difference to one process {difference:.1e}"
    found = [
        Finding(f"{told_of}, {1e3 * told[0].seconds / max(STEPS):.2f} ms a step")
        if difference <= _TOLERANCE
        else Finding(told_of, "to do", "report it, with the versions above: it should be the rounding of doubles")
    ]
    carried = "through shared memory" if told[0].shares_memory else "over the process group"
    return [*found, Finding(f"headers went {carried}")]


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).double()


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * rank + step))


def _alone() -> torch.Tensor:
    """The parameters after one process has trained on the batches of all ranks."""
    network = _network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step in range(max(STEPS)):
        batches = torch.cat([_batch(rank, step) for rank, steps in enumerate(STEPS) if step < steps])
        optimizer.zero_grad()
        network(batches).square().mean().backward()
        optimizer.step()
    return _parameters(network)


def _parameters(network: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(network.parameters()).detach()


def _work(rank: int, port: int, limit: float, answers: Any) -> None:
    """Train as one rank, and put what it has found into ``answers``."""
    try:
        answers.put((rank, _train(rank, port, limit)))
    except Exception as error:
        answers.put((rank, Told(error=described(error))))
    sys.stdout.flush()
    os._exit(0)  # what is pending on a group that has failed must not hold it up


def _train(rank: int, port: int, limit: float) -> Told:
    torch.set_num_threads(1)
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=limit))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(STEPS), timeout=timedelta(seconds=limit))
    model = DistributedDataParallel(_network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    started = time.monotonic()
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for step in range(STEPS[rank]):
            optimizer.zero_grad()
            model(_batch(rank, step)).square().mean().backward()
            optimizer.step()
    seconds = time.monotonic() - started
    shares_memory = isinstance(collective_of(None).board(), SharedBoard)
    dist.barrier()  # a rank that ends early breaks the collectives of the other
    return Told([float(each) for each in _parameters(model)], seconds, shares_memory)
