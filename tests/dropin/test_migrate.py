"""The loops of docs/migrate.md end where one process ends."""

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
from tests.models import OPTIMIZERS, TOLERANCE, assert_same, build, flat_state
from tests.pool import Pool
from tests.training import Case, data_of, loss_of, reference

TEXT = (Path(join.__file__).parent.parent / "docs" / "migrate.md").read_text()
LOOPS = {
    heading: re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    for heading, section in re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
}
BEFORE, AFTER = 0, 1


def follow(rank: int, code: str, case: Case) -> dict[str, torch.Tensor]:
    """Run a loop of the document."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model: Any = build("mlp")
    parameters, (cls, options) = list(model.parameters()), OPTIMIZERS[case.optimizer]
    optimizer = ZeroRedundancyOptimizer(parameters, cls, **options) if case.zero else cls(parameters, **options)
    names: dict[str, Any] = {"Join": join.Join, "DistributedDataParallel": DistributedDataParallel, "dist": dist}
    names |= {"torch": torch, "optimizer": optimizer, "zero": optimizer}
    names["model"] = model if "DistributedDataParallel(" in code else DistributedDataParallel(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(names["model"], case, 0, (x, y)).backward()
        optimizer.step()

    names |= {"step": step, "loader": [data_of(case, rank, 0, at) for at in range(case.counts[0][rank])]}
    exec(code, names)
    assert len(names.get("unused", [])) <= 1
    return flat_state(model.state_dict())


STOPS = Case(counts=((2, 4, 3),), decay=1.0, iterate="empty", until="first")


@pytest.mark.parametrize(
    ("heading", "which", "case"),
    [
        ("From torch's `Join`", AFTER, Case(counts=((0, 3, 1),), decay=1.0, zero=True)),
        ("From `model.join()`", AFTER, Case(counts=((0, 3, 1),), decay=1.0)),
        ("From Horovod's `join`", AFTER, Case(counts=((0, 3, 1),), decay=1.0, initial=True)),
        ("From loops that stop together", BEFORE, STOPS),
        ("From loops that stop together", AFTER, STOPS),
        ("From loops that stop together", AFTER, replace(STOPS, counts=((0, 1, 2),))),
    ],
)
def test_loop(pool: Pool, heading: str, which: int, case: Case) -> None:
    expected = {path: value for path, value in reference(case).items() if path.startswith("0.")}
    for state in pool.run(follow, LOOPS[heading][which], case, ranks=3):
        assert_same(state, expected, TOLERANCE)
