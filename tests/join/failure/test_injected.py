"""A rank is interrupted or killed in each line of entering and leaving a block: the other one learns of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.ending import End, Ending, Running
from tests.harness import NIGHT, in_test_all
from tests.training import batch, build

ROOT = Path(__file__).parent.parent.parent.parent
REPORT = ROOT / "build" / "interrupted.json"  # how often each rank learned of it, after make test-night
SAMPLE = 2  # lines of each door, transport and way
AT_ONCE = 8
UNGUARDED = {  # the first line of each: an interrupt there comes before any code can catch it
    f"join/context.py:{min(line for *_, line in code.co_lines() if line and line > code.co_firstlineno)}"
    for code in (Join.__init__.__code__, Join.__enter__.__code__, Join.__exit__.__code__)
}
LINGERS = 7.0  # seconds that the interrupted rank lives on: if the other one learns of it only then, nobody told it

Act = Callable[[str, str], None]


class Tracer:
    """Calls a function in each line of the two packages, once for each door."""

    def __init__(self, act: Act) -> None:
        self.door, self._act, self._seen = "", act, set[tuple[str, str]]()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith((f"{ROOT}/join/", f"{ROOT}/joinables/")) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        place = self.door, f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        if event == "line" and self.door and place not in self._seen:
            self._seen.add(place)
            self._act(*place)
        return self._line


def train(rank: int, tracer: Tracer) -> None:
    """Train on uneven batches, so that state is copied at the end."""
    model = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(model.parameters())
    if rank == 1:
        sys.settrace(tracer)
    tracer.door = "enter"
    with Join([model, optimizer], divide_by_initial_world_size=False):
        tracer.door = ""
        for step in range((3, 1)[rank]):
            x, y = batch(rank, 0, step)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        tracer.door = "leave"
    tracer.door = ""


def lines(rank: int) -> list[tuple[str, str]]:
    """The lines of both doors, in the order in which rank 1 reaches them."""
    found: list[tuple[str, str]] = []
    train(rank, Tracer(lambda *place: found.append(place)))
    sys.settrace(None)
    return found


def inject(rank: int, way: str, door: str, line: str) -> str:
    """What a rank ends with if rank 1 is interrupted or killed in a line."""

    def act(*place: str) -> None:
        if place == (door, line):
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt

    text = "fine"
    try:
        train(rank, Tracer(act))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    sys.settrace(None)
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("ended", "")
        return text
    try:
        store.wait(["ended"], timedelta(seconds=LINGERS))
    except RuntimeError:
        text += ", and rank 0 was not told"
    return text


def outcome(way: str, door: str, ends: list[End]) -> str:
    """``told`` if rank 0 was told, ``given`` if rank 1 had given everything, or what happened otherwise."""
    first, second = ends
    own = (way == "killed" and second.code == -signal.SIGKILL) or str(second.result).startswith("KeyboardInterrupt")
    if own and "not told" not in str(second.result):
        if str(first.result).startswith("PeerError: rank 1 "):
            return "told"
        if door == "leave" and first.result == "fine":
            return "given"
    if first.result == second.result == "fine":  # in this run, rank 1 had nothing to wait for
        return "not reached"
    return f"rank 0: {first.result or first.text[-300:]}; rank 1: {second.code} {second.result}"


def outcomes(ending: Ending, cases: list[tuple[bool, str, str, str]]) -> Iterator[str]:
    """How each case comes out; some of them run at the same time."""
    running: list[tuple[str, str, Running]] = []
    for over_group, way, door, line in cases:
        if len(running) == AT_ONCE:
            way_before, door_before, before = running.pop(0)
            yield outcome(way_before, door_before, before.ends())
        ranks = ending.start(inject, way, door, line, ranks=2, over_group=over_group, tidies=False)
        running.append((way, door, ranks))
    for way, door, ranks in running:
        yield outcome(way, door, ranks.ends())


def cases_of(ending: Ending, most: int) -> list[tuple[bool, str, str, str]]:
    """At most so many lines of each transport and door, in both ways."""
    cases: list[tuple[bool, str, str, str]] = []
    for over_group in (False, True):
        _, found = ending.run(lines, ranks=2, over_group=over_group)
        for door in ("enter", "leave"):
            places = [line for at, line in found if at == door and line not in UNGUARDED]
            stride = max(1, -(-len(places) // most))
            cases += [(over_group, way, door, line) for way in ("interrupted", "killed") for line in places[::stride]]
    return cases


@in_test_all
@pytest.mark.timeout(7200 if NIGHT else 240)
def test_the_other_rank_learns_of_it(ending: Ending) -> None:
    cases = cases_of(ending, 10**6 if NIGHT else SAMPLE)
    table: dict[str, dict[str, int]] = {}
    wrong: list[tuple[Any, ...]] = []
    for case, found in zip(cases, outcomes(ending, cases), strict=True):
        over_group, way, door, _ = case
        transport = "the process group" if over_group else "shared memory"
        row = table.setdefault(f"{door}, {way}, {transport}", {"told": 0, "given": 0, "not reached": 0})
        if found in row:
            row[found] += 1
        else:
            wrong.append((*case, found))
    if NIGHT:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(json.dumps(table, indent=1) + "\n")
    assert not wrong, f"{len(wrong)} of {len(cases)}: {table}, {wrong[:20]}"
