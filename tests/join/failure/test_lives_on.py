"""A rank whose process goes on after its exception, as in a notebook: the others do not wait for it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError, PeerError
from tests.ending import Ending
from tests.harness import all_or_each
from tests.training import batch, build

RANKS = 3
COUNTS = 5, 5, 1


def train(rank: int, where: str, iterates: bool) -> str:
    store: Any = dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [batch(rank, 0, step) for step in range(COUNTS[rank])]

    def fail(*_: object) -> None:
        raise ValueError("mine")

    found: Exception | None = None
    try:
        with Join([model, optimizer]) as join:
            for step, (x, y) in enumerate(join.iterate(batches) if iterates else batches):
                if rank == 1 and step == 2:
                    if where == "body":
                        fail()
                    model.module[0].weight.register_hook(fail)
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
    except Exception as error:
        found = error
    store.set(f"ended {rank}", "")
    store.wait([f"ended {other}" for other in range(RANKS)])  # so no process ends before all have left the block
    assert found is not None and (rank == 1 or isinstance(found, PeerError))
    with pytest.raises(JoinError, match=r"Another block of this process group has failed.*ValueError.*\[J750\]"):
        Join([model]).open()  # the group's ranks are in different places
    return str(found)


@pytest.mark.parametrize(
    ("where", "iterates", "over_group"),
    all_or_each(product(["body", "backward"], [False, True], [False, True])),
)
def test_the_others_learn_of_it(ending: Ending, where: str, iterates: bool, over_group: bool) -> None:
    first, second, third = ending.run(train, where, iterates, ranks=RANKS, over_group=over_group)
    assert second == "mine"
    assert first.startswith("rank 1 failed: ValueError: mine") and third == first
