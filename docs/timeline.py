"""Draw the traces that ``torch.profiler`` records on three ranks: ``python -m docs.timeline``.

Each rank exports the trace of one block. The ranks are out of data one after the other, and rank 2 has slower batches.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from docs.order import INK, QUIET, drawn
from join import Join
from joinables.testing import run_ranks

PICTURE = Path(__file__).parent / "pictures" / "timeline.svg"
COUNTS, SECONDS = (1, 3, 5), (0.01, 0.01, 0.02)
COLOURS = {
    "step": "#dbe4ea",
    "gloo": "#adb5bd",
    "join: shadow": "#1864ab",
    "join: header": "#f2c230",
    "join: wait": "#e8590c",
    "join: elect": "#9c36b5",
    "join: synchronise": "#2f9e6e",
    "join: compare": "#5c4033",
    "join: copy": "#2b8a3e",
}
"""The colours of ranges, by the beginning of their names. Later ranges are drawn over earlier ones."""
TITLES = {"step": "your step", "gloo": "collectives of gloo"}


class Range(NamedTuple):
    """A range of a trace, in milliseconds."""

    kind: str
    begin: float
    length: float


def block(counts: tuple[int, ...], rank: int) -> None:
    """Train one block on a rank."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256)))
    optimizer = torch.optim.Adam(model.parameters())
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for _ in range(counts[rank]):
            with record_function("step"):
                time.sleep(SECONDS[rank])  # the next batch
                optimizer.zero_grad()
                model(torch.randn(64, 256)).square().mean().backward()
                optimizer.step()


def ranges(rank: int) -> list[Range]:
    """Return the ranges of a rank's second block. The first block makes connections, and takes longer."""
    torch.set_num_threads(1)
    for counts in ((3, 2, 3), COUNTS):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            block(counts, rank)
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        trace: dict[str, Any] = json.loads(Path(folder, "trace.json").read_text())
    base = trace["baseTimeNanoseconds"] / 1e6
    return [
        Range(kind, base + event["ts"] / 1e3, event["dur"] / 1e3)
        for kind in COLOURS
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith(kind)
    ]


def draw(ranks: list[list[Range]], axes: Any, first: float, last: float) -> None:
    """Draw a row for each rank, a legend above and the time below."""
    for at, rank in enumerate(ranks):
        axes.text(-0.02 * last, at, f"rank {at}", ha="right", va="center", fontsize=10, color=INK)
        for kind, colour in COLOURS.items():
            bars = [(each.begin - first, each.length) for each in rank if each.kind == kind and each.begin >= first]
            place = (at + 0.28, 0.14) if kind == "gloo" else (at - 0.3, 0.5)
            axes.broken_barh(bars, place, facecolor=colour, edgecolor=colour, linewidth=0.6)
    for at, (kind, colour) in enumerate(COLOURS.items()):
        x, y = at % 4 * last / 4, -1.1 + 0.32 * (at // 4)
        axes.broken_barh([(x, 0.02 * last)], (y - 0.08, 0.16), facecolor=colour)
        axes.text(x + 0.025 * last, y, TITLES.get(kind, kind), va="center", fontsize=9, color=INK)
    for at in range(0, int(last), 20):
        axes.text(at, 2.75, f"{at} ms", ha="center", fontsize=8, color=QUIET)


def main() -> None:
    ranks = run_ranks(ranges, len(COUNTS))
    first = min(each.begin for rank in ranks for each in rank if each.kind == "step")
    last = max(each.begin + each.length for rank in ranks for each in rank) - first
    with drawn(PICTURE, (9, 3.2), xlim=(-0.1 * last, 1.02 * last), ylim=(2.85, -1.35)) as axes:
        draw(ranks, axes, first, last)


if __name__ == "__main__":
    main()
