"""Recipe: a picture of a block's report, drawn with matplotlib: when each rank had data, and how long it waited.

`join.report` is the same on all ranks, so one of them draws. Until `joined_at` (seconds since the rank entered) a rank
had data, and at `ended_at` no rank had. `idle` is the time in between in which it waited. `join.report.to_dict()`
returns all numbers for JSON. Needs matplotlib.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (2, 5, 0)  # by rank; rank 2 has no data


def draw(report: Any, path: Path) -> None:
    """Draw a bar for each rank: the time with data, the time without, and within it the time of waiting."""
    numbers, joined = [row.rank for row in report.ranks], [row.joined_at for row in report.ranks]
    figure = Figure(figsize=(8, 3), layout="constrained")  # without pyplot, which would choose a backend
    axes = figure.subplots()
    axes.barh(numbers, joined, label="with data")
    axes.barh(numbers, [row.ended_at - row.joined_at for row in report.ranks], left=joined, label="without data")
    axes.barh(numbers, [row.idle for row in report.ranks], left=joined, height=0.2, label="waits for others")
    for row in report.ranks:
        axes.text(0, row.rank, f" {row.steps} steps, {row.shadowed} shadowed", color="white", va="center")
    axes.set(xlabel="seconds since entering the block", ylabel="rank", yticks=numbers)
    axes.legend(loc="lower right")
    figure.savefig(path)


def train(rank: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    with Join([model], divide_by_initial_world_size=False) as join:
        for _ in range(BATCHES[rank]):
            time.sleep(0.1)  # in place of work
            model(torch.ones(8, 4)).sum().backward()
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "report.png")
            draw(join.report, path)
            print(f"{join.report}\n\nWrote {path.name}.")


if __name__ == "__main__":
    run_ranks(train, len(BATCHES))
