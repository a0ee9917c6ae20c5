"""Draw the order of collectives on an active and on a joined rank, from a run: ``python -m docs.order``.

Two ranks train a DDP module that has buffers, by a ZeRO optimizer. The picture shows a step of rank 0 that rank 1
shadows: each header and each collective that torch executes, in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from join import Join
from join.protocol.headers import Headers
from joinables.testing import run_ranks

PICTURE = Path(__file__).parent / "pictures" / "order.svg"
COUNTS = 3, 1
KINDS = {"allreduce_": "all-reduce", "broadcast_": "broadcast"}
INK, QUIET, HEADER, DATA = "#22313f", "#66737f", "#fff3bf", "#d0ebff"


@dataclass(frozen=True)
class Entry:
    """An action of a rank: a part of its loop, a header, or a collective of so many numbers."""

    kind: str
    numbers: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of {self.numbers}" if self.numbers else self.kind


class Collectives(TorchDispatchMode):
    """Mode that records the collectives that torch executes."""

    def __init__(self, made: list[Entry]) -> None:
        super().__init__()
        self.made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().partition("::")[2]
            self.made.append(Entry(KINDS.get(name, name), sum(math.prod(each.shape) for each in tree_leaves(args[0]))))
        return func(*args, **(kwargs or {}))


@contextmanager
def noted(made: list[Entry]) -> Iterator[None]:
    """Record headers and collectives in ``made``, in order."""
    send = Headers.send

    def sending(self: Headers, *args: Any, **options: Any) -> Any:
        made.append(Entry("header"))
        return send(self, *args, **options)

    Headers.send = sending
    try:
        with Collectives(made):
            yield
    finally:
        Headers.send = send


def train(rank: int) -> list[Entry]:
    """Train on a rank, and return its actions."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    made: list[Entry] = []
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    with noted(made), Join([model, optimizer], divide_by_initial_world_size=False):
        for _ in range(COUNTS[rank]):
            made.append(Entry("forward"))
            loss = model(torch.randn(2, 4)).sum()
            made.append(Entry("backward"))
            loss.backward()
            made.append(Entry("step"))
            optimizer.step()
        made.append(Entry("end"))
    return made


def step_of(active: list[Entry], joined: list[Entry]) -> list[tuple[str, Entry, Entry]]:
    """Return the second step: for each action its place in the active rank's loop, and the actions of both ranks."""
    begins = [at for at, entry in enumerate(active) if entry.kind == "forward"]
    step, shadows = active[begins[1] : begins[2]], iter(joined[joined.index(Entry("end")) + 1 :])
    rows: list[tuple[str, Entry, Entry]] = []
    where = ""
    for entry in step:
        if entry.kind in ("forward", "backward", "step"):
            where = entry.kind
        else:
            rows.append((where, entry, next(shadows)))
            where = ""
    return rows


@contextmanager
def drawn(path: Path, size: tuple[float, float], **limits: tuple[float, float]) -> Iterator[Any]:
    """Yield axes of matplotlib without a frame, and save the picture to ``path`` when the context ends."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(**limits)
    axes.axis("off")
    yield axes
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "joinables"}):
        figure.savefig(path, metadata={"Date": None})


def draw(rows: list[tuple[str, Entry, Entry]], axes: Any) -> None:
    for at, title in enumerate(("rank 0 has data: its own loop", "rank 1 is out of data: the end of its block")):
        axes.text(at, -1.1, title, ha="center", weight="bold", fontsize=9, color=INK)
        axes.plot([at, at], [-0.7, len(rows) - 0.5], color=QUIET, linewidth=0.7, zorder=0)
    for row, (where, *entries) in enumerate(rows):
        axes.text(-0.72, row, where, va="center", fontsize=9, color=QUIET)
        axes.plot([0, 1], [row, row], color=QUIET, linewidth=0.7, linestyle=":", zorder=0)
        for at, entry in enumerate(entries):
            colour = HEADER if entry.kind == "header" else DATA
            box = {"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": QUIET, "linewidth": 0.5}
            axes.text(at, row, str(entry), ha="center", va="center", fontsize=8, color=INK, bbox=box)


def main() -> None:
    rows = step_of(*run_ranks(train, 2))
    if any(active != joined for _, active, joined in rows):
        raise SystemExit(f"The joined rank does not follow the active rank: {rows}")
    PICTURE.parent.mkdir(exist_ok=True)
    limits = {"xlim": (-0.75, 1.45), "ylim": (len(rows) - 0.3, -1.6)}
    with drawn(PICTURE, (8, 0.42 * len(rows) + 1), **limits) as axes:
        draw(rows, axes)


if __name__ == "__main__":
    main()
