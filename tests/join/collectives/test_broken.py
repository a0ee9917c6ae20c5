"""Which exceptions are those of a collective that another rank has broken: gloo's, as it raises them, and no others."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from join.collectives.broken import is_broken
from tests.ending import Ending, assert_blamed
from tests.meeting import tell, wait_for
from tests.training import batch, build


def reduced(group: dist.ProcessGroup) -> list[tuple[bool, str]]:
    """What two collectives end with, one after the other: whether it is taken for broken, and the text."""
    outcomes: list[tuple[bool, str]] = []
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except RuntimeError as error:
            outcomes.append((is_broken(error, stores=False), str(error)))
    return outcomes


def leaving(rank: int, how: str) -> list[tuple[bool, str]]:
    group = dist.new_group(timeout=timedelta(seconds=1))
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier(group)
    if rank == 1 and how == "ends":
        os._exit(0)
    if rank == 1 and how == "sleeps":
        wait_for([0, 2])
        return []
    outcomes = reduced(group)
    tell()
    wait_for([0, 2])  # the other may be in the middle of it
    return outcomes


@pytest.mark.parametrize("how", ["ends", "sleeps"])
def test_what_gloo_raises(ending: Ending, how: str) -> None:
    """Also in the collective after the first one that broke, whose text is another one."""
    ends = ending.ends(leaving, how)
    for rank in (0, 2):
        assert len(ends[rank].result) == 2, ends[rank].text
        assert all(found for found, _ in ends[rank].result), ends[rank].result


OWN = ["socket closed", "Connection closed by peer [127.0.0.1]:1234", "gloo timed out", "Connection reset by peer"]


@pytest.mark.parametrize("text", OWN)
def test_what_others_raise(text: str) -> None:
    assert not is_broken(RuntimeError(text))
    assert not is_broken(ConnectionResetError(text))


def raising(rank: int) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp]):
            for step in range(4):
                if (rank, step) == (1, 2):
                    raise RuntimeError("socket closed")
                ddp(batch(rank, 0, step)[0]).sum().backward()
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "fine"


def test_a_text_of_ones_own_blames_nobody_else(ending: Ending) -> None:
    assert_blamed(ending.run(raising), 1, "RuntimeError: socket closed")
