"""State that comes along: schedulers, scalers, EMA copies; and joinables written for torch's ``Join``."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError, ProtocolError
from tests.dropin.counter import Summer
from tests.ending import Ending
from tests.harness import Pool
from tests.training import assert_same, batch, build, flat_state

COUNTS = [0, 4, 2]
TORCH_NOTIFIES = TorchJoin.notify_join_context


class Unpicklable:
    """State that cannot travel."""

    def state_dict(self) -> Any:
        return {"weights": torch.ones(3), "function": lambda: None}

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("never received")


def carried(rank: int) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(build("norm"))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    average = torch.optim.swa_utils.AveragedModel(ddp.module)
    with Join([ddp, optimizer, scheduler, scaler, average]) as join:
        for step in range(COUNTS[rank]):
            x, y = batch(rank, 0, step)
            optimizer.zero_grad()
            scaler.scale(((ddp(x) - y) ** 2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(ddp.module)
    assert not join.report.even
    assert [row.steps for row in join.report.ranks] == COUNTS
    assert scheduler.last_epoch == 4
    assert all(state["step"] == 4 for state in optimizer.state.values())
    assert scaler.get_scale() == 256.0
    return flat_state(*(part.state_dict() for part in (ddp.module, optimizer, scheduler, scaler, average)))


def test_state_comes_from_the_last_joiner(pool: Pool) -> None:
    states = pool.run(carried, ranks=3)
    for state in states:
        assert_same(state, states[0])


def cannot_travel(rank: int) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(RuntimeError) as caught, Join([ddp, Unpicklable(), optimizer]):
        for step in range(rank + 1):
            ddp(batch(rank, 0, step)[0]).sum().backward()
            optimizer.step()
    return str(caught.value)


def test_state_that_cannot_be_pickled_is_an_error_on_all_ranks(pool: Pool) -> None:
    for text in pool.run(cannot_travel, ranks=2):
        assert "(rank 1: AttributeError: Can't pickle" in text


def one_last_rank_differs(rank: int, name: str) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.1)
    with pytest.raises(JoinError) as caught, Join([ddp, optimizer]):
        optimizer.param_groups[0][name] = 0.2 if rank == 2 else 0.1
        for step in range((0, 2, 2)[rank]):
            ddp(batch(rank, 0, step)[0]).sum().backward()
            optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("name", ["lr", "momentum"])
def test_ranks_that_differ_are_named(pool: Pool, name: str) -> None:
    for text in pool.run(one_last_rank_differs, name, ranks=3):
        assert "is 0.1 on rank 1, 0.2 on rank 2" in text
        assert "on rank 0" not in text


def enters_with_other_rates(rank: int, zero: bool, blocks: int, off_by: float) -> str:
    """In the last block, rank 2 has another rate. The check does not wait for it, since the arguments are known."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build("mlp"))
    rates: Any = {"lr": torch.tensor(0.1)}  # as a capturable optimizer has them
    cls, options = (ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.SGD}) if zero else (torch.optim.SGD, {})
    optimizer: Any = cls(ddp.parameters(), **options, **rates, weight_decay=math.nan)
    try:
        for block in range(blocks):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + block) + (rank == 2 and block == blocks - 1) * off_by
            with Join([ddp, optimizer]) as join:
                assert (join.channel.headers.before_next is not None) == (block > 0)
                for step in range((0, 2, 1)[rank]):
                    ddp(batch(rank, block, step)[0]).sum().backward()
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("blocks", "rates"), [(1, "0.1 on rank 0, 0.1 on rank 1, 0.6"), (2, "0.05 on rank 0, 0.05")])
def test_learning_rates_that_differ_on_entering_are_an_error(pool: Pool, zero: bool, blocks: int, rates: str) -> None:
    texts = pool.run(enters_with_other_rates, zero, blocks, 0.5, ranks=3)
    assert len(set(texts)) == 1
    assert re.match(rf"ProtocolError: .* the value \['lr'\] of parameter group 0 of .* is {rates} on rank", texts[0])


def regroup(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Make the values of a rank's parameter groups unlike those of the others."""
    first, second = optimizer.param_groups
    if kind == "order":
        optimizer.param_groups.reverse()
    elif kind == "number":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    elif kind == "lr":
        second["lr"] = torch.tensor(0.5)
    elif kind == "betas":
        second["betas"] = 0.8, 0.9
    else:
        first[kind] = {"weight_decay": 0.5, "amsgrad": True, "name": "mine"}[kind]


def enters_with_other_groups(rank: int, kind: str, way: str) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    weights, others = ([each for each in ddp.parameters() if each.dim() == dim] for dim in (2, 1))
    groups: Any = [{"params": weights, "lr": torch.tensor(0.1)}, {"params": others, "lr": torch.tensor(0.2)}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    for group in optimizer.param_groups:
        group["name"] = "ours"
    if rank == 2:
        regroup(optimizer, kind)
    with pytest.raises(ProtocolError) as caught, Join([ddp, optimizer]) as join:
        mine = [batch(rank, 0, step) for step in range((0, 2, 1)[rank])]
        for x, _ in mine if way == "plain" else join.iterate(mine):
            ddp(x).sum().backward()
            optimizer.step()
    return str(caught.value)


GROUPS = {
    "lr": r"\['lr'\] of parameter group 1 of Adam is 0.2\d* on rank 0, 0.2\d* on rank 1, 0.5",
    "betas": r"\['betas'\]\[0\] of parameter group 1 of Adam is 0.9 on rank 0, 0.9 on rank 1, 0.8",
    "weight_decay": r"\['weight_decay'\] of parameter group 0 of Adam is 0 on rank 0, 0 on rank 1, 0.5",
    "amsgrad": r"\['amsgrad'\] of parameter group 0 of Adam is False on rank 0, False on rank 1, True",
    "name": r"\['name'\] of parameter group 0 of Adam is 'ours' on rank 0, 'ours' on rank 1, 'mine'",
    "order": r"\['lr'\] of parameter group 0 of Adam is 0.1\d* on rank 0, 0.1\d* on rank 1, 0.2",
    "number": r"the number of parameter groups of Adam is 2 on rank 0, 2 on rank 1, 3",
}


@pytest.mark.parametrize("way", ["plain", "iterate"])
@pytest.mark.parametrize("kind", GROUPS)
def test_parameter_groups_that_differ_on_entering_are_an_error(pool: Pool, kind: str, way: str) -> None:
    for text in pool.run(enters_with_other_groups, kind, way, ranks=3):
        assert re.search(GROUPS[kind] + r".*\[J441\]", text)


@pytest.mark.parametrize("blocks", [1, 2])
def test_rounding_of_learning_rates_is_no_error(pool: Pool, blocks: int) -> None:
    assert pool.run(enters_with_other_rates, False, blocks, 1e-9, ranks=3) == ["fine"] * 3


def lists_a_module(rank: int, kind: str) -> str:
    ddp, other = DistributedDataParallel(build("norm")), build("norm")
    parameters = list(ddp.parameters() if kind in ("copy", "inside") else other.parameters())
    optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    if kind == "frozen":
        other.requires_grad_(False)
    if kind == "holds":
        other = torch.nn.Sequential(DistributedDataParallel(other))
    if kind == "replicate":
        from torch.distributed._composable import replicate

        replicate(other)
    more = [Summer()] if kind == "reduced" else []
    try:
        with Join([ddp, *more, ddp.module if kind == "inside" else other, optimizer], enable=kind != "disabled"):
            pass
    except (ValueError, TypeError) as error:
        dist.barrier()  # the group is whole
        return str(error)
    return "entered"


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("forgotten", "SGD trains Norm, but nothing in the list reduces .*J546"),
        ("holds", "SGD trains Sequential, but nothing in the list reduces .*J546"),
        ("zero", "the step of ZeroRedundancyOptimizer trains Norm, but .*J546"),
        ("replicate", "replicate was called on DDPNorm .*J545"),
        *((kind, "entered") for kind in ("copy", "inside", "frozen", "reduced", "disabled")),
    ],
)
def test_modules_that_are_trained_need_an_engine(pool: Pool, kind: str, told: str, ranks: int) -> None:
    for text in pool.run(lists_a_module, kind, ranks=ranks):
        assert re.match(told if ranks > 1 or kind == "replicate" else "entered", text)


def steps_unlisted(rank: int, copies: bool) -> str:
    """An optimizer that is not listed trains a listed module; or only a module that is reduced, beside its copy."""
    ddp, other = DistributedDataParallel(build("norm")), build("norm")
    optimizer = torch.optim.SGD((ddp if copies else other).parameters(), lr=0.1)
    try:
        with Join([ddp, other]):
            for step in range(rank):
                (ddp(batch(rank, 0, step)[0]).sum() + other(batch(rank, 0, step)[0]).sum()).backward()
                optimizer.step()
    except (ValueError, JoinError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("copies", [False, True])
def test_a_listed_module_that_an_optimizer_outside_the_list_trains(ending: Ending, copies: bool) -> None:
    for text in ending.run(steps_unlisted, copies):
        assert text == "fine" if copies else "SGD trains Norm, but nothing in the list reduces" in text


class Broken:
    """State that cannot be had."""

    def state_dict(self) -> Any:
        raise ValueError("no state")

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("never received")


def has_no_state(rank: int) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    with pytest.raises(RuntimeError) as caught, Join([ddp, Broken()]):
        for step in range(rank + 1):
            ddp(batch(rank, 0, step)[0]).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    return str(caught.value)


def test_state_that_cannot_be_had_is_an_error_on_all_ranks(pool: Pool) -> None:
    for text in pool.run(has_no_state, ranks=2):
        assert "The state of Broken cannot be copied" in text
        assert "on rank 1, it has no state: ValueError: no state. " in text


def with_torch_joinables(rank: int, first: bool) -> tuple[Any, ...]:
    summers = [Summer(), Summer()]
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    stock = [ddp, optimizer]
    with Join([*summers, *stock] if first else [*stock, *summers], rate=3, divide_by_initial_world_size=False):
        for step in range(COUNTS[rank]):
            if first:
                summers[0]()
                summers[1]()
            optimizer.zero_grad()
            ddp(batch(rank, 0, step)[0]).sum().backward()
            optimizer.step()
            if not first:
                summers[0]()
                summers[1]()
    assert summers[0].keywords == {"rate": 3, "divide_by_initial_world_size": False}
    assert summers[0]._join_config.enable is False
    announced = [[work is not None for work in summer.works] for summer in summers]
    return [summer.total for summer in summers], announced, summers[0].last_joiner


@pytest.mark.parametrize("first", [True, False])
def test_torch_joinables_of_others(pool: Pool, first: bool) -> None:
    for rank, (totals, announced, last) in enumerate(pool.run(with_torch_joinables, first, ranks=3)):
        assert totals == [6, 6]
        assert announced == [[first] * COUNTS[rank], [False] * COUNTS[rank]]
        assert last is (rank == 1)


def in_blocks_that_overlap(rank: int) -> None:
    """The block that was opened first is closed first: the other's joinable still notifies its ``Join``."""
    first, second = Summer(), Summer()
    joins = [Join([first]).open(), Join([second]).open()]
    first()
    joins[0].close()
    assert TorchJoin.notify_join_context is not TORCH_NOTIFIES
    second()
    joins[1].close()
    assert [each.works[0] is not None for each in (first, second)] == [True, True]
    assert TorchJoin.notify_join_context is TORCH_NOTIFIES


def test_torch_joinables_in_blocks_that_overlap(pool: Pool) -> None:
    pool.run(in_blocks_that_overlap, ranks=2)


def schedules_after_each_block(rank: int) -> float:
    """torch warns of a scheduler that steps before its optimizer, which a rank without data has not stepped."""
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with Join([ddp, optimizer]):
        for step in range(rank):
            ddp(batch(rank, 0, step)[0]).sum().backward()
            optimizer.step()
    scheduler.step()  # warnings are errors here
    return optimizer.param_groups[0]["lr"]


def test_a_scheduler_that_is_not_listed_steps_after_a_block_without_data(pool: Pool) -> None:
    assert pool.run(schedules_after_each_block, ranks=2) == [0.05] * 2


def differs(rank: int, how: str, iterates: bool) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with torch.no_grad():
        next(ddp.parameters()).mul_(2 if how == "checkpoint" and rank == 0 else 1)
    try:
        with Join([ddp, optimizer]) as join:
            mine = [batch(rank, 0, step)[0] for step in range((2, 1, 0)[rank] if iterates else 2)]
            for x in join.iterate(mine) if iterates else mine:
                optimizer.zero_grad()
                ddp(x).sum().backward()
                if how == "clipping" and rank == 0:
                    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
                optimizer.step()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("iterates", [False, True])
@pytest.mark.parametrize("how", ["", "checkpoint", "clipping"])
def test_parameters_that_differ_are_an_error(pool: Pool, how: str, iterates: bool) -> None:
    for text in pool.run(differs, how, iterates):
        assert "squared norm of some rows of the parameters" in text if how else text == "fine"
