"""The way of a step through the code: how many calls, through how many files, how often from one into another.

More than these limits is hard to follow, and costs time: a call of a function finds cold caches after a step's
arithmetic, and takes microseconds.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import join
from join import Join
from tests.harness import Pool

ROOT = Path(join.__file__).parent.parent
OURS = str(ROOT / "join"), str(ROOT / "joinables")
COUNTS = 8, 4
# Called only where a rank has to wait, or the more often, the longer it waits.
POLLS = {"_ended", "_wait_and_look", "_wait_for_missing", "has_ended", "is_completed", "look"}
POLLS |= {"profiled", "wait"}
POLLS |= {"_arrive"}  # called for each parameter
MEASURED = 6  # the step, counted from 0, in which both ranks are past their first ones
LIMITS = {
    # calls, files, crossings; the exit is that of the rank that runs out first: four shadowed steps, and the end, where
    # it takes the state, attributes and random generators of the last rank with data
    ("step", ""): (25, 10, 19),
    ("step", "norm"): (39, 11, 26),
    ("step", "weighed"): (47, 13, 30),
    ("exit", ""): (311, 26, 149),
    ("exit", "norm"): (417, 28, 193),
    ("exit", "weighed"): (333, 27, 162),
    ("step with data", ""): (37, 14, 24),
    ("step with data", "norm"): (43, 15, 28),
    ("step with data", "weighed"): (46, 14, 28),
    ("step on a dummy", ""): (53, 15, 31),
    ("step on a dummy", "norm"): (88, 16, 42),
    ("step on a dummy", "weighed"): (61, 15, 34),
}


class Walk:
    """A profile function that counts calls of functions in the two packages, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls = self.crossings = 0
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if threading.current_thread().name.startswith("join "):  # it watches the others
            return
        if not self.is_on or event != "call" or not file.startswith(OURS) or frame.f_code.co_name in POLLS:
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(OURS):
            caller = caller.f_back
        if frame.f_code.co_name.startswith("<") and caller is not None and caller.f_code.co_name in POLLS:
            return  # a part of it
        self.calls += 1
        self.crossings += caller is None or caller.f_code.co_filename != file
        self.files.add(file)


def walk(rank: int, in_loop: bool, norm: bool, weighed: bool) -> tuple[int, int, int]:
    """What a rank calls: rank 0, in a step; rank 1, which runs out first, in that step or, in a block, at its exit."""
    torch.manual_seed(0)
    layer = torch.nn.BatchNorm1d(8) if norm else torch.nn.ReLU()
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), layer, torch.nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    loader = [torch.randn(3, 4) for _ in range(COUNTS[rank])]
    counted = Walk()
    threading.setprofile(counted)
    sys.setprofile(counted)
    try:
        with Join([model, optimizer], divide_by_initial_world_size=False) as block:
            weigh = len if weighed else None
            for step, x in enumerate(block.iterate(loader, weigh=weigh) if in_loop else loader):
                counted.is_on = step == MEASURED
                if weighed and not in_loop:
                    block.weight = len(x)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                (block.scale(loss) if weighed else loss).backward()
                optimizer.step()
            counted.is_on = not in_loop and rank == 1
        counted.is_on = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return counted.calls, len(counted.files), counted.crossings


def check(what: str, case: str, counted: tuple[int, int, int]) -> None:
    names = "calls", "files", "crossings"
    over = [name for name, count, limit in zip(names, counted, LIMITS[what, case], strict=True) if count > limit]
    assert not over, f"{what}, {case or 'plain'}: {dict(zip(names, counted, strict=True))}, not {LIMITS[what, case]}"


@pytest.mark.parametrize("case", ["", "norm", "weighed"])
def test_a_block(pool: Pool, case: str) -> None:
    step, the_exit = pool.run(walk, False, case == "norm", case == "weighed", ranks=2)
    check("step", case, step)
    check("exit", case, the_exit)


@pytest.mark.parametrize("case", ["", "norm", "weighed"])
def test_a_loop(pool: Pool, case: str) -> None:
    with_data, on_dummy = pool.run(walk, True, case == "norm", case == "weighed", ranks=2)
    check("step with data", case, with_data)
    check("step on a dummy", case, on_dummy)
