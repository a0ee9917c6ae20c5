"""Weights go through the loss, by ``join.scale`` in plain blocks and in loops, beside one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from join import Join, JoinError
from joinables import LossGate, ZeroStep
from tests.ending import Ending
from tests.harness import ALL, Pool, all_or_each
from tests.training import assert_same, flat_state, learn_graph

COUNTS = (5, 0, 3)
TOLERANCE = 1e-9


class Net(nn.Module):
    """Of doubles; ``skips`` leaves a layer out at some calls, ``checkpoints`` runs it again in the backward."""

    def __init__(self, *, skips: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.skips, self.checkpoints = skips, checkpoints
        self.double()

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if not self.skips or number % 2:
            hidden = torch.tanh(self.second(hidden))
        return self.last(hidden)


class Checkpointed(Net):
    """All parameters are behind a checkpoint that runs a backward of its own inside the backward."""

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        x = x.detach().requires_grad_()  # what makes a reentrant checkpoint run backward
        return checkpoint(super().forward, x, number, use_reentrant=True)


def flat_gradients(net: Net) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])


class Case(NamedTuple):
    """How to train; ``what`` is a word for each peculiarity."""

    loop: bool = True
    weigh: bool = True
    window: Any = 1
    until: str = "all"
    initial: bool = False
    what: str = ""
    counts: tuple[int, ...] = COUNTS

    @property
    def steps(self) -> int:
        return min(self.counts) if self.until == "first" else max(self.counts)

    @property
    def size(self) -> int:
        return self.steps if self.window == "all" else self.window


def batch(rank: int, step: int) -> torch.Tensor:
    rows = 2 + (rank + 2 * step) % 4
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * rank + step)).double()


def loss_of(net: Any, x: torch.Tensor, number: int, what: str) -> torch.Tensor:
    if what == "penalty":
        x = x.detach().requires_grad_()
        output = net(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().mean() + (gradient.square().sum(1) - 1).square().mean()
    if what == "losses of two forwards":
        return net(x).square().mean() + net(x + 1).abs().mean()
    return net(x, number).square().mean()


def built(what: str) -> Net:
    return Checkpointed() if what == "reentrant" else Net(skips=what == "unused")


def wrapped(net: Net, what: str) -> Any:
    options = {
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "views": {"gradient_as_bucket_view": True},
    }
    ddp = DistributedDataParallel(net, **options.get(what, {}))  # pyright: ignore[reportArgumentType]
    if what == "powersgd":
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=100)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return torch.compile(ddp, backend="eager") if what == "compiled" else ddp


def train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    net = built(case.what)
    model, what = wrapped(net, case.what), case.what
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=what == "scaler")
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.05)

    def clip() -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)

    if what == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.05)
    listed = [model, ZeroStep(optimizer, clip) if what == "zero" else optimizer, *[scaler][: scaler.is_enabled()]]
    divisor = 4 if what == "divided" else 1
    learn_graph(model, lambda: loss_of(model, batch(rank, 0), 0, what))
    with Join(listed, divide_by_initial_world_size=case.initial, loss_divided_by=divisor) as join:
        data = [batch(rank, step) for step in range(case.counts[rank])]
        until: Any = case.until
        options: dict[str, Any] = {"weigh": len if case.weigh else None, "window": case.window}
        options["fill_window"] = what == "filled"
        steps = 0
        for step, x in enumerate(join.iterate(data, until, **options) if case.loop else data):
            steps += 1
            if not case.loop:
                join.weight = len(x)
            ends = join.ends_window if case.loop else (step + 1) % case.size == 0 or step + 1 == len(data)
            with nullcontext() if ends else model.no_sync():
                loss = join.scale(loss_of(model, x, step, what) / divisor)
                scaler.scale(loss).backward()
                if what == "two backwards":
                    join.scale(loss_of(model, x + 1, step, what)).backward()
            if ends:
                if what == "zero":
                    clip()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        if what == "filled":
            assert steps == -(-case.steps // case.size) * case.size
    return flat_state(net.state_dict())


def reference(case: Case) -> dict[str, torch.Tensor]:
    net = Net(skips=case.what == "unused")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for window in windows(case):
        parts = [(rank, step) for step in window for rank, count in enumerate(case.counts) if step < count]
        total = sum(len(batch(*part)) if case.weigh else 1 for part in parts)
        if case.initial and not case.weigh:
            total = len(case.counts) * len(window)
        for rank, step in parts:
            x = batch(rank, step)
            share = (len(x) if case.weigh else 1) / total
            (loss_of(net, x, step, case.what) * share).backward()
            if case.what == "two backwards":
                (loss_of(net, x + 1, step, case.what) * share).backward()
        if case.what == "zero":
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return flat_state(net.state_dict())


def windows(case: Case) -> Iterator[range]:
    for begin in range(0, case.steps, case.size):
        yield range(begin, min(begin + case.size, case.steps))


KINDS = ["", "unused", "static", "views", "compiled", "scaler", "zero", "penalty", "reentrant", "powersgd"]
KINDS += ["losses of two forwards", "two backwards", "divided"]
CASES = [
    *[Case(what=what) for what in KINDS],
    *[Case(loop=False, what=what) for what in KINDS if what != "zero"],
    *[Case(what=what, window=2) for what in KINDS if what not in ("static",)],
    Case(loop=False, window=5),
    Case(loop=False, window=2, what="scaler"),
    *[Case(weigh=weigh, window=window) for weigh in (True, False) for window in (1, 3, "all")],
    *[Case(weigh=False, window=window, initial=True) for window in (1, 2, "all")],
    Case(window=2, what="filled"),
    Case(weigh=False, window=4, what="filled"),
    *[Case(until="first", window=window, counts=(5, 3, 4)) for window in (2, "all")],
    Case(until="first", window=2, what="filled", counts=(5, 3, 4)),
]


SOME = [case for case in CASES if ALL or case.what != "compiled"]  # of compiled ones, make test has one elsewhere


@pytest.mark.parametrize("case", all_or_each(SOME), ids=str)
def test_equals_one_process(pool: Pool, case: Case) -> None:
    expected = reference(case)
    for state in pool.run(train, case):
        assert_same(state, expected, TOLERANCE)


def hand_written(rank: int, divided_over: int | None) -> dict[str, torch.Tensor]:
    """An engine of the user's own, which sums gradients, or averages them."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [batch(rank, step) for step in range(COUNTS[rank])]
    with Join([], process_group=None, divide_by_initial_world_size=False) as join:
        for x in join.iterate(data, weigh=len):
            join.scale(net(x).square().mean(), divided_over).backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= 1 if divided_over == 1 else dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
    return flat_state(net.state_dict())


@pytest.mark.parametrize("divided_over", [None, 1])
def test_any_engine(pool: Pool, divided_over: int | None) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(max(COUNTS)):
        parts = [batch(rank, step) for rank in range(3) if step < COUNTS[rank]]
        losses = torch.stack([net(x).square().mean() * len(x) for x in parts])
        (losses.sum() / sum(map(len, parts))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in pool.run(hand_written, divided_over):
        assert_same(state, flat_state(net.state_dict()), TOLERANCE)


def means(rank: int) -> tuple[float, list[float | None], int]:
    """The weighted mean of what batches hold, a rank's weights, and the length of its loop."""
    data, weights = [float(10 * rank + step) for step in range(COUNTS[rank])], []
    total = torch.zeros(2, dtype=torch.float64)
    with Join([], process_group=None) as join:
        batches = join.iterate(data, weigh=lambda value: value + 1, dummy="last")
        length = len(batches)
        for value in batches:
            weights.append(join.weight)
            total += torch.tensor([value, 1.0]) * (join.weight or 0.0)
    dist.all_reduce(total)
    return (total[0] / total[1]).item(), weights, length


def test_weight_and_length_of_a_loop(pool: Pool) -> None:
    values = [float(10 * rank + step) for rank in range(3) for step in range(COUNTS[rank])]
    expected = sum(value * (value + 1) for value in values) / sum(value + 1 for value in values)
    for rank, (mean, weights, length) in enumerate(pool.run(means)):
        assert mean == pytest.approx(expected)
        assert weights == [10 * rank + step + 1 if step < COUNTS[rank] else 0 for step in range(max(COUNTS))]
        assert length == max(COUNTS)


class NoNumber(nn.Module):
    """Its loss on nothing is NaN, and so is the derivative by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).mean() * self.weight[0]


def trains_on_no_number(rank: int, how: str) -> torch.Tensor:
    ddp = DistributedDataParallel(NoNumber())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        data = [batch(rank, step) for step in range(COUNTS[rank])]
        for x in join.iterate(data, weigh=(lambda x: len(x) * (len(x) > 2)) if how == "weighs 0" else None):
            optimizer.zero_grad()
            loss = ddp(x if len(x) != 2 or how != "weighs 0" else x * float("nan"))
            (loss if how == "two lines" else join.scale(loss)).backward()
            optimizer.step()
    return ddp.module.weight.detach()


@pytest.mark.parametrize("how", ["two lines", "scaled", "weighs 0"])
def test_dummies_add_nothing_whatever_arrives(pool: Pool, how: str) -> None:
    net = NoNumber()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(max(COUNTS)):
        parts = [batch(rank, step) for rank in range(3) if step < COUNTS[rank]]
        weights = [len(x) * (len(x) > 2) if how == "weighs 0" else 1 for x in parts]
        optimizer.zero_grad()
        for x, weight in zip(parts, weights, strict=True):
            if weight:
                (net(x) * weight / sum(weights)).backward()
        if any(weights):
            optimizer.step()
    for weight in pool.run(trains_on_no_number, how):
        torch.testing.assert_close(weight, net.weight.detach(), atol=TOLERANCE, rtol=0)


def keeps_its_momentum(rank: int) -> torch.Tensor:
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with Join([ddp, optimizer]) as join:
        for step, x in enumerate(
            join.iterate([batch(rank, step) for step in range(3)], weigh=lambda x: int(len(x) == 3))
        ):
            optimizer.zero_grad()
            join.scale(ddp(x).square().mean()).backward()
            optimizer.step()
            assert step != 1 or all(not parameter.grad.any() for parameter in ddp.parameters())
    return ddp.module.last.weight.detach()


def test_weights_of_0_on_all_ranks_give_gradients_of_0(pool: Pool) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 0)
        for rank in range(3):
            if len(batch(rank, step)) == 3:
                net(batch(rank, step)).square().mean().backward()
        optimizer.step()
    for weight in pool.run(keeps_its_momentum):
        torch.testing.assert_close(weight, net.last.weight.detach(), atol=TOLERANCE, rtol=0)


def counts_batches(rank: int, counts: tuple[int, ...], fill: bool) -> int:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).double())
    with Join([ddp], divide_by_initial_world_size=False) as join:
        data = [batch(rank, step) for step in range(counts[rank])]
        for x in join.iterate(data, window=2, fill_window=fill):
            with nullcontext() if join.ends_window else ddp.no_sync():
                join.scale(ddp(x).square().mean()).backward()
    return int(ddp.module[1].num_batches_tracked)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize(("counts", "seen"), [((0, 1, 0), 1), ((0, 3, 3), 3), ((2, 3, 0), 3), ((0, 4, 0), 4)])
def test_buffers_of_a_window_are_those_of_a_rank_with_data(
    pool: Pool, counts: tuple[int, ...], seen: int, fill: bool
) -> None:
    assert pool.run(counts_batches, counts, fill) == [seen] * 3


def mistaken(rank: int, how: str) -> str:
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = [batch(rank, step) for step in range(COUNTS[rank])]
    options: dict[str, Any] = {
        "forgets with weigh": {"weigh": len},
        "forgets with a window": {"window": 2},
        "steps inside a window": {"window": 2},
        "breaks inside a window": {"window": 2},
        "weighs negatively": {"weigh": lambda x: -1},
    }.get(how, {})
    try:
        with Join([ddp, optimizer]) as join:
            for step, x in enumerate(data if how.startswith("plain") else join.iterate(data, **options)):
                if how == "sets the weight" or how == "plain: forgets":
                    join.weight = len(x)
                scales = step < 1 if how == "stops to scale" else step > 0 if how == "begins to scale" else True
                with nullcontext() if step % 2 or how != "leaves gradients unreduced" else ddp.no_sync():
                    loss = ddp(x).square().mean()
                    (join.scale(loss) if scales and "forgets" not in how else loss).backward()
                if how == "breaks inside a window" and step == 2:
                    break
                if how != "breaks inside a window":
                    optimizer.step()
    except (JoinError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "forgets with weigh",
            "was not scaled, although join.iterate was called with a weigh function. Call join.scale(loss).backward()",
        ),
        (
            "forgets with a window",
            "was not scaled, although join.iterate was called with window=2. Call join.scale(loss).backward()",
        ),
        ("steps inside a window", "Step the optimizer only if join.ends_window is True"),
        ("breaks inside a window", "Leave the loop only if join.ends_window is True"),
        ("leaves gradients unreduced", "Pass join.iterate(loader, window=k)"),
        ("begins to scale", "Call join.scale(loss) for every backward of the loop, or for none"),
        ("stops to scale", "Call join.scale(loss) for every backward of the loop, or for none"),
        ("sets the weight", "Pass join.iterate(loader, weigh=function)"),
        ("weighs negatively", "is not a finite number of at least 0"),
        ("plain: forgets", "call join.scale(loss).backward()"),
    ],
)
def test_mistakes(ending: Ending, how: str, said: str) -> None:
    for text in ending.run(mistaken, how):
        assert said in text


def collects_a_window(rank: int) -> str:
    """Read the batches of a window first, and train on them in its last step."""
    ddp = DistributedDataParallel(Net())
    collected: list[torch.Tensor] = []
    with pytest.raises(JoinError) as caught, Join([ddp], divide_by_initial_world_size=False) as join:
        for x in join.iterate([batch(rank, step) for step in range(COUNTS[rank])], window=3):
            collected.append(x)
            for each in collected if join.ends_window else ():
                join.scale(ddp(each).square().mean()).backward()
    return str(caught.value)


def test_losses_that_are_scaled_in_another_step_are_refused(pool: Pool) -> None:
    for text in pool.run(collects_a_window):
        assert text.startswith("2 losses were scaled in step 3 of join.iterate, but none in an earlier step")


def rows_of(pair: list[torch.Tensor]) -> int:
    return sum(map(len, pair))


def trains_on_lists(rank: int) -> torch.Tensor:
    """A step has a list of two batches, the last of which may be empty."""
    net = Net()
    ddp = DistributedDataParallel(net)
    own = [batch(rank, step) for step in range(COUNTS[rank])]
    pairs = [[own[at], *(own[at + 1 : at + 2] or [own[at][:0]])] for at in range(0, len(own), 2)]
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for pair in join.iterate(pairs, weigh=rows_of):
            for x, context in zip(pair, (ddp.no_sync(), nullcontext()), strict=True):
                with context:
                    join.scale(ddp(x).square().sum() / max(1, rows_of(pair))).backward()
    return flat_gradients(net)


def test_a_list_of_batches_is_a_batch(pool: Pool) -> None:
    """It is what J601 says to do with the batches of a window."""
    net = Net()
    for first in range(0, max(COUNTS), 2):
        steps = [(rank, step) for rank, count in enumerate(COUNTS) for step in (first, first + 1) if step < count]
        x = torch.cat([batch(*each) for each in steps])
        (net(x).square().sum() / len(x)).backward()
    for found in pool.run(trains_on_lists):
        torch.testing.assert_close(found, flat_gradients(net))


def skips_a_step(rank: int) -> torch.Tensor:
    """Two losses in each step, none of them in step 3, on all ranks."""
    net = Net()
    ddp = DistributedDataParallel(net)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for step, x in enumerate(join.iterate([batch(rank, step) for step in range(COUNTS[rank])], window=2)):
            for _ in range(2 * (step != 2)):
                join.scale(ddp(x).square().mean() / 2).backward()
    return flat_gradients(net)


def test_a_loop_with_two_losses_in_a_step_may_skip_a_step(pool: Pool) -> None:
    net = Net()
    for step, batches_of_window in {0: 4, 1: 4, 3: 3, 4: 1}.items():
        for rank in (rank for rank, count in enumerate(COUNTS) if step < count):
            (net(batch(rank, step)).square().mean() / batches_of_window).backward()
    for found in pool.run(skips_a_step):
        torch.testing.assert_close(found, flat_gradients(net))


def scales_before_the_gate(rank: int) -> Any:
    net = Net()
    ddp = DistributedDataParallel(LossGate(net), find_unused_parameters=True)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for x in join.iterate([batch(rank, step) for step in range(COUNTS[rank])], dummy="last"):
            ddp(join.scale(net(x).square().mean())).backward()
    return flat_gradients(net)


def test_a_loss_may_be_scaled_before_its_gate(pool: Pool) -> None:
    net = Net()
    for step in range(max(COUNTS)):
        ranks = [rank for rank, count in enumerate(COUNTS) if step < count]
        for rank in ranks:
            (net(batch(rank, step)).square().mean() / len(ranks)).backward()
    for found in pool.run(scales_before_the_gate):
        torch.testing.assert_close(found, flat_gradients(net))


class Raises(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ValueError("a backward that raises")


def a_backward_raises(rank: int) -> str:
    model = DistributedDataParallel(Net())
    data = [torch.ones(2, 4, dtype=torch.float64)] * COUNTS[rank]
    with pytest.raises(JoinError) as caught, Join([model], divide_by_initial_world_size=False) as join:
        for step, x in enumerate(join.iterate(data)):
            loss = model(x).sum()
            if step == 1:
                with pytest.raises(ValueError, match="a backward that raises"):
                    join.scale(Raises.apply(loss)).backward()
            else:
                (join.scale(loss) if step == 0 else loss).backward()
    return str(caught.value)


def test_a_loss_after_a_backward_that_raised_is_not_taken_for_scaled(ending: Ending) -> None:
    for end in ending.ends(a_backward_raises, ranks=len(COUNTS)):
        assert "is not scaled, but the loss of the first backward" in str(end.result), end.text


def scales_one_of_two(rank: int) -> str:
    """Both forwards of a step come before its backwards."""
    ddp = DistributedDataParallel(Net())
    try:
        with Join([ddp], divide_by_initial_world_size=False) as join:
            for x in join.iterate([batch(rank, step) for step in range(COUNTS[rank])]):
                first, second = ddp(x).sum(), ddp(x + 1).sum()
                join.scale(first).backward()
                second.backward()
    except JoinError as error:
        return str(error)
    return "fine"


def test_a_backward_is_not_scaled_because_the_one_before_it_was(ending: Ending) -> None:
    for text in ending.run(scales_one_of_two):
        assert "is not scaled, but the loss of the first backward in this loop" in text and "[J461]" in text
