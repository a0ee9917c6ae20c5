"""Starts the ranks: spawned processes on gloo, watched, so that a job that hangs cannot hang the demo.

The processes stay for all jobs, since importing torch takes longer than any of them; only after a job that hung or
failed, new ones take over.
"""

from __future__ import annotations

import math
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Work = Callable[[int, Any, Callable[[], None]], Any]
"""``work(rank, job, advance)`` does a job on one rank. One rank calls ``advance()`` once a step."""


def launch(
    world_size: int, work: Work, jobs: Sequence[Any], patience: float, progress: Callable[[int], object]
) -> list[list[Any] | str]:
    """Do one job after the other on all ranks.

    Args:
        world_size: the number of ranks.
        work: an importable function; jobs and results must be picklable.
        jobs: handed to ``work`` one by one.
        patience: seconds without a step after which a job counts as hanging.
        progress: called now and then with the number of new steps.

    Returns:
        For each job the results in rank order, or, if there are none, what became of it: ``"hangs"`` or ``"fails"``
        (then the traceback is on stderr).
    """
    outcomes: list[list[Any] | str] = []
    while len(outcomes) < len(jobs):
        with tempfile.TemporaryDirectory() as folder:
            outcomes += _do_until_trouble(world_size, work, jobs[len(outcomes) :], patience, progress, Path(folder))
    return outcomes


def _do_until_trouble(
    world_size: int, work: Work, jobs: Sequence[Any], patience: float, progress: Callable[[int], object], folder: Path
) -> list[list[Any] | str]:
    context = mp.get_context("spawn")
    ready, steps = context.Value("q", 0), context.Value("q", 0)
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, world_size, work, jobs, folder, ready, steps), daemon=True)
        for rank in range(world_size)
    ]
    outcomes: list[list[Any] | str] = []
    seen, deadline = 0, math.inf
    try:
        for process in processes:
            process.start()
        while len(outcomes) < len(jobs):
            time.sleep(0.02)
            now = steps.value
            if now > seen or (ready.value == world_size and math.isinf(deadline)):
                deadline = time.monotonic() + patience
            progress(now - seen)
            seen = now
            files = [_result(folder, len(outcomes), rank) for rank in range(world_size)]
            if all(file.exists() for file in files):
                outcomes.append([pickle.loads(file.read_bytes()) for file in files])
                deadline = time.monotonic() + patience
            elif any(process.exitcode for process in processes):
                return [*outcomes, "fails"]
            elif time.monotonic() > deadline:
                return [*outcomes, "hangs"]
        return outcomes
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _rank(rank: int, world_size: int, work: Work, jobs: Sequence[Any], folder: Path, ready: Any, steps: Any) -> None:
    def advance() -> None:
        steps.value += 1  # one rank counts, so there is nothing to race with

    torch.set_num_threads(1)
    with ready.get_lock():
        ready.value += 1
    for number, job in enumerate(jobs):
        store = dist.FileStore(str(folder / f"store-{number}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        try:
            result = pickle.dumps(work(rank, job, advance))
        finally:
            dist.destroy_process_group()
        file = _result(folder, number, rank)
        partial = file.with_suffix(".partial")
        partial.write_bytes(result)
        partial.replace(file)


def _result(folder: Path, number: int, rank: int) -> Path:
    return folder / f"job-{number}-rank-{rank}.pickle"
