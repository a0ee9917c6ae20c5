"""Steps of ZeRO around which the loop changes gradients or parameters, which a rank without data does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from joinables import ZeroStep
from joinables._torch.objects import zero_redundancy_optimizer
from joinables.sample import Sample
from tests.ending import Ending, assert_blamed
from tests.harness import Pool
from tests.training import batch, build

COUNTS = [1, 3, 3]


def by_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-6)


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)


def new_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def by_nothing(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


@torch.no_grad()
def decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def nothing(model: nn.Module) -> None:
    """Leave everything as it is."""


Change = Callable[[nn.Module], None]


def train(rank: int, before: Change, after: Change, counts: list[int], transform: bool = False) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = zero_redundancy_optimizer()(ddp.parameters(), torch.optim.SGD, lr=0.01)
    listed = ZeroStep(optimizer, transform_gradients=lambda: before(ddp)) if transform else optimizer
    try:
        with Join([ddp, listed]):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                ddp(batch(rank, 0, step)[0]).square().sum().backward()
                before(ddp)
                optimizer.step()
                after(ddp)
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("change", [by_norm, by_value, through_data, new_gradients])
def test_changed_gradients_are_an_error(ending: Ending, change: Change) -> None:
    assert_blamed(ending.run(train, change, nothing, COUNTS), 0, "JoinError: The loop changes gradients")


def test_changed_parameters_are_an_error(ending: Ending) -> None:
    assert_blamed(ending.run(train, nothing, decay, COUNTS), 0, "JoinError: The loop changes parameters")


@pytest.mark.parametrize(
    ("before", "after", "counts", "transform"),
    [
        (by_nothing, nothing, COUNTS, False),  # a clip that changes nothing
        (by_norm, decay, [2, 2, 2], False),  # no rank steps without data
        (by_norm, nothing, COUNTS, True),
    ],
)
def test_what_is_right_is_no_error(
    pool: Pool, before: Change, after: Change, counts: list[int], transform: bool
) -> None:
    assert pool.run(train, before, after, counts, transform) == ["fine"] * 3


def test_a_device_is_not_waited_for() -> None:
    sample = Sample([torch.ones(2, device="meta")], set())  # a meta tensor has no value to read
    assert all(map(math.isnan, sample.take(set())))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64])
def test_parameters_of_any_type(dtype: torch.dtype) -> None:
    sample = Sample([torch.ones(3, 2).to(dtype), torch.ones(0, 2).to(dtype), torch.ones(()).to(dtype)], set())
    expected = [math.nan] * 3 if dtype.is_complex else [2.0, math.nan, 1.0]
    assert sample.take(set()) == pytest.approx(expected, nan_ok=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_parameters_without_a_norm() -> None:
    rows = torch.eye(3)
    unknown = [rows.to_sparse_csr(), rows.to_sparse(), torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)]
    assert all(map(math.isnan, Sample(unknown, set()).take(set())))
