"""``join.weight`` that makes no sense is an error on all ranks, and the group works afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join, PeerError
from tests.models import TOLERANCE, batch, build
from tests.pool import Pool


def outcome(rank: int, weights: tuple[tuple[Any, ...], ...], initial: bool = True) -> str:
    """Train with ``weights[rank]``, one a step, and tell how it ended."""
    ddp = DistributedDataParallel(build("mlp"))
    text = "fine"
    try:
        with Join([ddp], divide_by_initial_world_size=initial) as join:
            for step, weight in enumerate(weights[rank]):
                join.weight = weight
                ddp.zero_grad()
                ddp(batch(rank, 0, step)[0]).sum().backward()
    except (ValueError, TypeError, PeerError) as error:
        text = f"{type(error).__name__}: {error}"
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    return text


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", True])
def test_a_bad_weight_on_one_rank(pool: Pool, weight: Any) -> None:
    first, second = pool.run(outcome, ((2, 2), (2, weight)), ranks=2)
    assert f"weight={weight!r} must be" in second
    assert first.startswith("PeerError: rank 1 failed: ")
    assert f"weight={weight!r} must be" in first


def test_weight_0_on_some_ranks(pool: Pool) -> None:
    assert pool.run(outcome, ((2, 0), (0, 3, 1)), ranks=2) == ["fine", "fine"]


def has_nan(rank: int) -> float:
    """A rank whose batch counts for nothing, as an empty one does, of which the mean is NaN."""
    ddp = DistributedDataParallel(build("mlp"))
    with Join([ddp]) as join:
        join.weight = 0 if rank else 5
        (ddp(batch(0, 0, 0)[0]).mean() * (float("nan") if rank else 1.0)).backward()
    return sum(parameter.grad.abs().sum().item() for parameter in ddp.parameters())


def test_weight_0_of_a_gradient_that_is_no_number(pool: Pool) -> None:
    model = build("mlp")
    model(batch(0, 0, 0)[0]).mean().backward()
    expected = sum(parameter.grad.abs().sum().item() for parameter in model.parameters())
    assert pool.run(has_nan, ranks=2) == pytest.approx([expected] * 2, abs=1e-4)


def test_weight_0_on_all_ranks(pool: Pool) -> None:
    for text in pool.run(outcome, ((2, 0), (1, 0), ()), ranks=3):
        assert text == "ValueError: join.weight is 0 on all ranks at once, so their gradients have no mean"


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("weights", [(2, 2), (None, 2)])
def test_weight_on_one_rank_only(pool: Pool, weights: tuple[int | None, int], initial: bool) -> None:
    first, second, third = pool.run(outcome, ((None, None), weights, ()), initial, ranks=3)
    assert second.startswith("ValueError: join.weight is set on this rank and not on all others")
    assert first.startswith("PeerError: rank 1 failed")
    assert third.startswith("PeerError: rank 1 failed")


def keeps_gradients(rank: int, accumulate: int) -> list[torch.Tensor]:
    """Add one reduction's result to the last one's, as a loop does that calls ``zero_grad`` before the epoch only."""
    ddp = DistributedDataParallel(build("mlp"))
    with Join([ddp]) as join:
        for step in range(COUNTS[rank] * accumulate):
            join.weight = 1 + rank + step
            with nullcontext() if (step + 1) % accumulate == 0 else ddp.no_sync():
                ddp(batch(rank, 0, step)[0]).pow(2).mean().backward()
    return [parameter.grad for parameter in ddp.parameters()]


COUNTS = (3, 1, 0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_are_kept(pool: Pool, accumulate: int) -> None:
    model = build("mlp")
    for window in range(3):
        parts = [
            (rank, step)
            for rank in range(3)
            if window < COUNTS[rank]
            for step in range(window * accumulate, (window + 1) * accumulate)
        ]
        total = sum(1 + rank + step for rank, step in parts)
        for rank, step in parts:
            (model(batch(rank, 0, step)[0]).pow(2).mean() * (1 + rank + step) / total).backward()
    for gradients in pool.run(keeps_gradients, accumulate, ranks=3):
        for ours, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, atol=TOLERANCE, rtol=0)
