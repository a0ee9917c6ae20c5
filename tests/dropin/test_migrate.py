"""The loops of docs/convert.md that replace others end where one process ends."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import join
from tests.harness import Pool
from tests.training import (
    TOLERANCE,
    Case,
    Data,
    Loop,
    Optimizer,
    Step,
    assert_same,
    build,
    flat_state,
    loss_of,
    optimizer_of,
    reference,
)

TEXT = (Path(join.__file__).parent.parent / "docs" / "convert.md").read_text()
LOOPS = {
    heading: [
        "\n".join(line[1:] for line in diff.splitlines() if line[:1] != other)
        for diff in re.findall(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        for other in "+-"
    ]
    for heading, section in re.findall(r"^### (From .*?)$(.*?)(?=^##+ |\Z)", TEXT, re.DOTALL | re.MULTILINE)
}
"""The loops of each section, before and after the change that it shows."""
BEFORE, AFTER = 0, 1


def follow(rank: int, code: str, case: Case) -> dict[str, torch.Tensor]:
    """Run a loop of the document."""
    model = build(case.model.kind)
    optimizer = optimizer_of(case.optimizer, model)
    names: dict[str, Any] = {"Join": join.Join, "DistributedDataParallel": DistributedDataParallel, "dist": dist}
    names |= {"torch": torch, "optimizer": optimizer}
    names["model"] = model if "DistributedDataParallel(" in code else DistributedDataParallel(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(names["model"], case, 0, 0, (x, y)).backward()
        optimizer.step()

    names |= {"step": step, "loader": [case.data.batch(rank, 0, at) for at in range(case.data.counts[0][rank])]}
    exec(code, names)
    assert len(names.get("unused", [])) <= 1
    return flat_state(model.state_dict())


CONSTANT = Optimizer(decay=1.0)  # its learning rate
STOPS = Case(optimizer=CONSTANT, data=Data(((2, 4, 3),)), loop=Loop(iterate="empty", until="first"))


@pytest.mark.parametrize(
    ("heading", "which", "case"),
    [
        (
            "From Horovod's `join`",
            AFTER,
            Case(optimizer=CONSTANT, data=Data(((0, 3, 1),)), step=Step(initial=True)),
        ),
        ("From loops that stop together", BEFORE, STOPS),
        ("From loops that stop together", AFTER, STOPS),
        ("From loops that stop together", AFTER, replace(STOPS, data=Data(((0, 1, 2),)))),
    ],
)
def test_loop(pool: Pool, heading: str, which: int, case: Case) -> None:
    expected = {path: value for path, value in reference(case).items() if path.startswith("0.")}
    for state in pool.run(follow, LOOPS[heading][which], case, ranks=3):
        assert_same(state, expected, TOLERANCE)
