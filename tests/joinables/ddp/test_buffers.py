"""Buffers that change between blocks, between a loop and what follows it, and inside a window of accumulation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join, PeerError, ProtocolError
from joinables import LossGate
from tests.ending import Ending
from tests.harness import Pool, in_test_all
from tests.training import batch, build
from tests.versions import OWN_BUFFERS

COUNTS = (0, 2, 1), (2, 1, 0)


def assert_statistics(results: list[dict[str, torch.Tensor]], batches: list[tuple[int, int]]) -> None:
    """All ranks have the statistics of a single process that has seen these batches, by rank and step."""
    alone = build("norm")
    for rank, step in batches:
        alone(batch(rank, 0, step)[0])
    for buffers in results:
        for name, expected in alone.named_buffers():
            torch.testing.assert_close(buffers[name], expected)


def train(rank: int) -> dict[str, torch.Tensor]:
    module = build("norm")
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, counts in enumerate(COUNTS):
        with Join([model, optimizer], divide_by_initial_world_size=False):
            for step in range(counts[rank]):
                x, y = batch(rank, epoch, step)
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
        module.register_buffer("calibration", torch.full((2,), float(rank)))
    return module.state_dict()


def test_a_buffer_that_is_new_in_the_second_block(pool: Pool) -> None:
    first, *others = pool.run(train)
    for state in others:
        del state["calibration"]  # registered anew on each rank at the end
        assert all(torch.equal(first[name], value) for name, value in state.items())


def break_before_no_sync(rank: int) -> None:
    model = DistributedDataParallel(build("norm"))
    x, y = batch(rank, 0, 0)
    with Join([model]) as join:
        for _ in join.iterate([0] * (3 - rank)):
            (model(x) - y).square().mean().backward()
            break
        with model.no_sync():  # its forward announces nothing, and saves statistics
            (model(x) - y).square().mean().backward()


def test_a_loop_that_was_left_ends_before_the_next_forward(pool: Pool) -> None:
    pool.run(break_before_no_sync, ranks=2)


class Grows(torch.nn.Module):
    """Keeps a number for each row of its longest batch."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.net, self.value = torch.nn.Linear(2, 2), value
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.seen):
            self.seen = torch.full((len(x),), self.value)
        return self.net(x)


def grow_in_a_window(rank: int) -> torch.Tensor:
    model = DistributedDataParallel(Grows(rank))
    with Join([model]) as join:
        for x in join.iterate([torch.ones(1, 2), *[torch.ones(3, 2)] * 3][: 4 - 2 * rank], window=4):
            with nullcontext() if join.ends_window else model.no_sync():
                join.scale(model(x).sum()).backward()
    return model.module.seen


def test_a_buffer_that_grows_on_all_ranks_before_one_runs_out_in_the_window(pool: Pool) -> None:
    for seen in pool.run(grow_in_a_window, ranks=2):
        assert seen.tolist() == [0.0] * 3


def grow_before_the_gate(rank: int) -> torch.Tensor:
    module = Grows(rank)
    model = DistributedDataParallel(LossGate(module))
    with Join([model], divide_by_initial_world_size=False):
        for step in range(1 + rank):
            model(module(torch.ones(1 + step, 2)).sum()).backward()
    return module.seen


def test_a_buffer_that_grows_before_a_loss_gate(pool: Pool) -> None:
    for seen in pool.run(grow_before_the_gate, ranks=2):
        assert seen.tolist() == [1.0] * 2


def accumulate_before_the_gate(rank: int) -> dict[str, torch.Tensor]:
    module = build("norm")
    model = DistributedDataParallel(LossGate(module))
    with Join([model]) as join:
        for x, y in join.iterate([batch(rank, 0, step) for step in range(1 + 2 * rank)], dummy="last", window=3):
            with nullcontext() if join.ends_window else model.no_sync():
                join.scale(model((module(x) - y).square().mean())).backward()
    return dict(module.named_buffers())


def test_statistics_of_a_window_before_a_loss_gate_follow_the_lowest_rank_with_data(pool: Pool) -> None:
    assert_statistics(pool.run(accumulate_before_the_gate, ranks=2), [(0, 0), (1, 1), (1, 2)])


def end_without_a_burst(rank: int, mode: str) -> dict[str, torch.Tensor]:
    module = build("norm")
    model = DistributedDataParallel(module)
    silent = torch.no_grad if mode == "no_grad" else model.no_sync
    batches = [batch(rank, 0, step) for step in range(2 + rank)]
    with Join([model]) as join:
        for step, (x, y) in enumerate(join.iterate(batches, dummy="last")):
            with silent() if step == 2 else nullcontext():
                loss = (model(x) - y).square().mean()
                if loss.requires_grad:
                    loss.backward()
            model.zero_grad()
    return dict(module.named_buffers())


@pytest.mark.parametrize("mode", ["no_grad", "no_sync"])
def test_statistics_of_a_last_step_without_a_reduction(pool: Pool, mode: str) -> None:
    assert_statistics(pool.run(end_without_a_burst, mode, ranks=2), [(0, 0), (0, 1), (1, 2)])


def skip_before_another_leads(rank: int, skipping: int) -> str:
    model = DistributedDataParallel(build("norm"))
    batches = [batch(rank, 0, step) for step in range(3 + 3 * rank)]
    # With lookahead=4, rank 1 begins to lead where no roll call lets ranks wait for each other.
    with pytest.raises((PeerError, ProtocolError)) as caught, Join([model]) as join:
        for step, (x, y) in enumerate(join.iterate(batches, lookahead=4)):
            if not (rank == skipping and step == 2):
                (model(x) - y).square().mean().backward()
    return str(caught.value)


@in_test_all
@pytest.mark.parametrize("skipping", [0, 1])
def test_a_skipped_step_before_another_rank_leads_is_named(pool: Pool, skipping: int) -> None:
    for text in pool.run(skip_before_another_leads, skipping, ranks=2, timeout=20):
        assert f"ank {skipping} skipped" in text and "[J093]" in text


def train_in_an_inner_block(rank: int) -> dict[str, torch.Tensor]:
    outer, module = DistributedDataParallel(build("mlp")), build("norm")
    inner = DistributedDataParallel(module)
    with Join([outer]) as join:
        for x, _ in join.iterate([batch(rank, 0, step) for step in range(1 + rank)], dummy="last"):
            with Join([inner]):
                with inner.no_sync():
                    inner(x).sum().backward()
                inner(x).sum().backward()
            inner.zero_grad()
    return dict(module.named_buffers())


def test_statistics_in_a_plain_block_inside_a_loop(pool: Pool) -> None:
    assert_statistics(pool.run(train_in_an_inner_block, ranks=2), [(0, 0), (0, 0), (1, 1), (1, 1)])


def train_around_an_inner_block(rank: int) -> dict[str, torch.Tensor]:
    """Only rank 1 has data in the inner block, which copies its state. All ranks have data in the steps after it."""
    module = build("norm")
    outer, inner = DistributedDataParallel(module), DistributedDataParallel(build("mlp"))
    with Join([outer]):
        for step in range(3):
            outer(batch(rank, 0, step)[0]).sum().backward()
            outer.zero_grad()
            if step == 0:
                with Join([inner]):
                    for _ in range(rank):
                        inner(batch(rank, 0, step)[0]).sum().backward()
    return dict(module.named_buffers())


def test_statistics_after_an_inner_block_that_another_rank_led(pool: Pool) -> None:
    assert_statistics(pool.run(train_around_an_inner_block, ranks=2), [(1, 0), (0, 1), (0, 2)])


def grow_without_grad(rank: int) -> str:
    model = DistributedDataParallel(Grows(0.0))
    batches = [torch.ones(length, 2) for length in ((1, 3), (1,), (1, 3, 3))[rank]]
    with pytest.raises((PeerError, ProtocolError)) as caught, torch.no_grad(), Join([model]) as join:
        for x in join.iterate(batches, dummy="last"):
            model(x)
    return str(caught.value)


def test_a_buffer_that_grows_without_grad_before_another_rank_leads_is_named(pool: Pool) -> None:
    for text in pool.run(grow_without_grad, timeout=20):
        assert "changed their shape while another rank had no data" in text and "[J444]" in text


def train_after_a_loop(rank: int) -> dict[str, torch.Tensor]:
    module = build("norm")
    model = DistributedDataParallel(module)
    with Join([model]) as join:
        for x, _ in join.iterate([batch(rank, 0, step) for step in range(1 + rank)], dummy="last"):
            model(x).sum().backward()
        for step in 2, 3:
            model(batch(rank, 0, step)[0]).sum().backward()
    return dict(module.named_buffers())


def test_statistics_of_plain_steps_after_a_loop(pool: Pool) -> None:
    assert_statistics(pool.run(train_after_a_loop, ranks=2), [(0, 0), (1, 1), (0, 2), (0, 3)])


def train_plainly(rank: int) -> dict[str, torch.Tensor]:
    module = build("norm")
    model = DistributedDataParallel(module)
    with Join([model], divide_by_initial_world_size=False):
        for step in range((1, 3, 4)[rank]):
            model(batch(rank, 0, step)[0]).sum().backward()
            model.zero_grad()
    return dict(module.named_buffers())


@pytest.mark.parametrize("over_group", [False, True])
def test_statistics_of_plain_steps_follow_the_lowest_rank_with_data(pool: Pool, over_group: bool) -> None:
    """Each of which leaves before the next one leads, also where no rank waits for the header that says so."""
    assert_statistics(pool.run(train_plainly, over_group=over_group), [(0, 0), (1, 1), (1, 2), (2, 3)])


def train_around_a_block_in_each_step(rank: int) -> dict[str, torch.Tensor]:
    """Rank 0 has fewer batches, and a block in the body of the loop is left in each step."""
    module = build("norm")
    model, other = DistributedDataParallel(module), DistributedDataParallel(torch.nn.Linear(2, 1))
    with Join([model], divide_by_initial_world_size=False) as join:
        for x, _ in join.iterate([batch(rank, 0, step) for step in range(2 + 3 * rank)]):
            model(x).sum().backward()
            model.zero_grad()
            with Join([other]):
                other(torch.ones(1, 2)).sum().backward()
    return dict(module.named_buffers())


def test_statistics_of_a_loop_with_a_block_in_its_body(pool: Pool) -> None:
    assert_statistics(pool.run(train_around_a_block_in_each_step, ranks=2), [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4)])


def counts_batches_of_its_own(rank: int) -> int:
    model = DistributedDataParallel(build("norm"), **OWN_BUFFERS)
    with Join([model]) as join:
        for x, _ in join.iterate([batch(rank, 0, step) for step in range(1 + rank)], dummy="last"):
            model(x).sum().backward()
            model.zero_grad()
    return int(model.module[1].num_batches_tracked)


def test_dummies_leave_no_trace_in_statistics_that_each_rank_keeps(pool: Pool) -> None:
    assert pool.run(counts_batches_of_its_own) == [1, 2, 3]


def evaluates_alone(rank: int) -> str:
    """Rank 0 makes a buffer grow between two blocks."""
    model = DistributedDataParallel(Grows(0.0))
    try:
        for _ in range(2):
            with Join([model]):
                model(torch.ones(1, 2)).sum().backward()
            if rank == 0:
                model.module(torch.ones(3, 2))
    except (PeerError, ProtocolError) as error:
        return str(error)
    return "fine"


def test_a_buffer_that_grew_on_one_rank_between_two_blocks_is_named(ending: Ending) -> None:
    for text in ending.run(evaluates_alone, ranks=2):
        assert "changed their shape on 1 of 2 ranks with data" in text and "[J444]" in text
