"""Starts the ranks: spawned processes on gloo, under a time limit, so that nothing that hangs can hang the demo."""

from __future__ import annotations

import multiprocessing.process
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

T = TypeVar("T")
Processes = list[multiprocessing.process.BaseProcess]


def launch(
    world_size: int, fn: Callable[..., T], *args: Any, limit: float, progress: Callable[[int], None]
) -> list[T]:
    """Run ``fn(rank, *args, advance)`` on every rank and return the results in rank order.

    Args:
        world_size: the number of ranks.
        fn: importable, as are its arguments picklable; it may call ``advance()`` to report a step.
        *args: handed to ``fn``.
        limit: seconds until all ranks must be done.
        progress: called with the number of steps since the last call.

    Raises:
        TimeoutError: if a rank is not done in time.
        RuntimeError: if a rank failed; its traceback is on stderr.
    """
    context = mp.get_context("spawn")
    steps = context.Value("q", 0)
    with tempfile.TemporaryDirectory() as folder:
        processes: Processes = [
            context.Process(target=_work, args=(rank, world_size, folder, steps, fn, args), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, time.monotonic() + limit, steps, progress)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                if process.pid is not None:
                    process.join()
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(world_size)]


def _wait(processes: Processes, deadline: float, steps: Any, progress: Callable[[int], None]) -> None:
    seen = 0
    while any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes):
            break
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)
        now = steps.value
        progress(now - seen)
        seen = now
    failed = [f"rank {rank} (exit code {process.exitcode})" for rank, process in enumerate(processes) if process.exitcode]
    if failed:
        raise RuntimeError(f"{', '.join(failed)} failed")


def _work(rank: int, world_size: int, folder: str, steps: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    def advance() -> None:
        steps.value += 1  # one rank counts, so no lock is needed

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        _result(folder, rank).write_bytes(pickle.dumps(fn(rank, *args, advance)))
    finally:
        dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.pickle")
