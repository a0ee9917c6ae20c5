"""Shared code of the benchmarks: ranks as processes, tables, JSON."""

from __future__ import annotations

import json
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_LIMIT_SECONDS = 280.0


def run_processes(
    world_size: int, fn: Callable[..., Any], *args: Any, device: str = "cpu", limit: float = _LIMIT_SECONDS
) -> list[Any]:
    """Run ``fn(*args)`` in ``world_size`` processes that form a gloo group; return their results in rank order.

    With ``device="cuda"`` they form an NCCL group instead. A single GPU is shared by all ranks: NCCL then takes each
    rank for a host, and messages go over sockets. The device becomes the default one of the processes.

    The ranks meet through a file, so no port is fixed. If a rank raises, or the limit expires, all ranks are killed.

    Raises:
        TimeoutError: If the processes take more than ``limit`` seconds.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise writes a line at each start and stop
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(_rank, args=(world_size, device, folder, fn, args), nprocs=world_size, join=False, daemon=True)
        deadline = time.monotonic() + limit
        try:
            while not ranks.join(timeout=max(deadline - time.monotonic(), 0.1)):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{fn.__name__} on {world_size} processes took more than {limit:g} s")
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(world_size)]


def _result(folder: str, rank: int) -> Path:
    return Path(folder, f"result-{rank}")


def _rank(rank: int, world_size: int, device: str, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.set_default_device(device)
    if device == "cuda":
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if device == "cuda" else "gloo"
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    _result(folder, rank).write_bytes(pickle.dumps(fn(*args)))
    dist.barrier()
    dist.destroy_process_group()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table; the first column is text, the others are numbers."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|:" + "-" * (widths[0] + 1) + "|" + "|".join("-" * (width + 1) + ":" for width in widths[1:]) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


def save(file: str | None, **content: Any) -> None:
    """Write ``content``, with the versions and the number of processors, to ``file`` unless it is ``None``."""
    if file is not None:
        setting = {"torch": torch.__version__, "python": platform.python_version(), "cpus": os.cpu_count()}
        Path(file).write_text(json.dumps({**setting, **content}, indent=2) + "\n")
