"""A rank that cannot build or enter its block: the other ranks, which wait for it there, get its error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.ending import Ending


def fail(ddp: DistributedDataParallel, how: str) -> None:
    if how == "object":
        Join([ddp, object()])
    elif how == "argument":
        Join([ddp], timeout=-1)
    elif how == "list":
        Join(ddp)  # pyright: ignore[reportArgumentType]
    else:  # the optimizer is in another block, as one that was never left
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with Join([optimizer], enable=False), Join([ddp, optimizer]):
            pass


def one_rank_fails(rank: int, how: str) -> str:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        if rank == 0:
            fail(ddp, how)
        with Join([ddp]):
            pass
    except Exception as error:
        if rank == 0:  # it lives on until the others have ended
            store.wait(["ended 1", "ended 2"])
        else:
            store.set(f"ended {rank}", "")
        return f"{type(error).__name__}: {error}"
    return "fine"


FAILURES = {"object": "J096", "argument": "J002", "list": "J010", "open": "J059"}


@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_before_its_block(ending: Ending, how: str) -> None:
    own, *others = ending.run(one_rank_fails, how)
    assert FAILURES[how] in own
    assert all(found.startswith("PeerError: rank 0 failed") and FAILURES[how] in found for found in others)
