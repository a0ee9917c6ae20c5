"""Shared code of the benchmarks: ranks as processes, tables, JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from joinables.testing import run_ranks

_LIMIT_SECONDS = 280.0


def run_processes(
    world_size: int, fn: Callable[..., Any], *args: Any, device: str = "cpu", limit: float = _LIMIT_SECONDS
) -> list[Any]:
    """Run ``fn(*args)`` in ``world_size`` processes that form a gloo group; return their results in rank order.

    With ``device="cuda"`` they form an NCCL group instead. A single GPU is shared by all ranks: NCCL then takes each
    rank for a host, and messages go over sockets. The device becomes the default one of the processes.

    Raises:
        RankFailed: If a rank raises, or the processes take more than ``limit`` seconds.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise writes a line at each start and stop
    backend = "nccl" if device == "cuda" else "gloo"
    return run_ranks(_rank, world_size, device, fn, args, timeout=limit, backend=backend)


def _rank(rank: int, device: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_default_device(device)
    if device == "cuda":
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return fn(*args)


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
