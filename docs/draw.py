"""Draw the calls of a step through the files of this project, from a run: ``python -m docs.draw`` writes the SVGs.

Each picture is a call sequence. It has a column for each folder, and a line for each call from one file into another,
in order. It omits calls within a file, repeated calls, and functions of one or two lines.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from docs.order import drawn
from join import Join
from joinables.testing import run_ranks

DOCS = Path(__file__).parent
ROOT = DOCS.parent
DETAIL = 2  # lines


@dataclass(frozen=True)
class Place:
    """A function in a file of this project."""

    file: str
    function: str

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0] or self.file

    @property
    def label(self) -> str:
        return f"{self.file.rpartition('/')[2]}.{self.function}"


YOURS = Place("your loop", "")
Call: TypeAlias = tuple[Place, Place]


@dataclass
class Calls:
    """Recorder of calls between files, as the profile function of Python: ``with Calls() as calls``."""

    made: list[Call] = field(default_factory=list[Call])

    def __enter__(self) -> Calls:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        callee = place_of(frame)
        if event != "call" or callee is None or callee == YOURS or is_detail(frame):
            return
        caller, above = None, frame.f_back
        while above is not None and caller is None:
            caller, above = None if is_detail(above) else place_of(above), above.f_back
        call = caller or YOURS, callee
        if call[0].file != call[1].file and call not in self.made:
            self.made.append(call)


def is_detail(frame: FrameType) -> bool:
    """Return whether a function has at most :data:`DETAIL` lines, or is a lambda, a comprehension or a module."""
    code = frame.f_code
    return code.co_name.startswith("<") or len({line for *_, line in code.co_lines() if line}) <= DETAIL


def place_of(frame: FrameType) -> Place | None:
    """Return the place of a function; ``None`` if it is not in this project."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    name = str(path.relative_to(ROOT).with_suffix("")).removesuffix("/__init__")
    return Place(name, frame.f_code.co_name) if name.split("/")[0] in ("join", "joinables") else YOURS


def draw(calls: list[Call], title: str, name: str) -> None:
    """Draw a call sequence."""
    folders = list(dict.fromkeys([YOURS.folder, *(place.folder for call in calls for place in call)]))
    limits = {"xlim": (-0.5, len(folders) - 0.5), "ylim": (len(calls) + 0.5, -2)}
    with drawn(DOCS / f"{name}.svg", (1.6 * len(folders), 0.3 * len(calls) + 1), **limits) as axes:
        axes.text(-0.4, -1.6, title, fontsize=10)
        for at, folder in enumerate(folders):
            axes.text(at, -0.5, folder.replace("/", "/\n"), ha="center", va="center", fontsize=8, weight="bold")
            axes.plot([at, at], [0, len(calls)], color="0.85", linewidth=1, zorder=0)
        for row, (caller, callee) in enumerate(calls):
            begin, end = folders.index(caller.folder), folders.index(callee.folder)
            if begin != end:
                arrow = {"arrowstyle": "->", "linewidth": 0.7}
                axes.annotate("", (end, row + 0.6), (begin, row + 0.6), arrowprops=arrow)
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "0.7", "linewidth": 0.5}
            axes.text(end, row + 0.6, callee.label, ha="center", va="center", fontsize=6.5, bbox=box)


class Training:
    """The training of one rank. Rank 0 has more batches than rank 1."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = [torch.ones(2, 4)] * (5, 2)[rank]

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).sum().backward()
        self.optimizer.step()


def plain(rank: int) -> list[Call]:
    """Return the calls of a step on rank 0, or of rank 1, which shadows the step at the end of its block."""
    training, calls = Training(rank), Calls()
    with Join([training.model, training.optimizer], divide_by_initial_world_size=False):
        for number, batch in enumerate(training.batches):
            with calls if (rank, number) == (0, 1) else nullcontext():
                training.step(batch)
        if rank == 1:
            sys.setprofile(calls)
    sys.setprofile(None)
    end = next((at for at, (_, callee) in enumerate(calls.made) if rank and callee.function == "_copy_all"), None)
    return calls.made[:end]


def in_lockstep(rank: int) -> list[Call]:
    """Return the calls of a step over ``join.iterate``, with data or on a dummy batch."""
    training, calls = Training(rank), Calls()
    with Join([training.model, training.optimizer], divide_by_initial_world_size=False) as join:
        batches = iter(join.iterate(training.batches))
        for number in range(5):
            with calls if number == 3 else nullcontext():
                training.step(next(batches))
        assert next(batches, None) is None
    return calls.made


def main() -> None:
    active, shadowed = run_ranks(plain, 2)
    _, dummy = run_ranks(in_lockstep, 2)
    draw(active, "A step of a rank that has data, in a plain block", "active_step")
    draw(shadowed, "What a rank without data does in the end of its block: it shadows", "shadowed_step")
    draw(dummy, "A step over join.iterate, on a dummy", "lockstep_step")


if __name__ == "__main__":
    main()
