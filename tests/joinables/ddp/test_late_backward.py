"""Backwards that run after the loop body has read the next batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.ending import Ending
from tests.harness import Pool
from tests.training import batch, build

COUNTS = 3, 4, 0


def train(rank: int, how: str, window: int) -> str:
    """Read the next batch between forward and backward, or, in a window, run all its backwards in its last step."""
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses: list[Any] = []
    try:
        with Join([ddp, optimizer]) as join:
            batches = iter(join.iterate([batch(rank, 0, step) for step in range(COUNTS[rank])], window=window))
            pair = next(batches, None)
            while pair is not None:
                losses.append(ddp(pair[0]).square().mean())
                if how == "at once":
                    pair = next(batches, None)
                else:
                    losses[-1] = join.scale(losses[-1])
                if how == "at once" or join.ends_window:
                    sum(losses).backward()  # type: ignore[union-attr]
                    losses.clear()
                    optimizer.step()
                    optimizer.zero_grad()
                if how != "at once":
                    pair = next(batches, None)
    except JoinError as error:
        return str(error)
    return "fine"


def test_the_next_batch_is_read_too_early(ending: Ending) -> None:
    for text in ending.run(train, "at once", 1):
        assert "ran in step 2 of join.iterate, but its forward ran in step 1" in text


@pytest.mark.parametrize("window", [1, 2])
def test_all_losses_of_a_window_run_backward_in_its_last_step(pool: Pool, window: int) -> None:
    assert pool.run(train, "together", window) == ["fine"] * 3
