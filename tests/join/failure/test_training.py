"""Ranks that raise, diverge or stay away while training stock modules: errors on all ranks."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from join import (
    EarlyTerminationError,
    Join,
    JoinError,
    JoinHook,
    JoinTimeoutError,
    PeerError,
    ProtocolError,
)
from join.collectives import collective_of
from join.protocol.messages import Messages
from joinables import State
from tests.ending import Ending, assert_blamed
from tests.harness import Pool, all_or_each, assert_soon, in_quiet, in_test_all
from tests.join.counter import Counter, group_works
from tests.meeting import tell, wait_for
from tests.training import Optimizer, batch, build, optimizer_of, shard
from tests.versions import needs_gloo_with_limits

RANKS = 3
OTHERS = 0, 2  # than rank 1
LOST = "The process group cannot be used any more: restart from a checkpoint"


class Trouble(Exception):
    """What the failing rank raises."""


class Fragile(torch.nn.Module):
    """Raises in its forward when told to."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.body, self.broken = build(model), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if self.broken:
            raise Trouble("in forward")
        return y


def unhooked(ddp: Any, optimizer: Any) -> None:
    assert not ddp._forward_hooks
    assert not ddp._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not ddp._join_config.enable


class Raising(NamedTuple):
    """Where rank 1 raises, in which training."""

    where: str
    model: str
    zero: bool
    initial: bool
    over_group: bool


def raising(rank: int, where: str, model: str, zero: bool, initial: bool) -> tuple[str, float]:
    ddp = DistributedDataParallel(Fragile(model))
    optimizer = optimizer_of(Optimizer(zero=zero), ddp)
    outcome, failed_at = "fine", 0.0
    try:
        with Join([ddp, optimizer], divide_by_initial_world_size=initial):
            for step in range([0, 3, 6][rank]):
                if rank == 1 and step == 2:
                    failed_at = time.time()
                    if where == "loading":
                        raise Trouble("in loading")
                    ddp.module.broken = where == "forward"
                x, y = batch(rank, 0, step)
                optimizer.zero_grad()
                output = ddp(x)
                if rank == 1 and step == 2 and where == "loss":
                    raise Trouble("in loss")
                ((output - y) ** 2).mean().backward()
                optimizer.step()
                if rank == 1 and step == 2 and where == "end":
                    raise Trouble("in end")
    except Trouble as error:
        outcome = f"own: {error}"
    except PeerError as error:
        outcome = f"peer: {error}"
    unhooked(ddp, optimizer)
    return outcome, failed_at or time.time()


PLACES = ("loading", "forward", "loss", "end")
RAISING = [Raising(*each) for each in product(PLACES, ("mlp", "norm"), (False, True), (True, False), (False, True))]


@pytest.mark.parametrize("case", all_or_each(RAISING, Raising._asdict, together=2), ids=str)
def test_a_rank_that_raises(ending: Ending, case: Raising) -> None:
    *how, over_group = case
    results = ending.run(raising, *how, over_group=over_group)
    outcomes, times = [outcome for outcome, _ in results], [when for _, when in results]
    assert outcomes[1] == f"own: in {case.where}"
    for rank in (0, 2):
        assert outcomes[rank].startswith(f"peer: rank 1 failed: Trouble: in {case.where}. {LOST}")
        assert times[rank] - times[1] < 10


def buffer_hook(group: Any, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[Any]]:
    return [dist.broadcast(buffer, 1, group=group, async_op=True).get_future() for buffer in buffers.values()]


def raising_before_late_buffers(rank: int, initial: bool) -> str:
    """The buffers are announced for after a forward that does not come to its end."""
    ddp = DistributedDataParallel(Fragile("norm"))
    ddp._register_buffer_comm_hook(ddp.process_group, buffer_hook, _BufferCommHookLocation.POST_FORWARD)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    try:
        with Join([ddp, optimizer], divide_by_initial_world_size=initial):
            for step in range([0, 3, 6][rank]):
                ddp.module.broken = rank == 1 and step == 2
                if step != 1 or not initial:
                    optimizer.zero_grad()  # where gradients are kept, buffers have a header of their own
                ddp(batch(rank, 0, step)[0]).sum().backward()
    except (Trouble, PeerError) as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("initial", [True, False])
def test_a_rank_that_raises_while_buffers_are_due(ending: Ending, initial: bool) -> None:
    peer = f"rank 1 failed: Trouble: in forward. {LOST}"
    assert ending.run(raising_before_late_buffers, initial) == [peer, "in forward", peer]


def two_fail(rank: int) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp]):
            for step in range(4):
                if rank > 0 and step == 2:
                    raise Trouble(f"on {rank}")
                ddp(batch(rank, 0, step)[0]).sum().backward()
    except (Trouble, PeerError) as error:
        return str(error)
    return "fine"


def test_two_ranks_that_raise(ending: Ending) -> None:
    peer, *own = ending.run(two_fail)
    assert own == ["on 1", "on 2"]
    assert "rank 1 failed: Trouble: on 1" in peer or "rank 2 failed: Trouble: on 2" in peer


def diverging(rank: int, kind: str) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    first, second = (DistributedDataParallel(build(name)) for name in ("mlp", "norm"))
    optimizer = ZeroRedundancyOptimizer(first.parameters(), torch.optim.SGD, lr=0.1)
    parts = {"modules": [first, second], "step": [first, optimizer], "buffers": [second, optimizer]}[kind]
    with pytest.raises((ProtocolError, PeerError)) as caught, Join(parts):
        x, _ = batch(rank, 0, 0)
        for step in range(2):
            other = step == 1 and rank == 2
            if other and kind != "modules":
                optimizer.step()
            elif step == 0 or rank < 2 or kind == "modules":
                (second if other or kind == "buffers" else first)(x).sum().backward()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("kind", ["modules", "step", "buffers"])
def test_ranks_that_diverge(ending: Ending, kind: str) -> None:
    messages = ending.run(diverging, kind)
    assert any(message.startswith("ProtocolError: ") for message in messages)
    for message in messages:
        assert "active ranks announced different bursts" in message
        assert "DistributedDataParallel(" in message


def capturing(rank: int, iterates: bool) -> str:
    """Rank 1 captures its second step in what looks like a CUDA graph."""
    ddp, loader = DistributedDataParallel(build("mlp")), [batch(rank, 0, step) for step in range(3)]
    with ExitStack() as patches, pytest.raises(JoinError) as caught, Join([ddp]) as join:
        for step, (x, y) in enumerate(join.iterate(loader) if iterates else loader):
            if rank == 1 and step == 1:
                patches.enter_context(patch("torch.cuda.is_initialized", lambda: True))
                patches.enter_context(patch("torch.cuda.is_current_stream_capturing", lambda: True))
            ((ddp(x) - y) ** 2).mean().backward()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("iterates", [False, True])
def test_a_captured_graph(ending: Ending, iterates: bool) -> None:
    texts = ending.run(capturing, iterates)
    assert texts[1].startswith("JoinError: A CUDA graph captures the backward of DistributedDataParallel(MLP)")
    for text in (texts[0], texts[2]):
        assert text.startswith("PeerError: rank 1 failed: JoinError: A CUDA graph captures the backward of")


def sleeping(rank: int, where: str) -> str:
    ddp = DistributedDataParallel(build("norm" if where == "buffers" else "mlp"))
    try:
        with Join([ddp], timeout=2.0):
            for step in range(3):
                x, y = batch(rank, 0, step)
                if rank == 1 and step == 2 and where != "loss":
                    wait_for(OTHERS)
                output = ddp(x)
                if rank == 1 and step == 2 and where == "loss":
                    wait_for(OTHERS)
                ((output - y) ** 2).mean().backward()
    except JoinTimeoutError as error:
        tell()
        if rank != 1:
            wait_for([1])  # the pending header needs its peers alive until rank 1 has woken up
        return str(error)
    return "fine"


@pytest.mark.parametrize(("where", "over_group"), all_or_each(product(["loading", "loss", "buffers"], [False, True])))
def test_a_rank_that_sleeps(pool: Pool, where: str, over_group: bool) -> None:
    texts = pool.run(sleeping, where, ranks=RANKS, over_group=over_group)
    for rank in (0, 2):
        assert "Ranks [1] announced no collective within timeout=" in texts[rank]
        assert f"rank {2 - rank} announced" in texts[rank]
        assert "of DistributedDataParallel(" in texts[rank]
    assert "Ranks [1] announced no collective within timeout=2 s" in texts[1]


def throwing(rank: int, parts: str, initial: bool) -> tuple[int, str]:
    ddp = DistributedDataParallel(build("norm"))
    other = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    done = 0
    joinables = [ddp, optimizer] if parts == "one" else [ddp, optimizer, other]
    with (
        pytest.raises(EarlyTerminationError) as caught,
        Join(joinables, throw_on_early_termination=True, divide_by_initial_world_size=initial),
    ):
        for step in range([4, 2, 3][rank]):
            optimizer.zero_grad()
            x, y = batch(rank, 0, step)
            ((ddp(x) - y) ** 2).mean().backward()
            if parts == "two":
                other(x).sum().backward()
            optimizer.step()
            done += 1
    group_works(collective_of(None))
    ddp(batch(rank, 0, 0)[0]).sum().backward()  # still usable, and in step
    unhooked(ddp, optimizer)
    return done, str(caught.value)


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("parts", ["one", "two"])
def test_early_termination(pool: Pool, parts: str, initial: bool) -> None:
    everyone = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    expected = [(2, everyone), (2, "Rank 1 exhausted all inputs."), (2, everyone)]
    assert pool.run(throwing, parts, initial, ranks=RANKS) == expected


def skipping(rank: int, at: int, model: str, initial: bool) -> str:
    ddp = DistributedDataParallel(build(model))
    optimizer = torch.optim.Adam(ddp.parameters())
    text = "fine"
    try:
        with Join([ddp, optimizer], divide_by_initial_world_size=initial):
            for step in range((3, 3, 0)[rank]):
                optimizer.zero_grad()
                x, y = batch(rank, 0, step)
                value = ((ddp(x) - y) ** 2).mean()
                if (rank, step) != (1, at):
                    value.backward()
                    optimizer.step()
    except JoinError as error:
        text = f"{type(error).__name__}: {error}"
    return text


@pytest.mark.parametrize(("model", "initial"), [("mlp", True), ("norm", True), ("norm", False)])
def test_a_last_backward_that_was_announced_and_one_rank_skips(ending: Ending, model: str, initial: bool) -> None:
    for text in ending.run(skipping, 2, model, initial):
        assert "the step count of parameter 0 of Adam is 3.0 on rank 0, 2.0 on rank 1" in text


@pytest.mark.parametrize(("at", "model", "initial"), [(1, "norm", False), (1, "mlp", True), (2, "mlp", False)])
def test_a_backward_that_one_rank_skips_is_one_batch_less(pool: Pool, at: int, model: str, initial: bool) -> None:
    assert pool.run(skipping, at, model, initial, ranks=RANKS) == ["fine"] * RANKS


def catching(rank: int, at: int, broken: bool, lockstep: bool) -> tuple[str, list[torch.Tensor]]:
    """Rank 1's forward of one of its batches raises, or it does not have that batch."""
    ddp = DistributedDataParallel(Fragile("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps = [step for step in range((3, 3, 0)[rank]) if broken or (rank, step) != (1, at)]
    text = "fine"
    try:
        with Join([ddp, optimizer]) as join:
            loader = [(step, *batch(rank, 0, step)) for step in steps]
            for step, x, y in join.iterate(loader) if lockstep else loader:
                optimizer.zero_grad()
                ddp.module.broken = broken and (rank, step) == (1, at)
                try:
                    output = ddp(x)
                except Trouble:
                    continue
                ((output - y) ** 2).mean().backward()
                optimizer.step()
    except (ProtocolError, PeerError) as error:
        text = f"{type(error).__name__}: {error}"
    return text, [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.parametrize("at", [0, 1])
def test_a_forward_that_raises_and_is_caught_is_one_batch_less(pool: Pool, at: int) -> None:
    caught, absent = (pool.run(catching, at, broken, False, ranks=RANKS) for broken in (True, False))
    assert [text for text, _ in (*caught, *absent)] == ["fine"] * 2 * RANKS
    torch.testing.assert_close(caught[0][1], absent[0][1], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("at", "over_group"), [(0, False), (2, True)])
def test_in_a_loop_in_lockstep_it_is_an_error_for_all(ending: Ending, at: int, over_group: bool) -> None:
    (first, _), (second, _), (third, _) = ending.run(catching, at, True, True, over_group=over_group)
    assert second.startswith("ProtocolError: Rank 1 skipped the backward of DistributedDataParallel(Fragile)")
    for text in (first, third):
        assert text.startswith(f"PeerError: rank 1 failed: {second}")


class Manual(torch.nn.Module):
    """Runs its own backward, as a module does under manual optimization in some frameworks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build("mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.net(x).square().mean()
        loss.backward()
        return loss.detach()


def optimizing_manually(rank: int, lockstep: bool) -> str:
    ddp = DistributedDataParallel(Manual())
    try:
        with Join([ddp]) as join:
            mine = [batch(rank, 0, step)[0] for step in range((2, 3, 0)[rank])]
            for x in join.iterate(mine) if lockstep else mine:
                ddp(x)
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_backward_inside_the_forward(ending: Ending, lockstep: bool) -> None:
    for text in ending.run(optimizing_manually, lockstep):
        assert "A backward ran inside the forward of DistributedDataParallel(Manual)" in text


class Lingers(torch.autograd.Function):
    """The identity, whose backward takes longer than others wait for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        wait_for(OTHERS)
        return gradients[0]


class Lingering(torch.nn.Sequential):
    def __init__(self, lingers: bool) -> None:
        super().__init__(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        self.lingers = lingers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self[0](x)
        return self[1](Lingers.apply(y) if self.lingers else y)


def lingering(rank: int, way: str) -> tuple[str, float]:
    ddp = DistributedDataParallel(Lingering(rank == 1), bucket_cap_mb=1e-6)
    started = time.monotonic()
    try:
        with Join([ddp], timeout=1.0) as join:
            inputs = [batch(rank, 0, step)[0] for step in range((2, 2, 0)[rank])]
            for x in join.iterate(inputs) if way == "iterate" else inputs:
                ddp(x).sum().backward()
    except (JoinTimeoutError, PeerError) as error:
        if rank == 1:
            os._exit(0)  # at last
        tell()
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "fine", 0.0


@in_test_all
@in_quiet
@needs_gloo_with_limits
def test_a_rank_that_lingers_in_a_burst(ending: Ending) -> None:
    for started in [ending.start(lingering, way) for way in ("plain", "iterate")]:  # both wait at the same time
        (first, took), _, (third, took_too) = [end.result or ("", 0) for end in started.ends()]
        for text in (first, third):
            assert text.startswith("JoinTimeoutError: ")
            assert "A collective was not done within 2 s, twice the timeout" in text
        assert_soon(max(took, took_too), 12)


def dying_before_a_break(rank: int, limit: float | None) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp], timeout=limit) as join:
            for step, (x, _) in enumerate(join.iterate([batch(rank, 0, step) for step in range(5)])):
                ddp(x).sum().backward()
                if step == 2:
                    if rank == 1:
                        time.sleep(1)
                        os._exit(3)
                    break
    except (PeerError, JoinTimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@in_test_all
@pytest.mark.parametrize(("limit", "over_group"), [(None, False), (2.0, True)])
def test_a_rank_that_dies_where_all_leave(ending: Ending, limit: float | None, over_group: bool) -> None:
    for rank, end in enumerate(ending.ends(dying_before_a_break, limit, over_group=over_group, limit=30)):
        if rank != 1:
            assert end.code == 0
            if limit is None:
                assert end.result.startswith("PeerError: rank 1 is gone")
            else:  # its own limit, or that of another rank, which was there first
                assert end.result.startswith("JoinTimeoutError: ") and "timeout=2 s" in end.result


def test_a_rank_that_dies_where_the_only_other_one_leaves(ending: Ending) -> None:
    """No third rank leaves a note of it."""
    first, second = ending.ends(dying_before_a_break, None, ranks=2, limit=30)
    assert second.code == 3 and (first.result or "").startswith("PeerError: rank 1 is gone")


class Ends(State):
    """State that communicates when the block ends, and fails on one rank."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return EndsHook()


class EndsHook(JoinHook):
    def post_hook(self, is_last_joiner: bool) -> None:
        if dist.get_rank() == 0:
            raise KeyError("at the end")
        dist.all_reduce(torch.ones(100))


def failing_at_the_end(rank: int) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp, Ends(torch.optim.SGD(ddp.parameters(), lr=0.1))]):
            for step in range(rank):
                ddp(batch(rank, 0, step)[0]).sum().backward()
    except (PeerError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_a_rank_that_fails_at_the_end(ending: Ending) -> None:
    assert_blamed(ending.run(failing_at_the_end), 0, "KeyError: 'at the end'")


class Unable(State):
    """State that fails on one rank as the block is entered."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if dist.get_rank() == 1:
            raise KeyError("no hook")
        return super().join_hook(**kwargs)


def failing_to_enter(rank: int) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    try:
        with Join([ddp, Unable(torch.optim.SGD(ddp.parameters(), lr=0.1))]):
            ddp(batch(rank, 0, 0)[0]).sum().backward()
    except (PeerError, KeyError) as error:
        tell()
        if rank == 1:
            wait_for(OTHERS)  # its process is there for as long
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_a_rank_that_fails_to_enter(ending: Ending) -> None:
    assert_blamed(ending.run(failing_to_enter), 1, "KeyError: 'no hook'")


class Announcing(Counter):
    """As a newcomer may write it: the hook of a joined rank calls what active ranks call."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return AnnouncingHook(self)


class AnnouncingHook(JoinHook):
    def __init__(self, counter: Announcing) -> None:
        self._counter = counter

    def main_hook(self) -> None:
        self._counter()


def announcing_in_the_hook(rank: int, follows: bool) -> str:
    counter, first = Announcing(collective_of(None)), Counter(collective_of(None))
    try:
        with Join([first, counter] if follows else [counter]):
            for _ in range(2 * rank):
                if follows:
                    first()
                counter()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize(("over_group", "follows"), [(False, False), (True, False), (False, True)])
def test_a_main_hook_that_announces(ending: Ending, over_group: bool, follows: bool) -> None:
    told = "JoinError: The main_hook of Announcing announced Announcing"
    ends = ending.run(announcing_in_the_hook, follows, over_group=over_group)
    assert any(text.startswith(told) for text in ends)
    assert all(told in text for text in ends)


def failing_between(rank: int) -> str:
    """Rank 1 is interrupted when all compare what they list."""
    ddp = DistributedDataParallel(build("mlp"))
    try:
        if rank == 1:
            Messages.start = interrupted
        with Join([ddp]):
            ddp(batch(rank, 0, 0)[0]).sum().backward()
    except (PeerError, KeyError) as error:
        tell()
        if rank == 1:
            wait_for(OTHERS)  # its process is there for as long
        return f"{type(error).__name__}: {error}"
    return "fine"


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyError("amid entering")


def test_a_rank_that_fails_amid_entering(ending: Ending) -> None:
    assert_blamed(ending.run(failing_between), 1, "KeyError: 'amid entering'")


def wrap_twice(rank: int) -> None:
    part = torch.nn.Sequential(torch.nn.Linear(1, 1), DistributedDataParallel(torch.nn.Linear(1, 1)))
    with pytest.raises(
        ValueError, match=r"is wrapped in DistributedDataParallel twice \('1'\)\. Wrap the plain module"
    ):
        Join([DistributedDataParallel(part)])
    with pytest.raises(ValueError, match=r"is wrapped in DistributedDataParallel twice\. Wrap the plain module"):
        Join([DistributedDataParallel(DistributedDataParallel(torch.nn.Linear(1, 1)))])


def test_a_module_that_is_wrapped_twice(pool: Pool) -> None:
    pool.run(wrap_twice, ranks=2)


def late_backward(rank: int, kind: str, leaves: bool) -> str:
    """The last forward of a loop, which rank 1 runs on a dummy, is followed by a backward after the loop."""
    module: Any = shard() if kind == "sharded" else DistributedDataParallel(build("mlp"))
    loss = torch.zeros(())
    try:
        with Join([module], divide_by_initial_world_size=False) as join:
            mine = [batch(rank, 0, step)[0] for step in range((2, 0, 2)[rank])]
            for x in join.iterate(mine):
                loss = module(x).square().mean()
                if leaves:
                    break
            loss.backward()
    except (PeerError, ProtocolError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("kind", ["DDP", "sharded"])
def test_a_backward_after_the_loop_in_which_its_forward_ran_on_a_dummy(ending: Ending, kind: str, leaves: bool) -> None:
    name = "FSDPMLP" if kind == "sharded" else "MLP"
    assert_blamed(ending.run(late_backward, kind, leaves), 1, f"ProtocolError: A backward of {name} ran after the loop")
