"""Each of six or seven ranks is killed, over each transport: all others end, and clean up, within seconds."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from join import Join, PeerError
from join.collectives import _torch_private
from join.collectives._torch_private import close_connections
from tests.ending import Ending
from tests.harness import ALL, NIGHT, in_test_all

TRANSPORTS = ["shared memory", "the group", "no CPU backend, shared memory", "no CPU backend, the group"]
CASES = [(6, 4), (6, 1), (6, 0), (6, 5)]  # the numbers of ranks, and of the victim


def dies(rank: int, victim: int, transport: str) -> str:
    group = dist.new_group(backend="cuda:gloo") if transport.startswith("no CPU backend") else None
    try:
        with Join([], process_group=group) as join:
            for step, _ in enumerate(join.iterate(range(9 - rank))):  # one of seven ranks has 3 batches
                if (rank, step) == (victim, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
    except PeerError as error:
        return str(error)
    return "fine"


@in_test_all
@pytest.mark.parametrize(
    ("transport", "ranks", "victim"),
    [(transport, ranks, victim) for transport in TRANSPORTS for ranks in (6, 7) for victim in range(ranks)]
    if NIGHT
    else [(transport, *case) for transport, case in zip(TRANSPORTS, CASES, strict=True)][: None if ALL else 2],
)
def test_the_others_end(ending: Ending, transport: str, ranks: int, victim: int) -> None:
    over_group = "memory" not in transport
    ends = ending.ends(dies, victim, transport, ranks=ranks, over_group=over_group, limit=30, tidies=False)
    for rank, end in enumerate(ends):
        if rank == victim:
            assert end.code == -signal.SIGKILL
        else:
            assert end.code == 0 and end.result.startswith(f"rank {victim} is gone"), f"rank {rank}: {end.text}"


def closes(rank: int) -> str:
    """Close connections while an operation waits for a rank that never joins it."""
    group: Any = dist.new_group()
    dist.barrier()  # a rank that ends before, breaks the making of the group
    if rank == 2:
        return "the others wait for it"
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    assert work is not None
    close_connections(group)
    with mock.patch.object(_torch_private, "Aside", side_effect=AssertionError):
        close_connections(group)  # a second call waits for nothing
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    return str(caught.value)


def test_it_breaks_what_runs(ending: Ending) -> None:
    for text in ending.run(closes)[:2]:
        assert "Connection " in text or "pair closure" in text  # closed, or reset by the other rank
