"""Optimizers that nobody has listed: the last rank that has data warns where their state differs from now on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

from join import Join
from tests.models import batch, build
from tests.pool import Pool

COUNTS = (1, 3, 2)


class Everything:
    """Somebody's own object with state."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def state_dict(self) -> list[Any]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: list[Any]) -> None:
        for part, each in zip(self.parts, state, strict=True):
            part.load_state_dict(each)


def told(rank: int, how: str, counts: tuple[int, ...]) -> list[str]:
    """What is warned of, in a block with two modules."""
    ddp, other = (DistributedDataParallel(build("mlp")) for _ in range(2))
    cls, options = (torch.optim.SGD, {"momentum": 0.9}) if "momentum" in how else (torch.optim.Adam, {})
    if "plain SGD" in how:
        cls = torch.optim.SGD
    if "ZeRO" in how:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(ddp.parameters(), cls, lr=0.1)
    else:
        optimizer = cls(ddp.parameters(), lr=0.1, **options)
    mine = torch.optim.Adam(nn.Linear(2, 2).parameters()) if "of something else" in how else None
    listed: list[Any] = [ddp, other]
    if "listed" in how:
        listed.append(Everything(optimizer) if "in an object" in how else optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Join(listed) as join:
            steps = range(counts[rank])
            for step in join.iterate(steps, dummy="last") if "lockstep" in how else steps:
                optimizer.zero_grad()
                ddp(batch(rank, 0, step)[0]).sum().backward()
                optimizer.step()
                if mine is not None:
                    mine.step()
    assert not _global_optimizer_post_hooks
    return [str(each.message) for each in caught if "in the list" in str(each.message)]


@pytest.mark.parametrize("how", ["Adam", "momentum"])
def test_an_optimizer_that_is_forgotten(pool: Pool, how: str) -> None:
    first, second, third = pool.run(told, how, COUNTS)
    assert first == third == []
    (text,) = second
    assert text.startswith(f"{'SGD' if how == 'momentum' else 'Adam'} steps parameters of MLP and is not in the list")
    assert text.endswith("List it: Join([model, optimizer])")


@pytest.mark.parametrize(
    "how",
    [
        "Adam, listed",
        "ZeRO, listed",
        "Adam, listed in an object",
        "plain SGD",
        "Adam, lockstep",
        "Adam, listed, and one of something else",
    ],
)
def test_what_is_in_step(pool: Pool, how: str) -> None:
    assert pool.run(told, how, COUNTS) == [[]] * 3


def test_even_inputs(pool: Pool) -> None:
    assert pool.run(told, "Adam", (2, 2, 2)) == [[]] * 3
