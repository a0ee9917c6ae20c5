"""Training on uneven inputs, one way to do it as a :class:`Case`, and the same in one process."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from joinables import Replay, ZeroStep
from tests import models
from tests.grammar import Recipe
from tests.models import BATCH, OPTIMIZERS, TOLERANCE, assert_same, batch, flat_state, value_of
from tests.pool import Pool

TOLERANCE_OF_DOUBLES = 1e-8


@dataclass(frozen=True)
class Case:
    """One way to train; counts[epoch][rank] is the number of batches."""

    model: str | Recipe = "mlp"
    optimizer: str = "adam"
    zero: bool = False
    zero_views: bool = False
    initial: bool = False
    clip: bool = False
    accumulate: int = 1
    compiled: bool = False
    hook: str = ""
    ddp: dict[str, Any] = field(default_factory=dict)
    counts: tuple[tuple[int, ...], ...] = ((0, 3, 1), (2, 0, 4), (3, 1, 0))
    to_none: bool = True
    zero_every: int = 1  # optimizer steps; in between, gradients pile up
    rate: float | None = None
    weighted: bool = False
    declared: bool = False
    replay: bool = False  # the module is listed to be replayed
    iterate: str = ""  # over join.iterate, with these dummies: "empty" or "last"
    lookahead: int = 1
    until: str = "all"
    stop: int | None = None  # all ranks break out of join.iterate after as many steps
    one_block: bool = False  # for all epochs
    plain_last: bool = False  # the last epoch is not over join.iterate
    forwards: int = 1  # before each backward
    evaluates: bool = False  # at some steps

    @property
    def ranks(self) -> int:
        return len(self.counts[0])

    def in_lockstep(self, epoch: int) -> bool:
        return bool(self.iterate) and not (self.plain_last and epoch == len(self.counts) - 1)

    def trained(self, epoch: int) -> tuple[int, ...]:
        """How many of its batches each rank comes to."""
        counts = self.counts[epoch]
        if not self.in_lockstep(epoch):
            return counts
        most = min(counts) if self.until == "first" else max(counts)
        return tuple(min(count, most, most if self.stop is None else self.stop) for count in counts)


def weight_of(case: Case, rank: int, epoch: int, step: int) -> int:
    """The number of samples in a batch; all the same, and no reason to weigh, unless the case has weights."""
    return 2 + (rank + epoch + 2 * step) % 4 if case.weighted else BATCH


def data_of(case: Case, rank: int, epoch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(rank, epoch, step)
    return x[: weight_of(case, rank, epoch, step)], y[: weight_of(case, rank, epoch, step)]


def batches(join: Join, case: Case, rank: int, epoch: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches of an epoch; in lockstep, if the case has it so, and then with dummies."""
    mine = [data_of(case, rank, epoch, step) for step in range(case.counts[epoch][rank])]
    if not case.in_lockstep(epoch):
        return mine
    loader = mine if case.declared else iter(mine)
    options: Any = {"until": case.until, "dummy": case.iterate, "lookahead": case.lookahead}
    return join.iterate(loader, **options)


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return models.build(case.model) if isinstance(case.model, str) else case.model.build()


def branch_of(rank: int, step: int) -> int:
    """A number that says which branches of a model a rank takes at a step."""
    return rank + step


def loss_of(model: Any, case: Case, branch: int, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = data
    loss = torch.zeros(())
    for forward in range(case.forwards):
        if isinstance(case.model, str):
            output = model(x, branch % 2) if case.model == "branches" else model(x)
        else:
            output = model(x + forward, branch)
        loss = loss + ((value_of(output) - y) ** 2).mean()
    return loss if case.weighted else loss / case.accumulate  # weights make a mean of the micro-batches too


def full_state(optimizer: Any) -> Any:
    """The state dict; of a sharded optimizer, with all shards."""
    state = None
    for to in range(dist.get_world_size() if hasattr(optimizer, "consolidate_state_dict") else 0):
        optimizer.consolidate_state_dict(to=to)  # drops what another rank holds, so each reads in its turn
        if dist.get_rank() == to:
            state = optimizer.state_dict()
    return state or optimizer.state_dict()


def train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(build(case), **case.ddp)
    if case.hook == "allreduce":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    model = torch.compile(ddp, backend="eager") if case.compiled else ddp
    cls, options = OPTIMIZERS[case.optimizer]
    options = options if case.rate is None else {**options, "lr": case.rate}
    if case.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(
            ddp.parameters(), cls, parameters_as_bucket_view=case.zero_views, **options
        )
    else:
        optimizer = cls(ddp.parameters(), **options)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)

    stepper = ZeroStep(optimizer, transform_gradients=clip) if case.zero and case.clip else optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    epochs = range(len(case.counts))
    for block in [epochs] if case.one_block else [[epoch] for epoch in epochs]:
        steps: Any = None
        if case.declared:
            steps = "loader" if case.iterate else case.counts[block[0]][rank] // case.accumulate
        listed = Replay(ddp) if case.replay else model
        join = Join([listed, stepper, scheduler], divide_by_initial_world_size=case.initial, steps=steps)
        join.weight = 1 if case.weighted else None
        with join:
            for epoch in block:
                for step, data in enumerate(batches(join, case, rank, epoch)):
                    join.weight = len(data[0]) if case.weighted else None
                    if case.evaluates and (rank + step) % 2:
                        ddp.eval()
                        with torch.no_grad():
                            loss_of(model, case, branch_of(rank, step), data)
                        ddp.train()
                    sync = (step + 1) % case.accumulate == 0
                    if step % (case.accumulate * case.zero_every) == 0:
                        optimizer.zero_grad(set_to_none=case.to_none)
                    with nullcontext() if sync else ddp.no_sync():
                        loss_of(model, case, branch_of(rank, step), data).backward()
                    if sync:
                        if case.clip:
                            clip()
                        optimizer.step()
                        scheduler.step()
                    if step + 1 == case.stop and case.in_lockstep(epoch):
                        break
    return flat_state(ddp.module.state_dict(), full_state(optimizer), scheduler.state_dict())


def reference(case: Case) -> dict[str, torch.Tensor]:
    """One process: the gradients of all ranks that have data, averaged; buffers of the lowest of them."""
    model = build(case)
    cls, options = OPTIMIZERS[case.optimizer]
    options = options if case.rate is None else {**options, "lr": case.rate}
    optimizer = cls(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    k = case.accumulate
    for epoch in range(len(case.counts)):
        counts = case.trained(epoch)
        for window in range(max(counts) // k):
            if window % case.zero_every == 0:
                optimizer.zero_grad(set_to_none=case.to_none)
            ranks = [rank for rank in range(case.ranks) if counts[rank] > window * k]
            windows = {rank: range(window * k, min((window + 1) * k, counts[rank])) for rank in ranks}
            total = sum(weight_of(case, rank, epoch, step) for rank, steps in windows.items() for step in steps)
            divisor = case.ranks if case.initial else len(ranks)
            shared = [b.clone() for b in model.buffers()]
            kept = None
            for rank in ranks:
                for buffer, value in zip(model.buffers(), shared, strict=True):
                    buffer.copy_(value)
                for step in windows[rank]:
                    loss = loss_of(model, case, branch_of(rank, step), data_of(case, rank, epoch, step))
                    share = weight_of(case, rank, epoch, step) / total if case.weighted else 1 / divisor
                    (loss * share).backward()
                # The leader is the lowest rank that takes part in the synchronised step.
                if kept is None and counts[rank] >= (window + 1) * k:
                    kept = [b.clone() for b in model.buffers()]
            for buffer, value in zip(model.buffers(), kept or [], strict=True):
                buffer.copy_(value)
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
    return flat_state(model.state_dict(), optimizer.state_dict(), scheduler.state_dict())


def check(pool: Pool, case: Case, **options: Any) -> None:
    """Train on as many ranks as the case has: all end the same, bit for bit, and as one process does."""
    states = pool.run(train, case, ranks=case.ranks, **options)
    for other in states[1:]:
        assert_same(states[0], other)
    assert_same(states[0], reference(case), TOLERANCE if isinstance(case.model, str) else TOLERANCE_OF_DOUBLES)
