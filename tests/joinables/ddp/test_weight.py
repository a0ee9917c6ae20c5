"""``join.weight`` in a plain block: where it makes no sense, it is an error on all ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.ending import Ending
from tests.harness import Pool, all_or_each
from tests.training import TOLERANCE, assert_same, batch, build, flat_state


def outcome(rank: int, weights: tuple[tuple[Any, ...], ...], kept: bool = False, initial: bool = True) -> str:
    """Train with ``weights[rank]``, one a step, and tell how it ended."""
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    try:
        with Join([ddp, optimizer], divide_by_initial_world_size=initial) as join:
            for step, weight in enumerate(weights[rank]):
                join.weight = weight
                if not kept:
                    ddp.zero_grad()
                join.scale(ddp(batch(rank, 0, step)[0]).sum()).backward()
                optimizer.step()
    except (ValueError, TypeError, JoinError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", True])
def test_a_bad_weight_on_one_rank(ending: Ending, weight: Any) -> None:
    first, second, third = ending.run(outcome, ((2, 2, 2), (2, weight, 2), ()))
    assert f"join.weight={weight!r}" in second
    for text in (first, third):
        assert text.startswith(f"PeerError: rank 1 failed: {second}")


@pytest.mark.parametrize("weights", [((2, 0), (0, 3, 1), ()), ((2, 0), (1, 0), ())])
def test_weight_0(pool: Pool, weights: Any) -> None:
    assert pool.run(outcome, weights) == ["fine"] * 3


def has_nan(rank: int, hooked: bool) -> float:
    """A rank whose batch counts for nothing, as an empty one does, of which the mean is NaN."""
    ddp = DistributedDataParallel(build("mlp"))
    if hooked:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with Join([ddp]) as join:
        join.weight = 0 if rank else 5
        join.scale(ddp(batch(0, 0, 0)[0]).mean() * (float("nan") if rank else 1.0)).backward()
    return sum(parameter.grad.abs().sum().item() for parameter in ddp.parameters())


@pytest.mark.parametrize("hooked", [False, True])
def test_weight_0_of_a_gradient_that_is_no_number(pool: Pool, hooked: bool) -> None:
    model = build("mlp")
    model(batch(0, 0, 0)[0]).mean().backward()
    expected = sum(parameter.grad.abs().sum().item() for parameter in model.parameters())
    assert pool.run(has_nan, hooked, ranks=2) == pytest.approx([expected] * 2, abs=1e-4)


ON_SOME = "ValueError: join.weight is set on 1 ranks and not on 1. Set it on all ranks or on none. [J277]"
CHANGES = [((2, None, 2), (2, 2, 2), ()), ((None, 2, None), (None, None, None), ())]


@pytest.mark.parametrize(
    ("weights", "kept", "initial"),
    all_or_each(
        product([((None, None), (2, 2), ()), ((None, None), (None, 2), ()), *CHANGES], [True, False], [True, False])
    ),
)
def test_weight_on_one_rank_only(ending: Ending, weights: Any, kept: bool, initial: bool) -> None:
    texts = ending.run(outcome, weights, kept, initial)
    assert ON_SOME in texts
    for text in texts:
        assert ON_SOME in text


def begins_to_weigh(rank: int, counts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """All ranks weigh in the third step of a plain loop, and not before, nor in the fourth."""
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for step in range(counts[rank]):
            join.weight = 1 + rank if step == 2 else None
            optimizer.zero_grad()
            join.scale(ddp(batch(rank, 0, step)[0]).pow(2).mean()).backward()
            optimizer.step()
    return flat_state(ddp.module.state_dict())


@pytest.mark.parametrize("counts", [(4, 2, 4), (1, 4, 3), (3, 4, 0)])
def test_weight_that_is_set_and_unset_on_all_ranks(pool: Pool, counts: tuple[int, ...]) -> None:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        weights = {rank: 1 + rank if step == 2 else 1 for rank in range(3) if counts[rank] > step}
        optimizer.zero_grad()
        for rank, weight in weights.items():
            (model(batch(rank, 0, step)[0]).pow(2).mean() * weight / sum(weights.values())).backward()
        optimizer.step()
    for state in pool.run(begins_to_weigh, counts):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)


def changes_in_a_window(rank: int, weights: tuple[Any, ...]) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp]) as join:
            for step in range(4):
                join.weight = weights[step] if rank == 1 else 2
                with nullcontext() if step % 2 else ddp.no_sync():
                    join.scale(ddp(batch(rank, 0, step)[0]).pow(2).mean()).backward()
                if step % 2:
                    ddp.zero_grad()
    except (ValueError, JoinError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("weights", [(2, None, 2, 2), (None, 2, 2, 2), (2, 2, 2, None)])
def test_weight_that_is_set_or_unset_in_a_window(ending: Ending, weights: Any) -> None:
    first, second = ending.run(changes_in_a_window, weights, ranks=2)
    assert second.startswith("JoinError: join.weight ")
    assert first == ON_SOME or first.startswith(f"PeerError: rank 1 failed: {second}")


def weighs_late(rank: int) -> str:
    """Set the weight between forward and backward, in the first step."""
    ddp = DistributedDataParallel(build("norm"))
    try:
        with Join([ddp], divide_by_initial_world_size=False) as join:
            loss = ddp(batch(rank, 0, 0)[0]).pow(2).mean()
            join.weight = 1 + 3 * rank
            join.scale(loss).backward()
    except JoinError as error:
        return str(error)
    return "fine"


def test_weight_that_is_set_after_the_forward(ending: Ending) -> None:
    for text in ending.run(weighs_late, ranks=2):
        assert "join.weight was set or unset between forward and backward, or " in text
        assert "Set it before the forward" in text


def weighs_another_loss(rank: int, how: str) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp]) as join:
            for _ in range(2 - 2 * rank):
                losses = list[torch.Tensor]()
                for step in range(2):
                    join.weight = 1 + step * (how != "equal")
                    losses.append(join.scale(ddp(batch(rank, 0, step)[0]).pow(2).mean()))
                    join.weight = 3 if how == "late" else join.weight
                (losses[0] + losses[1] if how != "late" else losses[1]).backward()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("how", ["equal", "late", "two losses"])
def test_a_weight_that_is_not_the_weight_of_the_loss(ending: Ending, how: str) -> None:
    for text in ending.run(weighs_another_loss, how, ranks=2):
        assert text == "fine" if how == "equal" else "does not match the scaling of the loss" in text


def keeps_gradients(rank: int, accumulate: int) -> list[torch.Tensor]:
    """Add one reduction's result to the last one's, as a loop does that calls ``zero_grad`` before the epoch only."""
    ddp = DistributedDataParallel(build("mlp"))
    with Join([ddp]) as join:
        for step in range(COUNTS[rank] * accumulate):
            join.weight = 1 + rank + step
            with nullcontext() if (step + 1) % accumulate == 0 else ddp.no_sync():
                join.scale(ddp(batch(rank, 0, step)[0]).pow(2).mean()).backward()
    return [parameter.grad for parameter in ddp.parameters()]  # pyright: ignore[reportReturnType]


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


def test_weight_on_one_of_two_ranks_with_data(ending: Ending) -> None:
    """No third rank shadows the reduction and finds it out."""
    for text in ending.run(outcome, ((2, 2), (2, None)), ranks=2):
        assert ON_SOME in text


def train_many(batches: Any, rank: int, ranks: int) -> Any:
    """More modules than a lane of shared memory has places, whose weights are all summed before one sum is read."""
    ddps = [DistributedDataParallel(torch.nn.Linear(5, 2)) for _ in range(7)]
    optimizer = torch.optim.Adam([parameter for ddp in ddps for parameter in ddp.parameters()])
    with Join([*ddps, optimizer], divide_by_initial_world_size=False) as join:
        for x in batches:
            join.weight = len(x)
            optimizer.zero_grad()
            join.scale(torch.stack([ddp(x).square().mean() for ddp in ddps]).sum()).backward()
            optimizer.step()
    return [ddp.module.state_dict() for ddp in ddps]


def test_many_modules_in_one_backward(equals_one_process: Callable[..., None]) -> None:
    batches = [torch.randn(size, 5) for size in (3, 1, 4, 2, 5, 2)]
    equals_one_process(train_many, batches, counts=[(5, 0, 1)])


class Either(torch.nn.Module):
    """Two layers, of which each batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([build("mlp"), build("mlp")])

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.layers[index](x)


def only_weight_0_uses(rank: int, iterates: bool) -> dict[str, torch.Tensor]:
    """Only a batch of weight 0 uses one of the layers, whose weights decay nevertheless."""
    ddp = DistributedDataParallel(Either(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, weight_decay=0.5)
    rows = [(batch(rank, 0, 0)[0], rank)] if rank < 2 else []
    with Join([ddp, optimizer]) as join:
        for x, index in join.iterate(rows, weigh=operator.itemgetter(1), dummy="last") if iterates else rows:
            if not iterates:
                join.weight = index
            optimizer.zero_grad()
            join.scale(ddp(x, index).pow(2).mean()).backward()
            optimizer.step()
    return flat_state(ddp.module.state_dict())


@pytest.mark.parametrize("iterates", [False, True])
def test_a_parameter_that_only_a_batch_of_weight_0_uses(pool: Pool, iterates: bool) -> None:
    model = Either()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    losses = [model(batch(rank, 0, 0)[0], rank).pow(2).mean() for rank in range(2)]
    (0 * losses[0] + losses[1]).backward()
    optimizer.step()
    for state in pool.run(only_weight_0_uses, iterates):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)
