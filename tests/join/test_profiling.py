"""``torch.profiler`` shows what ranks do for each other, under names; without it, nothing is entered."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import join
from join import Join
from tests.harness import Pool
from tests.training import batch, build

ROOT = Path(join.__file__).parent.parent
COUNTS = 0, 2, 5
BACKWARD = "the backward of DistributedDataParallel(Norm)"
LATE = 0.3  # seconds that rank 2 takes over its last batch


def train(rank: int, in_loop: bool) -> None:
    model = DistributedDataParallel(build("norm"))
    optimizer = torch.optim.Adam(model.parameters())
    loader = [batch(rank, 0, step) for step in range(COUNTS[rank])]
    with Join([model, optimizer], divide_by_initial_world_size=False) as block:
        for step, (x, y) in enumerate(block.iterate(loader) if in_loop else loader):
            if rank == 2 and step == 4:
                time.sleep(LATE)
            optimizer.zero_grad()
            (model(x) - y).square().sum().backward()
            optimizer.step()


def ranges(rank: int, in_loop: bool) -> dict[str, list[float]]:
    """How long each range of ours took, in seconds, by name, as the exported trace tells."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        train(rank, in_loop)
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("join: "):
            found[event["name"]].append(event["dur"] / 1e6)
    return dict(found)


def test_a_block(pool: Pool) -> None:
    without_data, *active = pool.run(ranges, False)
    for found, count in zip((without_data, *active), COUNTS, strict=True):
        assert len(found.get(f"join: shadow {BACKWARD}", [])) == max(COUNTS) - count
        assert len(found["join: header"]) > max(COUNTS)
        for name in ("enter", "find the leader", "copy", "compare"):
            assert len(found[f"join: {name}"]) >= 1, name
        is_late = count == max(COUNTS)
        assert (sum(found.get("join: wait for rank 2", [])) > LATE / 2) is not is_late


def test_headers_over_the_group(pool: Pool) -> None:
    without_data, *_ = pool.run(ranges, False, over_group=True)
    assert sum(without_data["join: wait"]) > LATE / 2
    assert not [name for name in without_data if name.startswith("join: wait for")]


def test_a_loop(pool: Pool) -> None:
    found = pool.run(ranges, True)
    for each, count in zip(found, COUNTS, strict=True):
        assert len(each["join: roll call"]) > max(COUNTS)
        assert len(each.get("join: dummy", [])) == max(COUNTS) - count
        assert not [name for name in each if name.startswith("join: shadow")]


def entered(rank: int, in_loop: bool) -> list[str]:
    """The names of all ranges that are made without a profiler, by torch as well."""
    with mock.patch("torch.autograd.profiler.record_function", wraps=record_function) as made:
        train(rank, in_loop)
    return [call.args[0] for call in made.call_args_list]


@pytest.mark.parametrize("in_loop", [False, True])
def test_nothing_is_entered_without_a_profiler(pool: Pool, in_loop: bool) -> None:
    names = [name for names in pool.run(entered, in_loop) for name in names]
    assert any("Adam" in name for name in names)  # the optimizer's own, which are entered in any case
    assert not [name for name in names if name.startswith("join")]


def test_the_page_has_each_range() -> None:
    made = {
        name for path in (ROOT / "join").rglob("*.py") for name in re.findall(r'profiled\("([\w ]+)"', path.read_text())
    }
    told = re.findall(r"^\| `join: ([\w ]+?)( 2| <name>)?` \|", (ROOT / "docs" / "hang.md").read_text(), re.MULTILINE)
    assert len(made) > 5 and {name for name, _ in told} == made
