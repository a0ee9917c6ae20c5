"""Backwards under compiled autograd: exact, or the error of torch, whose reducer does not run in them."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join, PeerError
from tests.ending import Ending
from tests.harness import Pool, in_test_all
from tests.training import TOLERANCE, batch, build

COUNTS = 3, 0
pytestmark = in_test_all


@contextmanager
def compiled_autograd() -> Generator[None]:
    """Compile the graph of each backward; torch itself warns then, of gradients that it reads."""
    from torch._dynamo import compiled_autograd

    with warnings.catch_warnings(), cast("Any", compiled_autograd)._enable(torch.compile(backend="eager")):
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def alone(weights: list[float], window: int) -> list[torch.Tensor]:
    """Steps on windows of the batches of rank 0, which are weighted."""
    module = build("mlp")
    optimizer = optimizer_of(module)
    for first in range(0, len(weights), window):
        optimizer.zero_grad()
        for step in range(first, first + window):
            x, y = batch(0, 0, step)
            loss = (module(x) - y).square().mean()
            (loss * weights[step] / sum(weights[first : first + window])).backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def own_engine(rank: int) -> list[torch.Tensor]:
    module = build("mlp")
    optimizer = optimizer_of(module)
    with Join([], process_group=None) as join:
        for x, y in join.iterate([batch(rank, 0, step) for step in range(COUNTS[rank])], weigh=lambda _: 2):
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            with compiled_autograd():
                join.scale(loss, divided_over=1).backward()
            for parameter in module.parameters():
                dist.all_reduce(cast("torch.Tensor", parameter.grad))
            optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def test_gradients_that_the_loop_reduces(pool: Pool) -> None:
    for found in pool.run(own_engine, ranks=2):
        torch.testing.assert_close(found, alone([1.0] * 3, 1), atol=10 * TOLERANCE, rtol=1e-4)


def weights_in_a_block_that_does_nothing(rank: int) -> list[torch.Tensor]:
    module = build("mlp")
    optimizer = optimizer_of(module)
    with Join([optimizer], enable=False) as join:
        for step, weight in enumerate((1.0, 3.0, 2.0, 2.0)):
            join.weight = weight
            x, y = batch(0, 0, step)
            loss = (module(x) - y).square().mean()
            with compiled_autograd():
                join.scale(loss).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach() for parameter in module.parameters()]


def test_weights_in_a_block_that_does_nothing(pool: Pool) -> None:
    (found,) = pool.run(weights_in_a_block_that_does_nothing, ranks=1)
    torch.testing.assert_close(found, alone([1.0, 3.0, 2.0, 2.0], 2), atol=10 * TOLERANCE, rtol=1e-4)


def train_ddp(rank: int, iterates: bool, in_backward: bool) -> list[torch.Tensor]:
    """Compile the forward with the option of compiled autograd, and the graph of each backward if ``in_backward``."""
    ddp = DistributedDataParallel(build("mlp"))
    module, optimizer = torch.compile(ddp, backend="eager"), optimizer_of(ddp)
    rows = [batch(rank, 0, step) for step in range(COUNTS[rank])]
    option = torch._dynamo.config.patch(compiled_autograd=True)
    with option, Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for x, y in join.iterate(rows) if iterates else rows:
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            with compiled_autograd() if in_backward else nullcontext():
                loss.backward()
            optimizer.step()
    return [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.parametrize("iterates", [False, True])
def test_a_compiled_module(pool: Pool, iterates: bool) -> None:
    for found in pool.run(train_ddp, iterates, False, ranks=2):
        torch.testing.assert_close(found, alone([1.0] * 3, 1), atol=10 * TOLERANCE, rtol=1e-4)


def how_ddp_ends(rank: int, iterates: bool) -> str:
    try:
        train_ddp(rank, iterates, True)
    except PeerError as error:
        return f"peer: {error}"
    except RuntimeError as error:
        return f"own: {error}"
    return "trained"


@pytest.mark.parametrize("iterates", [False, True])
def test_the_reducer_does_not_run_in_it(ending: Ending, iterates: bool) -> None:
    first, second = ending.run(how_ddp_ends, iterates, ranks=2)
    assert first.startswith("own: Compiled autograd is not compatible with C++ DDP Reducer")
    assert second.startswith("own: Compiled autograd is" if iterates else "peer: rank 0 failed: RuntimeError")
