"""What Join costs, in collectives, waits and memory. Times are in benchmarks."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from join.collectives import Line, TorchCollective
from tests.harness import Pool, all_or_each
from tests.training import batch, build, mesh_of

STEPS = 4
TOTAL = STEPS + 4  # two before them, and two after


def fully_sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of()
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def profile_steps(rank: int, setup: str, joining: bool) -> dict[str, float]:
    """Collectives per step by kind, once everything is warm."""
    torch.manual_seed(0)
    model = build("norm" if "norm" in setup else "mlp")
    ddp: Any = fully_sharded(model) if "sharded" in setup else DistributedDataParallel(model)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if "zero" in setup:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    initial = "mean over contributors" not in setup

    def step(number: int, scale: Any) -> None:
        x, y = batch(rank, 0, number)
        if "eval" in setup:
            with torch.no_grad():
                ddp.module(x) if "norm" in setup and not joining else ddp(x)
            return
        if "no_sync" in setup:
            with ddp.no_sync():
                scale(((ddp(x) - y) ** 2).mean()).backward()
            return
        optimizer.zero_grad()
        scale(((ddp(x) - y) ** 2).mean()).backward()
        optimizer.step()

    x, y = batch(rank, 0, 9)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    block: Any = nullcontext()
    if joining:
        block = Join([ddp, optimizer], divide_by_initial_world_size=initial)
    with block as join:
        scale: Any = join.scale if joining and ("weights" in setup or "sharded" in setup) else lambda loss: loss
        numbers: Any = range(TOTAL)
        if joining and "lockstep" in setup:
            weigh: Any = (lambda _: 3) if "weights" in setup else None
            numbers = join.iterate(numbers, lookahead=STEPS if "lookahead" in setup else 1, weigh=weigh)
        elif joining and "weights" in setup:
            join.weight = 3
        for number in numbers:
            if number in (2, 2 + STEPS):
                time.sleep(0.1)  # what is under way is counted when it is done
            if number == 2:
                profile.start()
            if number == 2 + STEPS:
                profile.stop()
            if 2 <= number < 2 + STEPS:
                step(number - 2, scale)
            else:
                optimizer.zero_grad()
                scale(((ddp(x) - y) ** 2).mean()).backward()
                optimizer.step()
    counts: dict[str, float] = {}
    for event in profile.events() or []:
        if event.name.startswith("gloo:"):
            counts[event.name] = counts.get(event.name, 0) + 1 / STEPS
    return counts


HEADER = ROLL_CALL = "gloo:all_reduce"
# With messages over gloo: a header or a roll call is one.
COSTS: dict[str, dict[str, float]] = {
    "mlp": {HEADER: 1},
    "mlp, mean over contributors": {HEADER: 1},
    "norm": {HEADER: 1},
    "norm, mean over contributors": {HEADER: 2},
    "mlp, zero": {HEADER: 2},
    "norm, zero": {HEADER: 2},
    "mlp, sharded, lockstep": {ROLL_CALL: 1},
    "mlp, no_sync": {},
    "mlp, eval": {},
    "norm, eval": {},
    "mlp, lockstep": {ROLL_CALL: 1},
    "norm, mean over contributors, lockstep": {ROLL_CALL: 1},
    "norm, zero, lockstep": {ROLL_CALL: 1},
    "mlp, mean over contributors, lockstep, lookahead": {ROLL_CALL: 1 / STEPS},
    # One more with weights, or contributors where a header covers buffers too: their sum.
    "mlp, weights": {HEADER: 2},
    "norm, zero, weights": {HEADER: 3},
    "mlp, weights, lockstep": {ROLL_CALL: 1},
}


@pytest.mark.parametrize("setup", all_or_each(COSTS, lambda setup: dict.fromkeys(str(setup).split(", "))))
def test_extra_collectives(pool: Pool, setup: str) -> None:
    plain = pool.run(profile_steps, setup, False, ranks=2)
    over_group = pool.run(profile_steps, setup, True, ranks=2, over_group=True)
    beside_it = pool.run(profile_steps, setup, True, ranks=2)
    for before, *after in zip(plain, over_group, beside_it, strict=True):
        extra = [
            {
                name: count
                for name in before.keys() | counts.keys()
                if (count := counts.get(name, 0) - before.get(name, 0))
            }
            for counts in after
        ]
        assert extra == [COSTS[setup], {}]  # the second: nothing, where ranks share memory


class Watched:
    """A sum or the like under way, which notes when it is waited for, or read."""

    def __init__(self, work: Any, recorder: Recorder) -> None:
        self._work, self._recorder = work, recorder

    def __getattr__(self, name: str) -> Any:
        if name in ("wait", "total") and self._recorder.log[-1:] != ["wait"]:
            self._recorder.log.append("wait")
        return getattr(self._work, name)


class WatchedLine(Line):
    """A line that notes what is started on it."""

    def __init__(self, line: Line, recorder: Recorder) -> None:
        self._line, self._recorder = line, recorder

    def sum(self, number: int, bits: int) -> Any:
        self._recorder.log.append("sum")
        return Watched(self._line.sum(number, bits), self._recorder)

    def sum_float(self, number: float) -> Any:
        self._recorder.log.append("sum")
        return Watched(self._line.sum_float(number), self._recorder)

    def gather(self, data: bytes) -> Any:
        self._recorder.log.append("gather")
        return Watched(self._line.gather(data), self._recorder)


class Recorder(TorchCollective):
    """Notes what is done, and which headers were not done yet when they were waited for."""

    log: list[str]

    def line(self, number: int = 0) -> Line:
        return WatchedLine(super().line(number), self)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Any:
        self.log.append("broadcast")
        return super().broadcast(tensor, source)


def record(rank: int, setup: str, counts: list[int]) -> tuple[list[str], list[str]]:
    """What is logged on the header's collective inside the steps, and on exit."""
    import join.collectives as collectives

    ddp = DistributedDataParallel(build("norm" if "norm" in setup else "mlp"))
    recorder = Recorder(ddp.process_group)  # pyright: ignore[reportArgumentType]  # held, or the library would make one of its own
    recorder.log = []
    collectives._of_group[ddp.process_group] = recorder  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    marks: list[str] = []
    with Join([ddp, optimizer, scheduler], divide_by_initial_world_size="mean" not in setup):
        for step in range(counts[rank]):
            if step == 2:  # the first step rebuilds buckets, the second settles that
                recorder.log.clear()
            x, y = batch(rank, 0, step)
            optimizer.zero_grad()
            recorder.log.append("forward")
            output = ddp(x)
            recorder.log.append("backward")
            ((output - y) ** 2).mean().backward()
            recorder.log.append("step")
            optimizer.step()
        marks, recorder.log = recorder.log, []
    return marks, recorder.log


@pytest.mark.parametrize(
    ("setup", "step"),
    [
        # The header of one step is read before the next one is sent, when it is long done.
        ("mlp", ["forward", "wait", "sum", "backward", "step"]),
        ("norm", ["forward", "wait", "sum", "backward", "step"]),
        # The number of contributors is read at the end of the backward, behind the gradients.
        ("mlp, mean", ["forward", "backward", "sum", "wait", "step"]),
        ("norm, mean", ["forward", "wait", "sum", "backward", "sum", "wait", "step"]),
    ],
)
def test_no_header_is_awaited_before_its_burst(pool: Pool, setup: str, step: list[str]) -> None:
    for marks, _ in pool.run(record, setup, [5, 5], ranks=2, over_group=True):
        assert marks == step * 3


def test_even_inputs_exit_with_a_broadcast_of_buffers_alone(pool: Pool) -> None:
    # the last step's header; the one that shows nobody is active; what is compared, with the report; all buffers
    header, compared, buffers = ["wait", "sum", "wait"], ["gather", "wait"], ["broadcast"]
    for _, on_exit in pool.run(record, "mlp", [3, 3], ranks=2, over_group=True):
        assert on_exit == header + compared
    for _, on_exit in pool.run(record, "norm", [3, 3], ranks=2, over_group=True):
        assert on_exit == header + compared + buffers
    for _, on_exit in pool.run(record, "norm", [3, 1], ranks=2, over_group=True):
        assert "broadcast" in on_exit


def shadow_memory(rank: int, model_size: int) -> tuple[int, int]:
    """Bytes of tensors that a joined rank allocates while it shadows, and of one set of buckets."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(model_size, model_size, bias=False))
    buckets = sum(p.numel() * p.element_size() for p in ddp.parameters())
    x = torch.ones(1, model_size)
    peak = 0
    with Join([ddp]):
        for _ in range([1, 5][rank]):
            ddp.zero_grad()
            ddp(x).sum().backward()
        ddp.zero_grad()
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        profile.__enter__()
    profile.__exit__(None, None, None)
    held = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, held)
    return peak, buckets


def test_joined_rank_allocates_one_set_of_gradients(pool: Pool) -> None:
    (peak, buckets), _ = pool.run(shadow_memory, 1000, ranks=2)
    assert buckets == 4_000_000
    assert peak <= 1.05 * buckets
