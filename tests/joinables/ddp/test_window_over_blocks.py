"""A window of accumulation that begins in one block and ends in the next, against one process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.ending import Ending
from tests.harness import Pool, all_or_each
from tests.training import TOLERANCE, assert_same, batch, build

COUNTS = ((1, 1, 0), (1, 1, 0))
KINDS = ["all ranks", "contributors", "weights", "weights, after a reduction", "weights, on a result"]
CLEARED = {"kept": None, "zeroed in place": False, "set to None": True}


def loss_of(module: torch.nn.Module, rank: int, block: int) -> torch.Tensor:
    x, y = batch(rank, block, 0)
    return ((module(x) - y) ** 2).mean()


def weight_of(rank: int, block: int) -> float:
    return 2.0 + 3 * rank + 4 * block


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def train(rank: int, cleared: str, kind: str, validates: bool, net: str) -> dict[str, torch.Tensor]:
    model = build(net)
    ddp = DistributedDataParallel(model)
    for block, counts in enumerate(COUNTS):
        with Join([ddp], divide_by_initial_world_size=kind != "contributors") as join:
            if kind in ("weights, after a reduction", "weights, on a result") and block == 0:  # it chooses their unit
                join.weight = weight_of(rank, block)
                join.scale(loss_of(ddp, rank, block)).backward()
                if kind == "weights, after a reduction":
                    ddp.zero_grad()
            for _ in range(counts[rank]):
                if kind.startswith("weights"):
                    join.weight = weight_of(rank, block)
                ddp.require_backward_grad_sync = block == 1
                join.scale(loss_of(ddp, rank, block)).backward()
        if block == 0 and validates:
            with Join([ddp]) as join, torch.no_grad():
                for step in join.iterate(range(rank)):  # on rank 0, dummies alone
                    loss_of(ddp, rank, step)
        if block == 0 and CLEARED[cleared] is not None:
            ddp.zero_grad(set_to_none=bool(CLEARED[cleared]))
    return gradients(model)


@pytest.mark.parametrize(
    ("kind", "cleared", "validates", "net"),
    all_or_each(
        (kind, cleared, *how)
        for kind, cleared in product(KINDS, CLEARED)
        for how in [(False, "mlp"), (True, "mlp"), (False, "norm")]
    ),
)
def test_equals_one_process(pool: Pool, cleared: str, kind: str, validates: bool, net: str) -> None:
    """A module with buffers sends a header of another burst before the first backward of a block."""
    model = build(net)
    begins = 0 if CLEARED[cleared] is None else 1
    of_window = [(rank, block) for block in range(begins, 2) for rank in range(3) if COUNTS[block][rank]]
    weights = [weight_of(*each) if kind.startswith("weights") else 1.0 for each in of_window]
    parts = {"all ranks": 3.0, "contributors": len({rank for rank, _ in of_window})}.get(kind, sum(weights))
    for weight, each in zip(weights, of_window, strict=True):
        (loss_of(model, *each) * weight / parts).backward()
    if kind == "weights, on a result" and CLEARED[cleared] is None:
        for rank in range(3):
            (loss_of(model, rank, 0) * weight_of(rank, 0) / sum(weight_of(each, 0) for each in range(3))).backward()
    for found in pool.run(train, cleared, kind, validates, net, ranks=3):
        assert_same(found, gradients(model), TOLERANCE)


def keeps_a_result(rank: int, net: str, cleared: str, over_all_ranks: bool, third: bool) -> dict[str, torch.Tensor]:
    """The result of a reduction is still in the gradients when the window begins that is open between the blocks.

    ``third`` says whether the third rank has data in the second block.
    """
    model = build(net)
    ddp = DistributedDataParallel(model)
    for block, counts in enumerate(COUNTS):
        with Join([ddp], divide_by_initial_world_size=over_all_ranks):
            if block == 0:
                loss_of(ddp, rank, 2).backward()
            for _ in range(counts[rank] or (third and block)):
                ddp.require_backward_grad_sync = block == 1
                loss_of(ddp, rank, block).backward()
        if block == 0 and CLEARED[cleared] is not None:
            ddp.zero_grad(set_to_none=bool(CLEARED[cleared]))
    return gradients(model)


@pytest.mark.parametrize(
    ("net", "cleared", "over_all_ranks", "third"),
    all_or_each(
        (*how, *over)
        for how in product(["mlp", "norm"], CLEARED)
        for over in [(True, True), (True, False), (False, False)]
    ),
)
def test_a_result_under_the_window(pool: Pool, net: str, cleared: str, over_all_ranks: bool, third: bool) -> None:
    model, parts = build(net), 3 if over_all_ranks else 2
    for rank in range(3 if CLEARED[cleared] is None else 0):
        (loss_of(model, rank, 2) / 3).backward()
    for block in range(0 if CLEARED[cleared] is None else 1, 2):
        for rank in range(3 if third and block else 2):
            (loss_of(model, rank, block) / parts).backward()
    for found in pool.run(keeps_a_result, net, cleared, over_all_ranks, third, ranks=3):
        assert_same(found, gradients(model), TOLERANCE)


def leaves_a_window(rank: int) -> dict[str, torch.Tensor]:
    """Both ranks accumulate in the first block, and rank 1 has no data in the second."""
    model = build("mlp")
    ddp = DistributedDataParallel(model)
    for block in range(2):
        with Join([ddp], divide_by_initial_world_size=False):
            for _ in range(1 - rank * block):
                ddp.require_backward_grad_sync = block == 1
                loss_of(ddp, rank, block).backward()
    return gradients(model)


def test_a_window_that_a_rank_without_data_brings_is_dropped(pool: Pool) -> None:
    model = build("mlp")
    for block in range(2):
        loss_of(model, 0, block).backward()
    for found in pool.run(leaves_a_window, ranks=2):
        assert_same(found, gradients(model), TOLERANCE)


def joins_a_window(rank: int, net: str, over_all_ranks: bool) -> dict[str, torch.Tensor]:
    """Rank 1 has no data in the first block, in which rank 0 accumulates, and both have some in the second."""
    model = build(net)
    ddp = DistributedDataParallel(model)
    for block in range(2):
        with Join([ddp], divide_by_initial_world_size=over_all_ranks):
            for _ in range(block or 1 - rank):
                ddp.require_backward_grad_sync = block == 1
                loss_of(ddp, rank, block).backward()
    return gradients(model)


@pytest.mark.parametrize("over_all_ranks", [True, False])
@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_a_window_that_a_rank_without_data_joins_later(pool: Pool, net: str, over_all_ranks: bool) -> None:
    """Headers of ranks with buffers go out where gradients are ``None``, so they must be ``None`` on both."""
    model = build(net)
    for rank, block in ((0, 0), (0, 1), (1, 1)):
        (loss_of(model, rank, block) / 2).backward()
    for found in pool.run(joins_a_window, net, over_all_ranks, ranks=2):
        assert_same(found, gradients(model), TOLERANCE)


def runs_out_in_a_window(rank: int, over_all_ranks: bool) -> dict[str, torch.Tensor]:
    """Both ranks accumulate over two blocks. In the second, rank 1 has one backward, and only rank 0 synchronises."""
    model = build("mlp")
    ddp = DistributedDataParallel(model)
    for block in range(2):
        with Join([ddp], divide_by_initial_world_size=over_all_ranks):
            for step in range(1 + (block == 1 and rank == 0)):
                ddp.require_backward_grad_sync = step == 1
                loss_of(ddp, rank, block + step).backward()
    return gradients(model)


@pytest.mark.parametrize("over_all_ranks", [True, False])
def test_a_window_of_two_blocks_in_which_a_rank_runs_out(pool: Pool, over_all_ranks: bool) -> None:
    model = build("mlp")
    for rank, block in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        (loss_of(model, rank, block) / 2).backward()
    for found in pool.run(runs_out_in_a_window, over_all_ranks, ranks=2):
        assert_same(found, gradients(model), TOLERANCE)


def brings_a_window(rank: int, cleared: str) -> str:
    """Accumulate in a plain block, and go on in a loop that does not know of it."""
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp]) as join:
            for _ in range(rank % 2):
                with ddp.no_sync():
                    loss_of(ddp, rank, 0).backward()
            if CLEARED[cleared] is not None:
                ddp.zero_grad(set_to_none=bool(CLEARED[cleared]))
            for _ in join.iterate(range(2)):
                loss_of(ddp, rank, 1).backward()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("cleared", CLEARED)
def test_a_window_that_is_brought_into_a_loop(ending: Ending, cleared: str) -> None:
    for text in ending.run(brings_a_window, cleared):
        assert "call zero_grad() between loops" in text if cleared == "kept" else text == "fine"


def leaves_a_loop(rank: int, one_block: bool) -> str:
    """A loop leaves gradients that are not reduced, and another loop begins."""
    ddp, data = DistributedDataParallel(build("mlp")), range(1 - rank)
    try:
        with Join([ddp]) as join:
            for _ in join.iterate(data):
                with ddp.no_sync():
                    join.scale(loss_of(ddp, rank, 0)).backward()
            if not one_block:
                join.close()
                join.open()
            for _ in join.iterate(data):
                join.scale(loss_of(ddp, rank, 1)).backward()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("one_block", [True, False])
def test_a_window_of_a_loop_is_not_that_of_the_next(ending: Ending, one_block: bool) -> None:
    for text in ending.run(leaves_a_loop, one_block):
        assert "call zero_grad() between loops" in text


def zeroes(rank: int, kind: str, to_none: bool) -> dict[str, torch.Tensor]:
    """A window that zero_grad drops, after which rank 1 has no more data."""
    model = build("mlp")
    ddp = DistributedDataParallel(model)
    with Join([ddp], divide_by_initial_world_size=kind != "contributors") as join:
        for block in range(2 - rank):
            if kind == "weights":
                join.weight = weight_of(rank, block)
            ddp.require_backward_grad_sync = block == 1
            join.scale(loss_of(ddp, rank, block)).backward()
            if block == 0:
                ddp.zero_grad(set_to_none=to_none)
    return gradients(model)


@pytest.mark.parametrize("kind", ["all ranks", "contributors", "weights"])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_window_that_is_dropped(pool: Pool, kind: str, to_none: bool) -> None:
    model = build("mlp")
    (loss_of(model, 0, 1) / (2.0 if kind == "all ranks" else 1.0)).backward()
    for found in pool.run(zeroes, kind, to_none, ranks=2):
        assert_same(found, gradients(model), TOLERANCE)
