"""A tool that replaces the constructor of ``DistributedDataParallel`` is in nobody's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from joinables.ddp import joinables_of_ddp
from tests.harness import Pool


def under_another_constructor(rank: int) -> float:
    init: Any = DistributedDataParallel.__init__

    def logged(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "__init__", logged)
        ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
        with Join([ddp], divide_by_initial_world_size=False):
            for _ in range(rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
    return ddp.module.weight.grad.item()


def test_a_constructor_that_calls_the_original(pool: Pool) -> None:
    assert pool.run(under_another_constructor) == [1.0] * 3


def lacks_an_attribute(rank: int) -> str:
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    reducer = vars(ddp).pop("reducer")
    try:
        joinables_of_ddp(ddp)
    except ImportError as error:
        return str(error)
    finally:
        vars(ddp)["reducer"] = reducer
    return "fine"


def test_a_torch_that_lacks_something(pool: Pool) -> None:
    for text in pool.run(lacks_an_attribute, ranks=2):
        assert text.startswith("joinables needs DistributedDataParallel.reducer, which torch ")
