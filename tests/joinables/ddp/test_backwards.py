"""What counts as a backward, in a plain block and in a loop: one that reaches the parameters, and nothing else."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from join.collectives import collective_of
from tests.ending import Ending
from tests.harness import Pool, all_or_each
from tests.join.counter import Counter
from tests.training import assert_same, batch, flat_state

COUNTS = (2, 5, 0)


class Case(NamedTuple):
    kind: str
    way: str = "plain"
    buffers: bool = False
    unused: bool = False
    timeout: float | None = None


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if case.buffers else nn.Identity()
    return nn.Sequential(nn.Linear(4, 8, bias=False), norm, nn.Tanh(), nn.Linear(8, 2)).double()


def run_backwards(case: Case, model: Any, parameters: list[torch.Tensor], x: torch.Tensor, scale: Any) -> None:
    """The backwards of one step."""
    kind = case.kind
    if kind in ("gradient penalty", "attack"):
        x = x.requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.square().mean(), x, create_graph=kind == "gradient penalty")
        if kind == "attack":
            scale(model((x + 0.1 * gradient.sign()).detach()).square().mean()).backward()
        else:
            scale(output.square().mean() + gradient.square().sum(1).mean()).backward()
        return
    loss = model(x).square().mean()
    if kind == "logged norm":
        torch.autograd.grad(loss, parameters, retain_graph=True)
    if kind == "named inputs":
        scale(loss).backward(inputs=parameters)
    elif kind == "some inputs":
        scale(loss).backward(inputs=parameters[:1])
    elif kind == "no graph":
        scale(loss.detach()).backward()
    else:
        scale(loss).backward()
    if kind == "preview":
        model(x + 1)


def train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(build(case), find_unused_parameters=case.unused)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.05)
    with Join([ddp, optimizer], divide_by_initial_world_size=False, timeout=case.timeout) as join:
        data = [batch(rank, 0, step)[0].double() for step in range(COUNTS[rank])]
        for x in join.iterate(data) if case.way == "iterate" else data:
            optimizer.zero_grad()
            run_backwards(case, ddp, list(ddp.parameters()), x, join.scale)
            optimizer.step()
    return flat_state(ddp.module.state_dict(), optimizer.state_dict())


def reference(case: Case) -> dict[str, torch.Tensor]:
    net = build(case)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        ranks = [rank for rank, count in enumerate(COUNTS) if step < count]
        before, kept = [buffer.clone() for buffer in net.buffers()], []
        for rank in ranks:
            for buffer, value in zip(net.buffers(), before, strict=True):
                buffer.copy_(value)
            x = batch(rank, 0, step)[0].double()
            run_backwards(case, net, list(net.parameters()), x, lambda loss, ranks=ranks: loss / len(ranks))
            kept = kept or [buffer.clone() for buffer in net.buffers()]
        for buffer, value in zip(net.buffers(), kept, strict=True):
            buffer.copy_(value)
        optimizer.step()
    return flat_state(net.state_dict(), optimizer.state_dict())


KINDS = ["gradient penalty", "attack", "logged norm", "named inputs", "preview"]
CASES = [Case(kind, way, buffers) for kind, way, buffers in product(KINDS, ["plain", "iterate"], [False, True])]
CASES += [Case(kind, unused=True) for kind in KINDS] + [Case(kind, "plain", True, timeout=30.0) for kind in KINDS]


@pytest.mark.parametrize("case", all_or_each(CASES), ids=str)
def test_equals_one_process(pool: Pool, case: Case) -> None:
    expected = reference(case)
    if case.kind == "preview" and case.way == "plain":  # where statistics may miss the step after a rank's last one
        expected = {key: value for key, value in expected.items() if not key.startswith("0.1.")}
    for state in pool.run(train, case):
        assert_same({key: state[key] for key in expected}, expected, 1e-9)


def outcome(rank: int, case: Case) -> str:
    try:
        train(rank, case)
    except (JoinError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


NOT_REDUCED = {"no graph": "does not require grad", "some inputs": "reach all parameters|finished reduction"}


@pytest.mark.parametrize(
    ("kind", "way", "unused"), all_or_each(product(NOT_REDUCED, ["plain", "iterate"], [False, True]))
)
def test_what_cannot_be_reduced_is_an_error(ending: Ending, kind: str, way: str, unused: bool) -> None:
    for text in ending.run(outcome, Case(kind, way, unused=unused)):
        assert re.search(NOT_REDUCED[kind], text)


def skips_the_last(rank: int, weighted: bool) -> list[torch.Tensor]:
    """In the second step, rank 0 alone has a batch, and runs no backward."""
    model = build(Case("skips", buffers=True))
    ddp = DistributedDataParallel(model)
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for step in range(2 - rank):
            join.weight = 3.0 if weighted else None
            loss = ddp(batch(rank, 0, step)[0].double()).square().mean()
            if step == 0:
                join.scale(loss).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_backward_that_no_rank_runs_after_its_forward(pool: Pool, weighted: bool) -> None:
    model = build(Case("skips", buffers=True))
    for rank in range(2):
        (model(batch(rank, 0, 0)[0].double()).square().mean() / 2).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for found in pool.run(skips_the_last, weighted, ranks=3):
        torch.testing.assert_close(found, expected)


def two_forwards(rank: int, synchronises_first: bool, way: str) -> dict[str, torch.Tensor]:
    """One of two forwards before a backward is under ``no_sync``."""
    ddp = DistributedDataParallel(build(Case("two")))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        data = [batch(rank, 0, step)[0].double() for step in range(COUNTS[rank])]
        for x in join.iterate(data) if way == "iterate" else data:
            optimizer.zero_grad()
            losses = list[torch.Tensor]()
            for synchronises in (synchronises_first, not synchronises_first):
                with nullcontext() if synchronises else ddp.no_sync():
                    losses.append(ddp(x + len(losses)).square().mean())
            join.scale(losses[0] + losses[1]).backward()
            optimizer.step()
    return flat_state(ddp.module.state_dict())


@pytest.mark.parametrize("way", ["plain", "iterate"])
@pytest.mark.parametrize("synchronises_first", [True, False])
def test_two_forwards_of_which_one_synchronises(pool: Pool, synchronises_first: bool, way: str) -> None:
    model = build(Case("two"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        ranks = [rank for rank, count in enumerate(COUNTS) if step < count]
        for x in [batch(rank, 0, step)[0].double() for rank in ranks]:
            ((model(x).square().mean() + model(x + 1).square().mean()) / len(ranks)).backward()
        optimizer.step()
    for state in pool.run(two_forwards, synchronises_first, way):
        assert_same(state, flat_state(model.state_dict()), 1e-9)


def skips_where_another_rank_ran_out(rank: int) -> list[torch.Tensor]:
    """Both ranks accumulate. Then rank 1 is out of data, and rank 0 goes on without the backward that would reduce."""
    model = build(Case("skips", buffers=True))
    ddp, counter = DistributedDataParallel(model), Counter(collective_of(None))
    with Join([ddp, counter], divide_by_initial_world_size=False):
        for step in range(2 - rank):
            ddp.require_backward_grad_sync = step == 1
            loss = ddp(batch(rank, 0, step)[0].double()).square().mean()
            if step == 0:
                loss.backward()
            else:
                counter()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_skipped_backward_beside_gradients_of_a_rank_that_ran_out(pool: Pool) -> None:
    """No rank has run it, so it is no error, and the gradients of rank 0 stay as they were."""
    model = build(Case("skips", buffers=True))
    model(batch(0, 0, 0)[0].double()).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(pool.run(skips_where_another_rank_ran_out, ranks=2)[0], expected)


def skips_under_a_hook(rank: int) -> list[torch.Tensor]:
    """All ranks skip the second backward, whose reduction is not 0, because the hook remembers the first."""
    model = build(Case("skips", buffers=True))
    ddp, counter = DistributedDataParallel(model), Counter(collective_of(None))
    group: Any = ddp.process_group

    def reduce(bucket: Any, remembered: float) -> Any:
        bucket.buffer().add_(remembered)
        return default_hooks.allreduce_hook(group, bucket)

    ddp.register_comm_hook([1.0], lambda state, bucket: reduce(bucket, *state))
    with Join([ddp, counter], divide_by_initial_world_size=False):
        for step in range(2):
            loss = ddp(batch(rank, 0, step)[0].double()).square().mean()
            if step == 0:
                loss.backward()
            counter()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_backward_that_all_ranks_skip_under_a_hook_that_remembers(pool: Pool) -> None:
    model = build(Case("skips", buffers=True))
    for rank in range(2):
        (model(batch(rank, 0, 0)[0].double()).square().mean() / 2).backward()
    expected = [parameter.grad + 1 for parameter in model.parameters() if parameter.grad is not None]
    for found in pool.run(skips_under_a_hook, ranks=2):
        torch.testing.assert_close(found, expected)


def refuse(module: nn.Module, args: Any) -> None:
    raise OverflowError


def tries_again(rank: int, raises: bool) -> list[torch.Tensor]:
    """A forward that has announced its backward raises. The window that follows is reduced by its last backward."""
    ddp = DistributedDataParallel(build(Case("again", buffers=True)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for step in range(3 - 2 * rank):
            x = batch(rank, 0, step)[0].double()
            optimizer.zero_grad()
            if raises:
                handle = ddp.module[-1].register_forward_pre_hook(refuse)
                with pytest.raises(OverflowError):
                    ddp(x)
                handle.remove()
            with ddp.no_sync():
                ddp(x).square().mean().backward()
            ddp(x + 1).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in ddp.parameters()]


def test_a_backward_under_no_sync_after_a_forward_that_raised(pool: Pool) -> None:
    torch.testing.assert_close(pool.run(tries_again, True, ranks=2), pool.run(tries_again, False, ranks=2))


def forwards_under_no_sync(rank: int, own: str, counts: tuple[int, ...]) -> list[str]:
    """Step on gradients that DDP never reduces, or accumulate them for one that it does; return the warnings."""
    ddp = DistributedDataParallel(build(Case("own")))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, Join([ddp, optimizer], divide_by_initial_world_size=False):
        warnings.simplefilter("always")
        for step in range(counts[rank]):
            reduces = own == "accumulates" and step % 2
            with nullcontext() if reduces else ddp.no_sync():
                loss = ddp(batch(rank, 0, step)[0].double()).square().mean()
                if own == "backward, too":
                    loss.backward()
            if own != "backward, too":
                loss.backward()
            if reduces or own != "accumulates":
                optimizer.step()
                optimizer.zero_grad()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("own", ["forward", "backward, too", "accumulates"])
def test_steps_on_gradients_whose_forward_was_under_no_sync(pool: Pool, own: str) -> None:
    found = pool.run(forwards_under_no_sync, own, (4, 2, 0), ranks=3)
    assert [len(each) for each in found] == ([1, 1, 0] if own == "forward" else [0, 0, 0])
    assert all("the forward decides" in text for each in found for text in each)
