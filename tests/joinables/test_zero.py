"""Steps of ZeRO: hyperparameters that a rank with data changes, closures, gradients that are transformed."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError, PeerError
from joinables import ZeroStep
from tests.ending import Ending, assert_blamed
from tests.harness import Pool
from tests.training import TOLERANCE, assert_same, batch, build, flat_state
from tests.versions import needs_muon

COUNTS = [0, 4, 2]
STEPS = 3


def train(rank: int, sharded: bool) -> torch.Tensor:
    """Rank 0 alone has data, and raises the learning rate in its last step."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    model = DistributedDataParallel(net) if sharded else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer], divide_by_initial_world_size=False) if sharded else nullcontext():
        for step in range(0 if rank else STEPS):
            if step == STEPS - 1:
                optimizer.param_groups[0]["lr"] = 0.5
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])  # a shard of each rank


def test_a_learning_rate_that_is_raised(pool: Pool) -> None:
    (expected,) = pool.run(train, False, ranks=1)
    for found in pool.run(train, True, ranks=2):
        torch.testing.assert_close(found, expected)


def bad_transform(rank: int) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def transform() -> None:
        raise ValueError("not on a joined rank")

    ddp = DistributedDataParallel(build("mlp"))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    try:
        with Join([ddp, ZeroStep(optimizer, transform_gradients=transform)]):
            for step in range(COUNTS[rank]):
                ddp(batch(rank, 0, step)[0]).sum().backward()
                optimizer.step()
    except (PeerError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_transform_that_raises_on_a_joined_rank(ending: Ending) -> None:
    assert_blamed(ending.run(bad_transform), 0, "ValueError: not on a joined rank")


def closures(rank: int, way: str) -> dict[str, torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build("mlp"))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        batches = [batch(rank, 0, step) for step in range(COUNTS[rank])]
        for x, y in join.iterate(batches) if way == "iterate" else batches:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
                optimizer.zero_grad()
                loss = ((ddp(x) - y) ** 2).mean()
                loss.backward()
                return loss.item()

            assert optimizer.step(closure) is not None
    return flat_state(ddp.module.state_dict())


def reference(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of a model that one process has trained on the batches of all ranks."""
    for step in range(max(COUNTS)):
        ranks = [rank for rank in range(3) if COUNTS[rank] > step]
        optimizer.zero_grad()
        for rank in ranks:
            x, y = batch(rank, 0, step)
            (((model(x) - y) ** 2).mean() / len(ranks)).backward()
        optimizer.step()
    return flat_state(model.state_dict())


@pytest.mark.parametrize("way", ["plain", "iterate"])
def test_zero_step_with_closure(pool: Pool, way: str) -> None:
    model = build("mlp")
    expected = reference(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for state in pool.run(closures, way, ranks=3):
        assert_same(state, expected, TOLERANCE)


def matrices() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 2, bias=False))


def with_muon(rank: int) -> tuple[dict[str, torch.Tensor], Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(matrices())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Muon, lr=0.01)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for step in range(COUNTS[rank]):
            x, y = batch(rank, 0, step)
            optimizer.zero_grad()
            ((ddp(x) - y) ** 2).mean().backward()
            optimizer.param_groups[0]["weight_decay"] = 0.1 - 0.01 * step
            optimizer.step()
    assert not join.report.even
    numbers = [(name, value) for name, value in optimizer.param_groups[0].items() if name != "params"]
    return flat_state(ddp.module.state_dict()), [(name, type(value), value) for name, value in numbers]


@needs_muon
def test_hyperparameters_are_those_of_one_active_rank(pool: Pool) -> None:
    """Muon's number of iterations is a whole number, of which a mean over ranks would make a float."""
    results = pool.run(with_muon, ranks=3)
    model = matrices()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(decay_less)
    expected = reference(model, optimizer)
    for state, numbers in results:
        assert ("ns_steps", int, 5) in numbers
        assert numbers == results[1][1]
        assert_same(state, expected, 1e-5)  # it computes in bfloat16


def decay_less(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    group = optimizer.param_groups[0]
    group["weight_decay"] = 0.1 if "step" not in group else group["weight_decay"] - 0.01
    group["step"] = True


def leave_before_the_step(rank: int, changes: bool, leaver: int = 1, at: int = 3) -> tuple[str, list[torch.Tensor]]:
    """A rank leaves the block between a backward and the step, for which the others may change the rate."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build("mlp"))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    error = ""
    try:
        with Join([ddp, optimizer]):
            for step in range(6):
                x, y = batch(rank, 0, step)
                optimizer.zero_grad()
                (ddp(x) - y).square().mean().backward()
                if step == at and rank == leaver:
                    break
                if step == at and changes:
                    for group in optimizer.param_groups:
                        group["lr"] = 0.05
                optimizer.step()
    except JoinError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.parametrize("over_group", [False, True])
def test_a_rank_that_leaves_before_a_step_that_others_make_at_another_rate(pool: Pool, over_group: bool) -> None:
    texts = [text for text, _ in pool.run(leave_before_the_step, True, over_group=over_group)]
    for text in texts:
        assert text.startswith("ProtocolError: Ranks hold different values, although ")
        assert "['lr'] of parameter group 0 of the step of ZeroRedundancyOptimizer is 0.05 on rank 0, 0.1 on" in text


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize(("changes", "leaver", "at"), [(False, 1, 3), (True, 0, 0)])
def test_a_rank_that_leaves_before_a_step(pool: Pool, changes: bool, leaver: int, at: int, over_group: bool) -> None:
    """The first step is one that ranks do not expect, so rank 0 receives the rate of the new lowest rank in it."""
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if changes else 0.1)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(3):
            if step <= at or rank != leaver:
                x, y = batch(rank, 0, step)
                ((model(x) - y).square().mean() / 3).backward()
        optimizer.step()
    for error, parameters in pool.run(leave_before_the_step, changes, leaver, at, over_group=over_group):
        assert error == ""
        torch.testing.assert_close(parameters, [parameter.detach() for parameter in model.parameters()])


def with_a_scaler(rank: int, lists: bool, iterates: bool) -> str:
    """Training with a scaler, which is in the list and enabled, or is switched off."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(build("mlp"))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=lists)
    try:
        with Join([model, optimizer, scaler], divide_by_initial_world_size=False) as join:
            mine = [batch(rank, 0, step) for step in range((3, 2, 0)[rank])]
            for x, y in join.iterate(mine) if iterates else mine:
                optimizer.zero_grad()
                scaler.scale((model(x) - y).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize(("lists", "iterates"), [(True, True), (False, False)])
def test_a_gradient_scaler_that_every_rank_steps_or_none(pool: Pool, lists: bool, iterates: bool) -> None:
    assert pool.run(with_a_scaler, lists, iterates) == ["fine"] * 3


def test_a_gradient_scaler_in_a_plain_block(ending: Ending) -> None:
    texts = ending.run(with_a_scaler, True, False)
    for text in texts:
        assert "The block lists a GradScaler and the step of ZeroRedundancyOptimizer." in text
    assert texts[2].startswith("PeerError: rank ")


def in_some_order(rank: int, other: bool) -> dict[str, torch.Tensor]:
    """The names of values in a group may be in any order: they depend on what was set when."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build("mlp"))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    group = optimizer.param_groups[0]
    if rank and other:
        group["lr"], group["momentum"] = [group.pop(name) for name in ("lr", "momentum")]
    with Join([ddp, optimizer]):
        for step in range(2 * rank):
            group["lr"] = 0.05
            optimizer.zero_grad()
            ddp(batch(rank, 0, step)[0]).square().mean().backward()
            optimizer.step()
    return flat_state(ddp.module.state_dict())


def test_hyperparameters_in_another_order(pool: Pool) -> None:
    alike, unlike = (pool.run(in_some_order, other, ranks=2) for other in (False, True))
    for state in unlike:
        assert_same(state, alike[0])


def differently(rank: int, iterates: bool, how: str, sharded: bool = True) -> dict[str, torch.Tensor]:
    """Rank 1 skips a backward under a comm hook that keeps state, or changes the learning rate alone."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = build("mlp")
    ddp, adam = DistributedDataParallel(net), torch.optim.Adam
    hook = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(hook, powerSGD_hook)  # pyright: ignore[reportArgumentType]
    optimizer = ZeroRedundancyOptimizer(net.parameters(), adam, lr=0.01) if sharded else adam(net.parameters(), lr=0.01)
    mine = [batch(rank, 0, step)[0] for step in range(COUNTS[rank])]
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for step, x in enumerate(join.iterate(mine) if iterates else mine):
            optimizer.zero_grad()
            loss = ddp(x).square().mean()
            if rank == 1 and step == 2 and how == "skips both":
                continue
            if rank == 1 and step == 2 and how == "rate":
                optimizer.param_groups[0]["lr"] = 0.5
            if not (rank == 1 and step == 2 and how == "skips the backward"):
                loss.backward()
            optimizer.step()
    return flat_state(net.state_dict())


@pytest.mark.parametrize(
    ("how", "told"), [("skips the backward", "the number of steps made on gradients"), ("rate", r"the value \['lr'\]")]
)
def test_a_loop_that_ranks_run_differently(ending: Ending, how: str, told: str) -> None:
    ends = ending.ends(differently, True, how)
    assert all(re.search(rf"{told}.* of the step of Zero.*\[J441\]", end.error) for end in ends), [
        end.text for end in ends
    ]


def test_a_batch_that_one_rank_skips_in_a_plain_block(pool: Pool) -> None:
    expected = pool.run(differently, False, "skips both", False)[0]
    for found in pool.run(differently, False, "skips both"):
        assert_same(found, expected, TOLERANCE)


def adds_a_group(rank: int, iterates: bool) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build("mlp"))
    first, *others = ddp.parameters()
    optimizer = ZeroRedundancyOptimizer([first], torch.optim.SGD, lr=0.1)
    try:
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            mine = [batch(rank, 0, step)[0] for step in range(COUNTS[rank])]
            for step, x in enumerate(join.iterate(mine) if iterates else mine):
                if step == 1:
                    optimizer.add_param_group({"params": others})
                ddp.zero_grad()
                ddp(x).sum().backward()
                optimizer.step()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("iterates", [False, True])
def test_a_parameter_group_that_the_loop_adds(ending: Ending, iterates: bool) -> None:
    for text in ending.run(adds_a_group, iterates):
        assert text == "fine" if iterates else "The loop added a parameter group" in text
