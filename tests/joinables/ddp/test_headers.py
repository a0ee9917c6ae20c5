"""How many headers a step sends, as the report of the block tells."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.harness import Pool
from tests.training import batch, build

COUNTS = (3, 1, 0)


def sent(rank: int, timeout: float | None) -> int:
    ddp = DistributedDataParallel(build("norm"))
    with Join([ddp], divide_by_initial_world_size=False, timeout=timeout) as join:
        for step in range(COUNTS[rank]):
            ddp.zero_grad()
            ddp(batch(rank, 0, step)[0]).sum().backward()
    return join.report.ranks[rank].headers


@pytest.mark.parametrize("over_group", [False, True])
def test_with_a_timeout_buffers_and_the_backward_have_headers_of_their_own(pool: Pool, over_group: bool) -> None:
    """A header then says that the burst begins now; without one, that of the forward announces both."""
    together, apart = (pool.run(sent, timeout, over_group=over_group) for timeout in (None, 60.0))
    assert [two - one for one, two in zip(together, apart, strict=True)] == [max(COUNTS)] * 3


def keeps(rank: int, zeroes: bool) -> int:
    """Headers of three steps on all ranks but the last, whose gradients are a mean over all ranks."""
    ddp = DistributedDataParallel(build("norm"))
    with Join([ddp]) as join:
        for step in range(0 if rank == 2 else 3):
            if zeroes:
                ddp.zero_grad()
            ddp(batch(rank, 0, step)[0]).sum().backward()
    return join.report.ranks[rank].headers


def test_gradients_that_are_kept_cost_a_header_for_the_backward(pool: Pool) -> None:
    """It has the number of contributors, of which the forward does not know yet."""
    zeroed, kept = (pool.run(keeps, zeroes) for zeroes in (True, False))
    assert [more - less for less, more in zip(zeroed, kept, strict=True)] == [2] * 3
