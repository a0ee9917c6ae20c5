"""``join.weight`` that makes no sense is an error on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.ending import Ending, assert_blamed
from tests.models import TOLERANCE, assert_same, batch, build, flat_state
from tests.pool import Pool
from tests.training import shard


def outcome(
    rank: int, weights: tuple[tuple[Any, ...], ...], way: str = "plain", kind: str = "ddp", initial: bool = True
) -> str:
    """Train with ``weights[rank]``, one a step, and tell how it ended."""
    trained: Any = DistributedDataParallel(build("mlp")) if kind == "ddp" else shard()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    text = "fine"
    try:
        join = Join([trained, optimizer], divide_by_initial_world_size=initial)
        with join:
            mine = [(batch(rank, 0, step)[0], weight) for step, weight in enumerate(weights[rank])]
            for x, weight in join.iterate(mine) if way == "lockstep" else mine:
                join.weight = weight
                if way != "kept":
                    trained.zero_grad()
                trained(x).sum().backward()
                optimizer.step()
    except (ValueError, TypeError, JoinError) as error:
        text = f"{type(error).__name__}: {error}"
    return text


WAYS = ["plain", "lockstep"]
KINDS = ["ddp", "sharded"]
every_way = pytest.mark.parametrize(("way", "kind"), [(way, kind) for way in WAYS for kind in KINDS])


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", True])
def test_a_bad_weight_on_one_rank(ending: Ending, weight: Any) -> None:
    first, second = ending.run(outcome, ((2, 2), (2, weight)), ranks=2)
    assert f"weight={weight!r} must be" in second
    assert first.startswith("PeerError: rank 1 failed: ")
    assert f"weight={weight!r} must be" in first


@pytest.mark.parametrize(("way", "kind"), [("plain", "sharded"), ("lockstep", "ddp")])
def test_a_bad_weight_wherever_it_is_set(ending: Ending, way: str, kind: str) -> None:
    first, second, third = ending.run(outcome, ((2, 2, 2), (2, -1, 2), ()), way, kind)
    assert second.startswith("ValueError: weight=-1 must be")
    for text in (first, third):
        assert text.startswith(f"PeerError: rank 1 failed: {second}")


@every_way
def test_weight_0_on_some_ranks(pool: Pool, way: str, kind: str) -> None:
    assert pool.run(outcome, ((2, 0), (0, 3, 1), ()), way, kind) == ["fine"] * 3


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


@every_way
def test_weight_0_on_all_ranks(ending: Ending, way: str, kind: str) -> None:
    told = "ValueError: join.weight is 0 on all ranks at once, so their gradients have no mean; "
    texts = ending.run(outcome, ((2, 0), (1, 0), ()), way, kind)
    assert any(text.startswith(told) for text in texts)
    assert all(told in text for text in texts)  # who sees others leave first says that of them


ON_SOME = "ValueError: join.weight is set on 1 ranks and not on 1; set it on all ranks or on none [J277]"


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("weights", [(2, 2), (None, 2)])
def test_weight_on_one_rank_only(ending: Ending, weights: tuple[int | None, int], initial: bool) -> None:
    assert_blamed(ending.run(outcome, ((None, None), weights, ()), "plain", "ddp", initial), 1, ON_SOME)


@pytest.mark.parametrize(("way", "kind"), [("plain", "sharded"), *[("lockstep", kind) for kind in KINDS]])
def test_weight_on_one_rank_only_where_all_see_it(ending: Ending, way: str, kind: str) -> None:
    assert ending.run(outcome, ((None, None), (2, 2), ()), way, kind)[:2] == [ON_SOME] * 2


IN_THE_LOOP = "ValueError: join.weight was set or unset inside the loop; set it at every step or at none [J276]"
CHANGES = [((2, None, 2), (2, 2, 2), ()), ((None, 2, None), (None, None, None), ())]


@pytest.mark.parametrize(
    ("way", "kind", "weights"),
    [("lockstep", "ddp", CHANGES[0]), ("lockstep", "ddp", CHANGES[1]), ("lockstep", "sharded", CHANGES[1])],
)
def test_weight_that_is_set_or_unset_in_a_loop_in_lockstep(ending: Ending, way: str, kind: str, weights: Any) -> None:
    first, *others = ending.run(outcome, weights, way, kind)
    assert first == IN_THE_LOOP
    for text in others:
        assert text.startswith(f"PeerError: rank 0 failed: {first}")


def test_weight_that_all_unset_in_a_loop_in_lockstep(ending: Ending) -> None:
    first, second, third = ending.run(outcome, ((2, None), (2, None), ()), "lockstep")
    assert first == second == IN_THE_LOOP
    assert third.startswith(f"PeerError: rank 0 failed: {first}")


@pytest.mark.parametrize("weights", CHANGES)
def test_weight_that_is_set_or_unset_in_a_plain_loop(ending: Ending, weights: Any) -> None:
    assert_blamed(ending.run(outcome, weights), 0, ON_SOME)
    for text in ending.run(outcome, weights, "plain", "sharded"):
        assert ON_SOME in text


def begins_to_weigh(rank: int, counts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """All ranks weigh in the third step of a plain loop, and not before, nor in the fourth."""
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for step in range(counts[rank]):
            join.weight = 1 + rank if step == 2 else None
            optimizer.zero_grad()
            ddp(batch(rank, 0, step)[0]).pow(2).mean().backward()
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


def changes_in_a_window(rank: int, way: str, weights: tuple[Any, ...]) -> str:
    ddp, text = DistributedDataParallel(build("mlp")), "fine"
    try:
        with Join([ddp]) as join:
            for step in join.iterate(range(4)) if way == "lockstep" else range(4):
                join.weight = weights[step] if rank == 1 else 2
                with nullcontext() if step % 2 else ddp.no_sync():
                    ddp(batch(rank, 0, step)[0]).pow(2).mean().backward()
                if step % 2:
                    ddp.zero_grad()
    except (ValueError, JoinError) as error:
        text = f"{type(error).__name__}: {error}"
    return text


WINDOWS = [(2, None, 2, 2), (None, 2, 2, 2), (2, 2, 2, None)]


@pytest.mark.parametrize("weights", WINDOWS)
def test_weight_that_is_set_or_unset_in_a_window(ending: Ending, weights: Any) -> None:
    first, second = ending.run(changes_in_a_window, "plain", weights, ranks=2)
    assert second.startswith("ValueError: join.weight ")
    assert first.removeprefix("PeerError: rank 1 failed: ").startswith("ValueError: join.weight ")


@pytest.mark.parametrize("weights", WINDOWS[1:])
def test_weight_that_is_set_or_unset_in_a_window_in_lockstep(ending: Ending, weights: Any) -> None:
    first, second = ending.run(changes_in_a_window, "lockstep", weights, ranks=2)
    assert second.startswith("ValueError: join.weight ")
    assert first.removeprefix("PeerError: rank 1 failed: ").startswith("ValueError: join.weight ")


def weighs_late(rank: int, way: str) -> float:
    """Set the weight between forward and backward, in the first step."""
    ddp = DistributedDataParallel(build("mlp"))
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for step in join.iterate(range(1)) if way == "lockstep" else range(1):
            loss = ddp(batch(rank, 0, step)[0]).pow(2).mean()
            join.weight = 1 + 3 * rank
            loss.backward()
    return sum(parameter.grad.abs().sum().item() for parameter in ddp.parameters())


@pytest.mark.parametrize("way", ["plain", "lockstep"])
def test_weight_that_is_set_after_the_forward(pool: Pool, way: str) -> None:
    model = build("mlp")
    for rank in range(2):
        (model(batch(rank, 0, 0)[0]).pow(2).mean() * (1 + 3 * rank) / 5).backward()
    expected = sum(parameter.grad.abs().sum().item() for parameter in model.parameters())
    assert pool.run(weighs_late, way, ranks=2) == pytest.approx([expected] * 2, abs=1e-5)


@pytest.mark.parametrize("weights", CHANGES)
def test_weight_that_is_set_or_unset_while_gradients_are_kept(ending: Ending, weights: Any) -> None:
    assert_blamed(ending.run(outcome, weights[:2], "kept", ranks=2), 0, ON_SOME)


def keeps_gradients(rank: int, accumulate: int) -> list[torch.Tensor]:
    """Add one reduction's result to the last one's, as a loop does that calls ``zero_grad`` before the epoch only."""
    ddp = DistributedDataParallel(build("mlp"))
    with Join([ddp]) as join:
        for step in range(COUNTS[rank] * accumulate):
            join.weight = 1 + rank + step
            with nullcontext() if (step + 1) % accumulate == 0 else ddp.no_sync():
                ddp(batch(rank, 0, step)[0]).pow(2).mean().backward()
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
