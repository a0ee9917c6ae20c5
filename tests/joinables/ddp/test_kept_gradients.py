"""Gradients that no reduction of Join's may lose: what was set aside, what a skipped backward leaves, local ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.ending import Ending
from tests.harness import Pool
from tests.versions import OWN_BUFFERS


def one_weight(**options: Any) -> DistributedDataParallel:
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    return DistributedDataParallel(net, **options)


def grad_of(ddp: Any) -> float:
    return ddp.module.weight.grad.item()


def windows_that_are_kept(rank: int, lockstep: bool) -> list[list[float]]:
    """Steps without and with a reduction in turn, and ``zero_grad`` before each fourth one: with Join, and without."""
    found: list[list[float]] = []
    for joined in (True, False):
        ddp = one_weight()
        with Join([ddp], enable=joined) as join:
            grads: list[float] = []
            steps = join.iterate(range(1, 9), window=2) if lockstep else range(1, 9)
            for step in steps:
                if step % 4 == 1:
                    ddp.zero_grad()
                with ddp.no_sync() if step % 2 else nullcontext():
                    loss = ddp(torch.full((1, 1), float(step))).sum()
                    (join.scale(loss) if lockstep else loss).backward()
                grads.append(grad_of(ddp))
        found.append(grads)
    return found


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_result_that_is_kept_over_windows(pool: Pool, lockstep: bool) -> None:
    for with_join, without in pool.run(windows_that_are_kept, lockstep, ranks=2):
        # Between reductions, the last result is there, too. In a loop, losses are parts of the mean.
        assert with_join[1::2] == without[1::2] and (lockstep or with_join == without)


def skips_a_backward(rank: int, views: bool, initial: bool) -> tuple[float, str]:
    """Rank 0 skips a backward that rank 1 runs, with gradients of the step before."""
    ddp = one_weight(gradient_as_bucket_view=views)
    told, grad = "", 0.0
    try:
        with Join([ddp], divide_by_initial_world_size=initial) as join:
            for step in join.iterate(range(2)):
                output = ddp(torch.full((1, 1), 2.0 + step))
                if step == 0 or rank == 1:
                    output.sum().backward()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    grad = grad_of(ddp)
    return grad, told


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_a_skipped_backward_leaves_gradients_as_they_were(pool: Pool, views: bool, initial: bool) -> None:
    (grad, told), _ = pool.run(skips_a_backward, views, initial, ranks=2)
    assert grad == 2 and "Rank 0 skipped the backward" in told


class Opaque:
    """An output that shows no tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._hidden = [tensor]

    def get(self) -> torch.Tensor:
        return self._hidden[0]


class Hiding(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:
        return Opaque(super().forward(input))


def hides_outputs(rank: int) -> list[int]:
    """How many headers each backward sends: those under ``no_sync`` none."""
    net = Hiding(1, 1, bias=False)
    ddp = DistributedDataParallel(net)
    found: list[int] = []
    with Join([ddp]) as join:
        tally = join.channel.headers.tally
        for step in range(6):
            with ddp.no_sync() if step % 3 else nullcontext():
                before = tally.headers
                ddp(torch.ones(1, 1)).get().sum().backward()
                found.append(tally.headers - before)
    return found


def test_outputs_that_show_no_tensor(pool: Pool) -> None:
    for found in pool.run(hides_outputs, ranks=2):
        assert found[1:3] == found[4:6] == [0, 0]
        assert min(found[0], found[3]) >= 1


class Caching(nn.Linear):
    """Makes a buffer when it is first called, and another one for each size of batch."""

    mask: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.register_buffer("mask", torch.ones(len(input), 1))
        return super().forward(input) * self.mask


def caches(rank: int) -> float:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Caching(1, 1, bias=False), **OWN_BUFFERS)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for x in join.iterate([torch.ones(2, 1)] * 2 * rank):
            ddp.zero_grad()
            ddp(x).sum().backward()
    return ddp.module.weight.grad.item()  # pyright: ignore


def test_a_buffer_that_a_forward_makes(pool: Pool) -> None:
    assert pool.run(caches, ranks=2) == [2, 2]


def two_backwards_a_step(rank: int, set_to_none: bool) -> tuple[list[float], float]:
    """The second backward of each step adds to what the first has left, as a discriminator's two losses do."""
    ddp = one_weight()
    grads = list[float]()
    with Join([ddp]):
        for step in range((4, 2, 0)[rank]):
            ddp.zero_grad(set_to_none=set_to_none)
            for factor in (1.0, 10.0):
                ddp(torch.full((1, 1), factor * (1 + step + rank))).sum().backward()
            grads.append(grad_of(ddp))
    return grads, grad_of(ddp)


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_result_that_is_added_to(pool: Pool, set_to_none: bool, over_group: bool) -> None:
    """Over all three ranks, one of which has no data; another one leaves two steps early."""
    zero, one, two = pool.run(two_backwards_a_step, set_to_none, ranks=3, over_group=over_group)
    sums = [sum(1 + step + rank for rank in range(2) if step < (4, 2)[rank]) for step in range(4)]
    wanted = [11 * total / 3 for total in sums]
    assert zero[0] == pytest.approx(wanted)
    assert one[0] == pytest.approx(wanted[:2])
    assert [end for _, end in (zero, one, two)] == pytest.approx([wanted[-1]] * 3)


def zeroes_alone(rank: int, set_to_none: bool, kind: str) -> float:
    """Three ranks have two batches, one has none. Rank 0 zeroes between the two, and the others do not."""
    ddp = one_weight()
    with Join([ddp], divide_by_initial_world_size=kind != "contributors") as join:
        for step in range(0 if rank == 3 else 2):
            if step and rank == 0:
                ddp.zero_grad(set_to_none=set_to_none)
            join.weight = 2.0 if kind == "weights" else None
            join.scale(ddp(torch.full((1, 1), 12.0)).sum()).backward()
    return grad_of(ddp)


@pytest.mark.parametrize("kind", ["all ranks", "contributors", "weights"])
@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_ranks_that_zero_unlike(pool: Pool, set_to_none: bool, over_group: bool, kind: str) -> None:
    """All have the mean of what they held, as DDP alone would give them."""
    one = 9.0 if kind == "all ranks" else 12.0  # over four or three ranks
    found = pool.run(zeroes_alone, set_to_none, kind, ranks=4, over_group=over_group)
    assert found == pytest.approx([one + one * 2 / 3] * 4)


def drops_a_weight(rank: int) -> float:
    """What was accumulated before ``zero_grad`` weighs nothing in the window."""
    ddp = one_weight()
    with Join([ddp]) as join:
        for factor in () if rank else (10.0, 1.0):
            ddp.zero_grad()
            join.weight = factor
            with ddp.no_sync() if factor > 1 else nullcontext():
                join.scale(ddp(torch.full((1, 1), factor)).sum()).backward()
    return grad_of(ddp)


def test_a_window_that_was_zeroed_weighs_nothing(pool: Pool) -> None:
    assert pool.run(drops_a_weight, ranks=2) == [1.0, 1.0]


def keeps_in_a_loop(rank: int) -> float:
    ddp = one_weight()
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for x in join.iterate([torch.full((1, 1), each) for each in ((1.0, 10.0), (3.0,))[rank]]):
            ddp(x).sum().backward()
    return grad_of(ddp)


def test_a_result_that_is_kept_in_a_loop_counts_once(pool: Pool) -> None:
    assert pool.run(keeps_in_a_loop, ranks=2) == [(1 + 3) / 2 + 10] * 2


def skips_the_end_of_a_window(rank: int) -> str:
    """All ranks accumulate, and skip the backward that would reduce it."""
    ddp = one_weight()
    try:
        with Join([ddp]) as join:
            for _ in join.iterate(range(4 - 3 * rank), window=2):
                with nullcontext() if join.ends_window else ddp.no_sync():
                    loss = join.scale(ddp(torch.ones(1, 1)).sum())
                    if not join.ends_window:
                        loss.backward()
    except JoinError as error:
        return str(error)
    return "fine"


def test_gradients_whose_reduction_all_ranks_skip_are_not_forgotten(ending: Ending) -> None:
    for text in ending.run(skips_the_end_of_a_window, ranks=2):
        assert "Gradients of an earlier step are still unreduced" in text and "[J471]" in text
