"""Parameters whose gradients DDP does not reduce, or that two DDP modules reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.ending import Ending
from tests.harness import Pool
from tests.training import TOLERANCE, batch

COUNTS = 3, 1, 0


def net_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def batches(join: Join, rank: int, iterates: bool) -> Any:
    mine = [batch(rank, 0, step)[0] for step in range(COUNTS[rank])]
    return join.iterate(mine) if iterates else mine


def changes(rank: int, how: str, iterates: bool) -> str:
    net = net_of()
    net[0].requires_grad_("thawed" not in how)
    ddp = DistributedDataParallel(net)
    if how == "thawed before the block":
        net.requires_grad_(True)
    elif how == "replaced":
        net[0] = nn.Linear(4, 4)
    elif how == "loaded by assignment":
        net.load_state_dict(net_of(1).state_dict(), assign=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with Join([ddp, optimizer]) as join:
            for x in batches(join, rank, iterates):
                net.requires_grad_("frozen" not in how)
                optimizer.zero_grad()
                ddp(x).sum().backward()
                optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("iterates", [False, True])
@pytest.mark.parametrize("how", ["thawed before the block", "thawed in the block", "replaced", "loaded by assignment"])
def test_a_parameter_that_is_not_reduced_is_an_error(ending: Ending, how: str, iterates: bool) -> None:
    for text in ending.run(changes, how, iterates):
        assert "but was frozen or missing when the module was wrapped" in text


def shares(rank: int, how: str, iterates: bool) -> Any:
    one, other = net_of(), net_of(1)
    other[0] = one[0]
    modules = [DistributedDataParallel(one), DistributedDataParallel(other)] if rank >= 0 else [one, other]
    optimizer = torch.optim.SGD(dict.fromkeys([*one.parameters(), *other.parameters()]), lr=0.1)

    def step(backward: Any) -> None:
        optimizer.zero_grad()
        if how == "two backwards":
            for module in modules:
                backward(lambda x, module=module: module(x).square().mean())
        else:
            backward(lambda x: sum(module(x).square().mean() for module in modules))
        optimizer.step()

    if rank < 0:  # one process
        for number in range(max(COUNTS)):
            data = [batch(each, 0, number)[0] for each in range(3) if COUNTS[each] > number]
            step(lambda loss, data=data: torch.stack([*map(loss, data)]).mean().backward())
    else:
        try:
            with Join([*modules, optimizer], divide_by_initial_world_size=False) as join:
                for x in batches(join, rank, iterates):
                    scale = join.scale if how == "scaled" else lambda loss: loss
                    step(lambda loss, x=x, scale=scale: scale(loss(x)).backward())
        except RuntimeError as error:
            return str(error)
    return [parameter.detach() for parameter in (*one.parameters(), *other.parameters())]


@pytest.mark.parametrize(("how", "iterates"), [("two backwards", False), ("two backwards", True), ("scaled", True)])
def test_modules_that_share_a_parameter(pool: Pool, how: str, iterates: bool) -> None:
    expected = shares(-1, how, iterates)
    for found in pool.run(shares, how, iterates):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=10 * TOLERANCE)


@pytest.mark.parametrize("iterates", [False, True])
def test_one_backward_of_modules_that_share_a_parameter_is_an_error(ending: Ending, iterates: bool) -> None:
    for text in ending.run(shares, "one backward", iterates):
        assert "Two modules that share a parameter are in one backward" in text


class Fluent:
    """An object with a state, and a method of this name."""

    def param_groups(self) -> list[Any]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def unusual(rank: int) -> str:
    """A frozen parameter that was made in inference mode, and an average of a module with a parameter of each rank."""
    net = net_of()
    net[0].register_parameter("own", nn.Parameter(torch.full((2,), float(rank))))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.own"])
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(net)
    with torch.inference_mode():
        net.register_parameter("frozen", nn.Parameter(torch.zeros(2), requires_grad=False))
    with Join([ddp, optimizer, average, Fluent()]) as join:
        for x in batches(join, rank, False):
            ddp(x).sum().backward()
    return "fine"


def test_unusual_objects_are_no_error(pool: Pool) -> None:
    assert pool.run(unusual) == ["fine"] * 3
