"""``join.trace`` around real training: what is recorded is what happened, and it changes nothing of that."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.ending import Ending
from tests.models import OPTIMIZERS, TOLERANCE, assert_same, batch, build, flat_state
from tests.pool import Pool

COUNTS = (5, 2, 0)


def train(rank: int, path: str, way: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The rank's row of the report, and what it has trained."""
    model = DistributedDataParallel(build("mlp"))
    optimizer_class, options = OPTIMIZERS["adam"]
    optimizer = optimizer_class(model.parameters(), **options)
    mine = [batch(rank, 0, step) for step in range(COUNTS[rank])]
    steps = COUNTS[rank] if way == "declared" else None
    timeout = 30.0 if way == "with a timeout" else None
    with Join([model, optimizer], divide_by_initial_world_size=False, steps=steps, timeout=timeout) as join:
        if path:
            join.trace(path)
        for x, y in join.iterate(mine) if way == "iterate" else mine:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
    return asdict(join.report.ranks[rank]), flat_state(model.module.state_dict(), optimizer.state_dict())


def alone() -> dict[str, torch.Tensor]:
    """The same in one process."""
    model = build("mlp")
    optimizer_class, options = OPTIMIZERS["adam"]
    optimizer = optimizer_class(model.parameters(), **options)
    for step in range(max(COUNTS)):
        batches = [batch(rank, 0, step) for rank, count in enumerate(COUNTS) if step < count]
        optimizer.zero_grad()
        torch.stack([((model(x) - y) ** 2).mean() for x, y in batches]).mean().backward()
        optimizer.step()
    return flat_state(model.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("way", ["plain", "over the group", "declared", "iterate", "with a timeout"])
def test_what_is_recorded_is_what_happened(pool: Pool, tmp_path: Path, way: str) -> None:
    path = tmp_path / "run.json"
    expected = alone()
    over_group = way == "over the group"
    untraced = pool.run(train, "", way, over_group=over_group)
    results = pool.run(train, str(path), way, over_group=over_group)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"run.rank{rank}.json" for rank in range(3)]
    longest = max(COUNTS)
    for rank, (row, state) in enumerate(results):
        assert_same(state, expected, TOLERANCE)
        assert_same(state, untraced[rank][1])
        told = json.loads((tmp_path / f"run.rank{rank}.json").read_text())
        assert (told["rank"], told["world_size"], told["error"], told["left_out"]) == (rank, 3, None, 0)
        backward = told["joinables"].index("the backward of DistributedDataParallel(MLP)")
        own, others = COUNTS[rank], longest - COUNTS[rank]
        assert (row["steps"], row["shadowed"]) == (own, others)
        assert (told["announced"][backward], told["shadowed"][backward]) == (own, others)
        events = told["events"]
        assert all(0 <= told["traced_from"] <= begin <= end <= told["ended"] for _, begin, end, _, _ in events)
        assert events == sorted(events, key=lambda event: event[1:3])
        kinds = Counter(kind for kind, _, _, what, _ in events if what == backward and kind != "sent")
        numbers = [number for kind, _, _, what, number in events if what == backward and kind in ("ran", "shadowed")]
        assert numbers == list(range(1, longest + 1))  # on all ranks, whoever has data
        sent = [number for kind, *_, number in events if kind == "sent"]
        assert len(sent) == row["headers"]
        assert sent == list(range(1, len(sent) + 1))
        if way == "iterate":
            assert kinds == Counter(announced=own, dummy=others, ran=longest)
            steps = [(what, number) for kind, _, _, what, number in events if kind == "step"]
            assert steps == [("data" if step < own else "dummy", step + 1) for step in range(longest)]
        else:
            assert kinds == Counter(announced=own, ran=own, shadowed=others)
            (drained,) = (event for event in events if event[0] == "drained")
            assert drained[1] == pytest.approx(row["joined_at"], abs=0.05)


def fail_in_backward(rank: int, path: str) -> None:
    """Rank 1 raises in the middle of its second backward."""
    model = DistributedDataParallel(build("mlp"))
    backwards = 0

    def count(gradient: torch.Tensor) -> None:
        nonlocal backwards
        backwards += 1
        if (rank, backwards) == (1, 2):
            raise ValueError("oh no")

    next(model.parameters()).register_hook(count)
    with Join([model]) as join:
        join.trace(path)
        for step in range(COUNTS[rank]):
            model.zero_grad()
            model(batch(rank, 0, step)[0]).sum().backward()


def test_a_rank_that_fails_in_a_burst_has_written_that(ending: Ending, tmp_path: Path) -> None:
    ends = ending.ends(fail_in_backward, str(tmp_path / "run.json"))
    assert all(end.code for end in ends)
    told = [json.loads((tmp_path / f"run.rank{rank}.json").read_text()) for rank in range(3)]
    assert told[1]["error"] == "ValueError: oh no"
    for rank in (0, 2):
        assert told[rank]["error"].startswith("PeerError: rank 1 failed: ValueError: oh no")
    for part in told:
        backward = part["joinables"].index("the backward of DistributedDataParallel(MLP)")
        assert [kind for kind, _, _, what, _ in part["events"] if what == backward and kind == "unfinished"]
