"""A wait on an accelerator explains itself: a rank waits where it reads a result, after the collective that hangs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.accelerator.target import Target, device_of_rank, prepare_simulated
from tests.ending import Ending
from tests.explained import ends_once_explained
from tests.models import batch, build

COUNTS = 1, 3, 3


def train(rank: int, target: Target) -> None:
    device = device_of_rank(target)
    model = DistributedDataParallel(build("mlp").to(device))
    with ends_once_explained(), Join([model]):
        for step in range(COUNTS[rank]):
            loss = model(batch(rank, 0, step)[0].to(device)).square().mean()
            loss.backward()
            dist.all_reduce(total := loss.detach())
            total.item()


@pytest.mark.parametrize("over_group", [False, True])
def test_a_wait_explains_itself(ending: Ending, target: Target, over_group: bool) -> None:
    how: Any = {"backend": target.backend, "prepare": prepare_simulated if target.is_simulated else None}
    ends = ending.ends(train, target, ranks=target.ranks(3), over_group=over_group, tidies=False, limit=50, **how)
    text = "".join(end.stderr for end in ends)
    assert [end.code for end in ends] == [0] * len(ends) and text.count("join: no rank has moved") == 1, text
    assert re.search(
        r"\n  rank 0: out of data since step 1, waits for the others at the end of the block \(test_hang\.py:.*"
        r"\n  ranks? 1(-2)?: in (the block|torch.distributed.all_reduce) \(test_hang\.py:\d+, in train\)"
        r"\n(Rank 0 never calls this all_reduce"
        r"|Either it takes so long there, or rank 0 never calls a collective that was started there or earlier)\.",
        text,
    ), text
