"""Every optimizer of two packages, after an uneven plain block: as one process, or an error.

``pip install pytorch_optimizer torch_optimizer`` (4.1.0 and 0.3.0 were tried); no extra contains them.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.harness import Pool, in_test_all
from tests.training import assert_same, batch, build, flat_state

EPOCHS = ((2, 5, 0), (4, 3, 6))  # numbers of batches
RANKS = 3
NEEDS_ARGUMENTS: dict[str, dict[str, float]] = {"Ranger21": {"num_iterations": 11}}


def names_in(package: str) -> list[str]:
    module = pytest.importorskip(package)
    classes = inspect.getmembers(
        module, lambda each: isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
    )
    return [
        name for name, cls in classes if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    ]


def make(package: str, name: str, parameters: list[torch.nn.Parameter]) -> Any:
    cls = getattr(importlib.import_module(package), name)
    options = dict(NEEDS_ARGUMENTS.get(name, {}))
    if "lr" in inspect.signature(cls).parameters:
        options["lr"] = 1e-3
    return cls(parameters, **options)


def alone(package: str, name: str) -> Any:
    """Train in one process; raises what the optimizer raises without Join."""
    torch.manual_seed(0)
    model = build("mlp").double()
    optimizer = make(package, name, list(model.parameters()))
    for epoch, counts in enumerate(EPOCHS):
        for step in range(max(counts)):
            optimizer.zero_grad()
            data = [batch(rank, epoch, step) for rank in range(RANKS) if counts[rank] > step]
            loss: Any = sum((model(x.double()) - y.double()).square().mean() for x, y in data)
            (loss / len(data)).backward()
            optimizer.step()
    return flat_state(model.state_dict())


def train(rank: int, package: str, names: list[str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        model = build("mlp").double()
        ddp = DistributedDataParallel(copy.deepcopy(model))
        optimizer = make(package, name, list(ddp.parameters()))
        try:
            for epoch, counts in enumerate(EPOCHS):
                with Join([ddp, optimizer], divide_by_initial_world_size=False):
                    for step in range(counts[rank]):
                        optimizer.zero_grad()
                        x, y = batch(rank, epoch, step)
                        (ddp(x.double()) - y.double()).square().mean().backward()
                        optimizer.step()
        except (JoinError, TypeError) as error:  # on all ranks, since other ranks compare what they have
            found[name] = str(error)
        else:
            found[name] = flat_state(ddp.module.state_dict())
    return found


@in_test_all
@pytest.mark.parametrize("package", ["pytorch_optimizer", "torch_optimizer"])
def test_optimizers_of_a_package(pool: Pool, package: str) -> None:
    expected: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names_in(package):
            try:
                expected[name] = alone(package, name)
            except Exception:  # it needs a closure, other arguments, or steps of its own
                continue
    assert len(expected) > 20
    wrong: dict[str, str] = {}
    for rank, states in enumerate(pool.run(train, package, list(expected), ranks=RANKS, timeout=300)):
        for name, state in states.items():
            if isinstance(state, str):
                assert "[J" in state, f"{name}: {state}"
                continue
            try:
                assert_same(state, expected[name], 1e-6)
            except AssertionError as error:
                wrong[f"{name} on rank {rank}"] = str(error)[:100]
    assert {name for name in wrong if not name.startswith("SOAP")} == set()  # whose rotations multiply rounding
