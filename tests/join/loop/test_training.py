"""Loops over ``join.iterate`` in processes: whatever the body does, they equal one process, or say why they cannot."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import re
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from join import Join, JoinError
from tests.dropin.counter import Summer
from tests.ending import Ending
from tests.harness import Pool, all_or_each, first_and_last, in_test_all
from tests.joinables.ddp.nets import RANKS, Data, Nets, compute_all, loss, plain, streams
from tests.shorter import using
from tests.training import FEATURES, MLP, TOLERANCE, Norm, assert_same, flat_state
from tests.versions import all_gather_single

COUNTS = first_and_last(((0, 3, 1), (2, 0, 4), (3, 1, 0)))

# -- a body with everything in it -------------------------------------------------------------------------------------


class Copy(nn.Module):
    """An exponential moving average as people write it themselves: a copy of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.copy = copy.deepcopy(model)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.copy.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
        for mine, theirs in zip(self.copy.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)


class Trained:
    """A model and everything around it that has state."""

    def __init__(self, ema: str) -> None:
        torch.manual_seed(0)
        self.net = Norm()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        averages = partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if ema == "averaged" else Copy
        self.ema = averages(self.net)

    def update(self) -> None:
        """What comes after the backward in each step."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update_parameters(self.net)

    @property
    def stateful(self) -> list[Any]:
        return [self.optimizer, self.scheduler, self.scaler, self.ema]

    def state(self) -> dict[str, torch.Tensor]:
        return flat_state(self.net.state_dict(), *(each.state_dict() for each in self.stateful))


def spoiled(data: Data, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch, of which one is too much for the scaler: that step must be left out, on all ranks."""
    x, y = data[0]
    return x, y * 1e36 if (rank, step) == (2, 2) else y


def with_everything(rank: int, ema: str, how: dict[str, Any]) -> tuple[Any, list[float], list[list[float]]]:
    trained, means, gathered = Trained(ema), [], []
    ddp = DistributedDataParallel(trained.net)
    for counts in COUNTS:
        loader = [spoiled(streams(rank, step), rank, step) for step in range(counts[rank])]
        with Join([ddp, *trained.stateful], divide_by_initial_world_size=False) as join:
            for x, y in join.iterate(loader, **how):
                trained.optimizer.zero_grad()
                value = loss(ddp(x), y)
                trained.scaler.scale(value).backward()
                trained.update()
                total = torch.tensor([value.item() if len(x) else 0.0, float(len(x) > 0)])
                dist.all_reduce(total)
                means.append((total[0] / total[1]).item())
                losses = torch.empty(RANKS)
                all_gather_single(losses, value.detach().reshape(1))
                gathered.append(losses.tolist())
    return trained.state(), means, gathered


def without_ranks(ema: str) -> tuple[Any, list[float]]:
    trained, means = Trained(ema), []
    seen: list[float] = []

    def compute(nets: Nets, data: Data, rank: int, step: int, scale: Any) -> None:
        x, y = spoiled(data, rank, step)
        value = loss(nets["a"](x), y)
        seen.append(value.item())
        trained.scaler.scale(scale(value)).backward()

    for counts in COUNTS:
        for step in range(max(counts)):
            ranks = [rank for rank in range(RANKS) if counts[rank] > step]
            seen.clear()
            trained.optimizer.zero_grad()
            compute_all({"a": trained.net}, compute, dict.fromkeys(ranks, 1 / len(ranks)), step)
            trained.update()
            means.append(sum(seen) / len(seen))
    return trained.state(), means


@pytest.mark.parametrize(("ema", "how"), [("averaged", {}), ("copy", {"lookahead": 3})])
def test_a_body_with_everything_in_it(pool: Pool, ema: str, how: dict[str, Any]) -> None:
    results = pool.run(with_everything, ema, how, ranks=RANKS)
    expected, means = without_ranks(ema)
    scaler = torch.tensor([expected["3.scale"], expected["3._growth_tracker"]])
    assert scaler.tolist() != [1024.0 * 2**5, 0]  # one of the ten steps was left out
    for state, logged, gathered in results:
        assert_same(state, results[0][0])
        assert_same(state, expected, TOLERANCE)
        assert logged == pytest.approx(means, rel=1e-5)
        present = [[count > step for count in counts] for counts in COUNTS for step in range(max(counts))]
        assert [[not math.isnan(each) for each in losses] for losses in gathered] == present


# -- models that cannot take empty batches ----------------------------------------------------------------------------


class Peak(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.detach().abs().max()


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), 2, -1).flatten(1)


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            raise ValueError("no samples")
        return x


CHOOSY = {"Peak": Peak, "Flat": Flat, "Picky": Picky}


def choosy(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), CHOOSY[name](), Norm() if name == "Flat" else MLP())


def train_choosy(rank: int, name: str, dummy: Any) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(choosy(name), find_unused_parameters=name == "Picky")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    timeout = 50 if name == "Flat" else None  # with it, and with batch norm, buffers are a burst of their own
    with Join([ddp, optimizer], divide_by_initial_world_size=False, timeout=timeout) as join:
        for x, y in join.iterate([streams(rank, step)[0] for step in range(COUNTS[0][rank])], dummy=dummy):
            optimizer.zero_grad()
            loss(ddp(x), y).backward()
            optimizer.step()
    state = flat_state(dict(ddp.module.named_parameters()), optimizer.state_dict())
    return state, flat_state(dict(ddp.module.named_buffers()))


@pytest.mark.parametrize("dummy", ["empty", "last"])
@pytest.mark.parametrize("name", CHOOSY)
def test_a_model_that_cannot_take_an_empty_batch(pool: Pool, name: str, dummy: str) -> None:
    """Also on rank 1, which never has a batch."""
    net = choosy(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(max(COUNTS[0])):
        ranks = [rank for rank in range(RANKS) if COUNTS[0][rank] > step]
        optimizer.zero_grad()
        for rank in ranks:
            x, y = streams(rank, step)[0]
            (loss(net(x), y) / len(ranks)).backward()
        optimizer.step()
    expected = flat_state(dict(net.named_parameters()), optimizer.state_dict())
    results = pool.run(train_choosy, name, dummy, ranks=RANKS)
    for state, buffers in results:
        assert_same(state, expected, TOLERANCE)
        assert_same(buffers, results[0][1])


# -- one rank that does something else --------------------------------------------------------------------------------


def sharded(parameters: Any, lr: float) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr)


def skipping(rank: int, buffers: bool, zero: bool, skipped: tuple[int, int], steps_too: bool) -> Any:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Norm() if buffers else MLP())
    optimizer = (sharded if zero else torch.optim.Adam)(ddp.parameters(), lr=0.01)
    told = ""
    try:
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for step, (x, y) in enumerate(join.iterate([streams(rank, step)[0] for step in range((2, 4, 3)[rank])])):
                optimizer.zero_grad()
                value = loss(ddp(x), y)
                if (rank, step) != skipped:  # its loss is NaN, say
                    value.backward()
                if (rank, step) != skipped or not steps_too:
                    optimizer.step()
    except JoinError as error:
        told = f"{type(error).__name__}: {error}"
    return flat_state(ddp.module.state_dict(), {} if zero else optimizer.state_dict()), told


@pytest.mark.parametrize(("buffers", "skipped"), [(False, (2, 1)), (True, (1, 2))])
def test_a_backward_that_one_rank_skips(ending: Ending, buffers: bool, skipped: tuple[int, int]) -> None:
    for rank, (_, told) in enumerate(ending.run(skipping, buffers, False, skipped, True)):
        mine = f"ProtocolError: Rank {skipped[0]} skipped the backward of DistributedDataParallel"
        assert told.startswith(mine if rank == skipped[0] else f"PeerError: rank {skipped[0]} failed: {mine}")


@pytest.mark.parametrize(
    ("buffers", "zero", "steps_too", "step"),
    all_or_each(
        (*how, step) for how in [(True, False, True), (False, False, False), (False, True, False)] for step in (2, 3)
    ),
)
def test_a_backward_that_is_skipped_on_a_dummy(
    pool: Pool, buffers: bool, zero: bool, steps_too: bool, step: int
) -> None:
    """ZeRO sends the parameters that others have stepped; the replicas of another optimizer would part."""
    results = pool.run(skipping, buffers, zero, (0, step), steps_too, ranks=RANKS)
    expected = pool.run(skipping, buffers, zero, (-1, -1), False, ranks=RANKS)
    for (state, told), (whole, _) in zip(results, expected, strict=True):
        if not zero:
            assert re.match(r"ProtocolError: .*Adam is 3 on rank 0, 4 on rank 1, 4 on rank 2; ", told)
            continue
        assert told == ""
        assert_same(state, whole, TOLERANCE)


def len_of_first(data: tuple[torch.Tensor, torch.Tensor]) -> int:
    return len(data[0])


def skipping_together(rank: int, counts: tuple[int, ...], accumulate: int, weighted: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP())
    optimizer: Any = sharded(ddp.parameters(), lr=0.01)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        data = [streams(0, step)[0] for step in range(counts[rank])]
        options: dict[str, Any] = {"weigh": len_of_first if weighted else None, "window": accumulate}
        for step, (x, y) in enumerate(join.iterate(data, **options)):
            if step % accumulate == 0:
                optimizer.zero_grad()
            synchronises = (step + 1) % accumulate == 0
            with nullcontext() if synchronises else ddp.no_sync():
                value = loss(ddp(x), y)
                if step != 3:  # on all ranks, by agreement
                    join.scale(value).backward()
            if synchronises and (step != 3 or accumulate == 1):
                optimizer.step()
    return flat_state(ddp.module.state_dict())


@pytest.mark.parametrize(("accumulate", "weighted"), [(1, False), (1, True), (2, False)])
def test_a_backward_that_all_skip_while_one_has_a_dummy(pool: Pool, accumulate: int, weighted: bool) -> None:
    alone = pool.run(skipping_together, (6, 6, 6), accumulate, weighted, ranks=RANKS)[0]
    for state in pool.run(skipping_together, (3, 6, 0), accumulate, weighted, ranks=RANKS):
        assert_same(state, alone, TOLERANCE)


def breaking_late(rank: int, zero: bool) -> bool:
    ddp = DistributedDataParallel(MLP())
    optimizer = (sharded if zero else torch.optim.Adam)(ddp.parameters(), lr=0.01)
    with using(look=0.05), Join([ddp, optimizer]) as block:
        for step, (x, y) in enumerate(block.iterate([streams(rank, step)[0] for step in range(4)])):
            loss(ddp(x), y).backward()
            if step == 2:
                before = flat_state(ddp.module.state_dict())
                gradients = [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]
                time.sleep(0.5 if rank == 0 else 0.0)  # it saves a checkpoint, say
                break
            optimizer.step()
    assert_same(flat_state(ddp.module.state_dict()), before)
    left = [parameter.grad for parameter in ddp.parameters()]
    return all(torch.equal(grad, kept) for grad, kept in zip(left, gradients, strict=True) if grad is not None)


def breaking_before_plain_steps(
    rank: int, model: type[nn.Module], initial: bool, together: bool
) -> dict[str, torch.Tensor]:
    """A loop that all break out of, then plain steps, of which a rank has none: in one block, or in one each."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)

    def train(step: int) -> None:
        optimizer.zero_grad()
        x, y = streams(rank, step)[0]
        loss(ddp(x), y).backward()
        optimizer.step()

    def train_plainly() -> None:
        for step in range((5, 0, 4)[rank]):
            train(4 + step)

    with Join([ddp, optimizer], divide_by_initial_world_size=initial) as block:
        for step in block.iterate(range(4)):
            if step == 2:
                break
            train(step)
        if together:
            train_plainly()
    if not together:
        with Join([ddp, optimizer], divide_by_initial_world_size=initial):
            train_plainly()
    return flat_state(ddp.module.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(("model", "initial"), all_or_each(product([MLP, Norm], [True, False])))
def test_plain_steps_after_a_break(pool: Pool, model: type[nn.Module], initial: bool) -> None:
    expected = pool.run(breaking_before_plain_steps, model, initial, False, ranks=RANKS)[0]
    for state in pool.run(breaking_before_plain_steps, model, initial, True, ranks=RANKS):
        assert_same(state, expected, TOLERANCE)


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_a_break_on_all_ranks_of_which_one_is_late(pool: Pool, zero: bool, over_group: bool) -> None:
    assert pool.run(breaking_late, zero, ranks=RANKS, over_group=over_group) == [True] * RANKS


def leaving(rank: int, buffers: bool, accumulate: int, at: int, raises: bool, how: dict[str, Any]) -> str:
    ddp = DistributedDataParallel(Norm() if buffers else MLP())
    optimizer = torch.optim.Adam(ddp.parameters())
    try:
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            data = [streams(rank, step)[0] for step in range((4, 6, 0)[rank])]
            for step, (x, y) in enumerate(join.iterate(data, window=accumulate, **how)):
                if (rank, step) == (1, at):
                    if raises:
                        raise ValueError("enough")
                    break
                synchronises = (step + 1) % accumulate == 0
                with nullcontext() if synchronises else ddp.no_sync():
                    join.scale(loss(ddp(x), y)).backward()
                if synchronises:
                    optimizer.step()
                    optimizer.zero_grad()
    except (ValueError, JoinError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize(
    ("buffers", "accumulate", "at", "raises", "how", "over_group"),
    [
        (True, 1, 0, True, {}, True),
        (False, 1, 1, False, {}, False),
        (False, 2, 3, True, {"lookahead": 3}, False),
        (True, 1, 3, False, {"lookahead": 3}, True),
    ],
)
def test_a_rank_that_leaves_alone(
    ending: Ending, buffers: bool, accumulate: int, at: int, raises: bool, how: dict[str, Any], over_group: bool
) -> None:
    zero, one, two = ending.run(leaving, buffers, accumulate, at, raises, how, over_group=over_group)
    assert one.startswith("ValueError: enough" if raises else "ProtocolError: Rank 1 left the loop over join.iterate")
    for text in (zero, two):
        assert text.startswith(f"PeerError: rank 1 failed: {one}")


WINDOWS = ((0, 1, 2), (3, 4))


def accumulating(rank: int, how: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    with Join([ddp, optimizer]) as join:
        data = [streams(rank, step)[0] for step in range((2, 5, 0)[rank])]
        for step, (x, y) in enumerate(join.iterate(data, weigh=len_of_first, window=3, **how)):
            synchronises = (step + 1) % 3 == 0 or join.is_last_step
            assert synchronises == join.ends_window
            with nullcontext() if synchronises else ddp.no_sync():
                join.scale(loss(ddp(x), y)).backward()
            if synchronises:
                optimizer.step()
                optimizer.zero_grad()
    return flat_state(ddp.module.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("how", [{}, {"lookahead": 2}])
def test_a_last_window_of_accumulation_that_is_not_full(pool: Pool, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = MLP()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for window in WINDOWS:
        optimizer.zero_grad()
        data = [streams(rank, step)[0] for rank, count in enumerate((2, 5, 0)) for step in window if step < count]
        for x, y in data:
            (loss(net(x), y) * len(x) / sum(len(each) for each, _ in data)).backward()
        optimizer.step()
    for state in pool.run(accumulating, how, ranks=RANKS):
        assert_same(state, flat_state(net.state_dict(), optimizer.state_dict()), TOLERANCE)


class Branches(nn.Module):
    """Two parameters, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        return x * (self.right if right else self.left)


def used_by_dummies(rank: int) -> bool:
    net = Branches()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for step, x in enumerate(join.iterate([torch.ones(1)] * (3 if rank == 0 else 0), window=3)):
            with nullcontext() if join.ends_window else ddp.no_sync():
                total = ddp(x, right=join.shadowing).sum()
                if step != 1:
                    join.scale(total).backward()
        return net.left.grad is not None and net.right.grad is None


def test_what_only_dummies_used_has_no_gradient_after_a_backward_that_all_skip(pool: Pool) -> None:
    assert pool.run(used_by_dummies, ranks=2) == [True, True]


def used_in_the_window_before(rank: int) -> list[bool]:
    """Rank 1 alone uses a parameter, in the first step with a batch, and in the second with a dummy."""
    net, absent = Branches(), list[bool]()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for x in join.iterate([torch.ones(1)] * (2 - rank)):
            ddp.zero_grad()
            ddp(x, right=rank == 1).sum().backward()
            absent.append(net.right.grad is None)
    return absent


def test_what_only_dummies_used_has_no_gradient_although_a_batch_used_it_before(pool: Pool) -> None:
    assert pool.run(used_in_the_window_before, ranks=2) == [[False, True]] * 2


def skipped_on_dummies(rank: int) -> list[Any]:
    net = Branches()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for x in join.iterate([torch.full((1,), 3.0)] * (2 * (1 - rank))):
            ddp.zero_grad()
            total = ddp(x, right=join.shadowing).sum()
            if not join.shadowing:
                total.backward()
    return [None if each.grad is None else each.grad.item() for each in net.parameters()]


def test_parameters_that_no_batch_used_where_dummies_skip_the_backward(pool: Pool) -> None:
    assert pool.run(skipped_on_dummies, ranks=2) == [[3.0, None]] * 2


def skipped_in_between(rank: int, kind: str) -> list[float]:
    """The gradient after a window of accumulation in which rank 0 has three batches, rank 1 one, and one is skipped."""
    net = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(net, find_unused_parameters=kind == "find_unused_parameters")
    x = torch.full((1, 2), rank + 1.0)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for step, each in enumerate(join.iterate([x] * (3, 1, 0)[rank], window=3)):
            with nullcontext() if join.ends_window else ddp.no_sync():
                total = ddp(each).sum()
                if step != 1:
                    join.scale(total).backward()
    assert net.weight.grad is not None
    return net.weight.grad.flatten().tolist()


@pytest.mark.parametrize("kind", ["DDP", "find_unused_parameters"])
def test_a_backward_that_all_skip_forgets_nobody(pool: Pool, kind: str) -> None:
    mean = (1 + 2 + 1) / 4  # a batch that is skipped counts, as one does whose loss is 0
    assert pool.run(skipped_in_between, kind, ranks=RANKS) == [pytest.approx([mean, mean])] * RANKS


# -- loaders, and joinables of others ---------------------------------------------------------------------------------


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Of each rank as many as it has steps in ``COUNTS``, two a batch, and one more."""

    def __init__(self, rank: int, count: int) -> None:
        self.x, self.y = (torch.cat(each) for each in zip(*(streams(rank, step)[0] for step in range(4)), strict=True))
        self.count = 2 * count - 1 if count else 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


@contextmanager
def workers_allowed() -> Iterator[None]:
    """Ranks of the pool end with the tests, and such processes may start none of their own."""
    config = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setitem(config, "daemon", False)
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of a fork where there are threads
        yield


def loaded(rank: int, workers: int) -> tuple[dict[str, torch.Tensor], list[int], bool | None]:
    torch.manual_seed(0)
    ddp, summer = DistributedDataParallel(MLP()), Summer()
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    totals = []
    for counts in COUNTS:
        in_epoch = workers * (counts is COUNTS[-1])  # in one epoch; to end them takes torch seconds
        loader = DataLoader(Samples(rank, counts[rank]), batch_size=2, num_workers=in_epoch)
        block = Join([summer, ddp, optimizer], divide_by_initial_world_size=False)
        with workers_allowed(), block as join:
            for x, y in join.iterate(loader, weigh=len_of_first):
                summer()
                optimizer.zero_grad()
                join.scale(loss(ddp(x), y)).backward()
                optimizer.step()
        totals.append(summer.total)
    return flat_state(ddp.module.state_dict(), optimizer.state_dict()), totals, summer.last_joiner


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=in_test_all)])
def test_a_data_loader_and_a_joinable_of_others(pool: Pool, workers: int) -> None:
    torch.manual_seed(0)
    net = MLP()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for counts in COUNTS:
        loaders = [list(DataLoader(Samples(rank, counts[rank]), batch_size=2)) for rank in range(RANKS)]
        for step in range(max(counts)):
            parts = [loader[step] for loader in loaders if step < len(loader)]
            x, y = (torch.cat(each) for each in zip(*parts, strict=True))
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()
    for rank, (state, totals, last) in enumerate(pool.run(loaded, workers, ranks=RANKS)):
        assert_same(state, flat_state(net.state_dict(), optimizer.state_dict()), TOLERANCE)
        # Every rank is in the body of every step.
        assert totals == [RANKS * steps for steps in accumulate(map(max, COUNTS))]
        assert last is (rank == 0)


class Unreadable(Samples):
    """A sample of the second batch cannot be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 2:
            raise OSError("disk")
        return super().__getitem__(index)


def unreadable(rank: int) -> str:
    ddp = DistributedDataParallel(MLP())
    loader = DataLoader((Unreadable if rank == 1 else Samples)(rank, 3 - rank), batch_size=2)
    text = "fine"
    try:
        with Join([ddp]) as join:
            for x, y in join.iterate(loader):
                loss(ddp(x), y).backward()
                dist.all_reduce(torch.ones(1))
    except (OSError, JoinError) as error:
        text = f"{type(error).__name__}: {error}"
    return text


def test_a_data_loader_that_raises(ending: Ending) -> None:
    zero, one, two = ending.run(unreadable)
    assert one == "OSError: disk"
    for text in (zero, two):
        assert text.startswith(f"PeerError: rank 1 failed: {one}")


class Diverged(ArithmeticError):
    """By which a body ends its loop."""


LEAVES: dict[str, Any] = {"raise": Diverged, "exit": partial(SystemExit, 1), "interrupt": KeyboardInterrupt}


def leaving_on_a_dummy(rank: int, how: str, dummy: Any) -> None:
    ddp = DistributedDataParallel(MLP())
    with Join([ddp]) as join:
        for x in join.iterate([torch.ones(2, FEATURES)] * (3, 2, 0)[rank], dummy=dummy):
            if rank == 2 and how == "vanish":
                os._exit(1)
            if rank == 2:
                raise LEAVES[how]
            ddp(x).mean().backward()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
@pytest.mark.parametrize(
    ("how", "dummy"), [("raise", "last"), ("exit", "empty"), ("interrupt", "last"), ("vanish", "empty")]
)
def test_whoever_leaves_on_a_dummy_tells_the_others(ending: Ending, how: str, dummy: str) -> None:
    """Scripts that exit if a loss is NaN silence all ranks but the first, so all must say it."""
    for end in ending.ends(leaving_on_a_dummy, how, dummy)[:2]:
        assert end.error.startswith("PeerError: rank 2 "), end.text
        assert "only 2 of 3 ranks had data" in end.error
        assert (f"got a dummy batch (dummy={dummy!r})" in end.error) is (how != "vanish")
        assert ("pass dummy='last'" in end.error) is (how != "vanish" and dummy == "empty")


@dataclass
class Named:
    """A batch of one's own."""

    x: torch.Tensor
    y: torch.Tensor
    name: str


def of_dataclasses(rank: int, dummy: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MLP())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    loader = [Named(*streams(rank, step)[0], f"{rank} {step}") for step in range((2, 1, 0)[rank])]
    names: list[str] = []
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for each in join.iterate(loader, dummy=dummy):
            names.append(each.name)
            optimizer.zero_grad()
            loss(ddp(each.x), each.y).backward()
            optimizer.step()
    return flat_state(ddp.module.state_dict()), names


@pytest.mark.parametrize("dummy", ["empty", "last"])
def test_batches_of_a_class_of_ones_own(pool: Pool, dummy: Any) -> None:
    """Also on a rank that gets another one's for its dummies."""
    torch.manual_seed(0)
    net = MLP()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for ranks in ([0, 1], [0]):
        optimizer.zero_grad()
        compute_all({"a": net}, plain, dict.fromkeys(ranks, 1 / len(ranks)), len(ranks) % 2)
        optimizer.step()
    results = pool.run(of_dataclasses, dummy, ranks=RANKS)
    assert [names for _, names in results] == [["0 0", "0 1"], ["1 0", "1 0"], ["0 0", "0 0"]]
    for state, _ in results:
        assert_same(state, flat_state(net.state_dict()), TOLERANCE)


class Held(MutableMapping[str, torch.Tensor]):
    """Keeps its items in an attribute, which a copy shares."""

    def __init__(self, rank: int, step: int) -> None:
        self.held = dict(zip("xy", streams(rank, step)[0], strict=True))

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.held[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


COUNTS_OF_KEPT = 2, 3, 0


def on_kept_batches(rank: int, dummy: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    torch.manual_seed(0)
    ddp, lengths = DistributedDataParallel(MLP()), list[int]()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = [Held(rank, step) for step in range(COUNTS_OF_KEPT[rank])]
    for _ in range(2):
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for each in join.iterate(data, dummy=dummy):
                optimizer.zero_grad()
                loss(ddp(each["x"].mul_(0.5)), each["y"]).backward()  # its own work, once for each batch and epoch
                optimizer.step()
                if join.shadowing:
                    lengths.append(len(each.pop("y")))
    return flat_state(ddp.module.state_dict(), [dict(each) for each in data]), lengths


@pytest.mark.parametrize("dummy", ["empty", "last"])
def test_dummies_leave_the_batches_alone_that_a_data_set_keeps(pool: Pool, dummy: Any) -> None:
    torch.manual_seed(0)
    net, data = MLP(), [[Held(rank, step) for step in range(count)] for rank, count in enumerate(COUNTS_OF_KEPT)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in [0, 1, 2] * 2:
        now = [own[step] for own in data if step < len(own)]
        optimizer.zero_grad()
        for each in now:
            (loss(net(each["x"].mul_(0.5)), each["y"]) / len(now)).backward()
        optimizer.step()
    results = pool.run(on_kept_batches, dummy, ranks=RANKS)
    assert [lengths for _, lengths in results] == [
        [len(streams(0, 0)[0][0]) * (dummy == "last")] * n for n in (2, 0, 6)
    ]
    for (state, _), own in zip(results, data, strict=True):
        assert_same(state, flat_state(net.state_dict(), [dict(each) for each in own]), TOLERANCE)


def alive(rank: int, lookahead: int) -> list[int]:
    """How many batches there are in memory, counted in the body."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()

    def loader() -> Iterator[Any]:
        for _ in range(3 + 3 * rank):
            batch = Batch()
            made.add(batch)
            yield batch
            del batch

    ddp = DistributedDataParallel(MLP())
    with Join([ddp]) as join:
        counts = []
        for batch in join.iterate(loader(), lookahead=lookahead, dummy="last"):
            counts.append(len(made))
            del batch
        return counts


class Batch:
    """Something that can be counted."""


@pytest.mark.parametrize("lookahead", [1, 2])
def test_no_more_batches_are_held_than_are_read_ahead(pool: Pool, lookahead: int) -> None:
    results = pool.run(alive, lookahead, ranks=2)
    assert all(max(counts) <= 2 * lookahead for counts in results), results
    assert [len(counts) for counts in results] == [6, 6]
    assert results[0][-1] == 1  # the dummy


def send_between_two(rank: int) -> int:
    """Two of three ranks send messages to each other, which gloo counts as it counts collectives."""
    model, message, steps = DistributedDataParallel(MLP()), torch.zeros(1), 0
    with using(still=1.0, look=0.05), Join([model]) as join:  # shorter, a busy machine lets ranks stand still as long
        for x in join.iterate([torch.ones(2, FEATURES)] * (4, 6, 0)[rank]):
            model(x).sum().backward()
            if rank < 2 and steps == 4:
                time.sleep(2.0)  # the last rank waits meanwhile, and has started less in all
            if rank == 0:
                dist.send(message, 1)
            elif rank == 1:
                dist.recv(message, 0)
            steps += 1
    return steps


def test_messages_between_some_ranks(pool: Pool) -> None:
    assert pool.run(send_between_two) == [6, 6, 6]


def sends_and_lingers(rank: int) -> int:
    """The last rank waits for a roll call while the others are in the step still, and have started more."""
    model, message, steps = DistributedDataParallel(MLP()), torch.zeros(1), 0
    with using(look=0.02), Join([model]) as join:
        for x in join.iterate([torch.ones(2, FEATURES)] * 3):
            model(x).sum().backward()
            if rank == 0:
                dist.send(message, 1)
            elif rank == 1:
                dist.recv(message, 0)
            time.sleep(0.3 * (rank < 2))
            steps += 1
    return steps


def test_messages_between_some_ranks_that_take_a_while(pool: Pool) -> None:
    assert pool.run(sends_and_lingers) == [3, 3, 3]
