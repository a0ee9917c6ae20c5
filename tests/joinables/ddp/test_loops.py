"""Loops that are not forward, backward, step: they end, and equal one process.

A program is a list of phases; each computes gradients from one rank's batch and then updates. A rank runs both for
itself; the single-process reference computes for every rank that has a batch, and updates once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.harness import Pool, all_or_each, first_and_last
from tests.joinables.ddp.nets import RANKS, Compute, Data, Nets, Scale, compute_all, loss, plain, streams
from tests.training import MLP, TOLERANCE, Norm, assert_same, flat_state
from tests.versions import OWN_BUFFERS


def eval_inside(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    if rank != 1:
        nets["a"].eval()
        with torch.no_grad():
            nets["a"](data[3][0])
        nets["a"].train()
    plain(nets, data, rank, step, scale)


def eval_with_grad(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    if rank == 1:
        nets["a"](data[3][0])
    plain(nets, data, rank, step, scale)


def skip_by_all(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    x, y = data[0]
    output = nets["a"](x)
    if step % 2 == 0:
        scale(loss(output, y)).backward()


def forwards(count: int) -> Compute:
    def compute(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
        total: Any = 0
        for stream in range(count):
            x, y = data[stream]
            total = total + loss(nets["a"](x), y)
        scale(total).backward()

    return compute


def backwards(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    x, y = data[0]
    value = scale(loss(nets["a"](x), y))
    value.backward(retain_graph=True)
    value.backward()


def two_losses(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    losses = []
    for stream in range(2):
        x, y = data[stream]
        losses.append(scale(loss(nets["a"](x), y)))
    for value in losses:
        value.backward()


def two_passes(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    for stream in range(2):
        x, y = data[stream]
        scale(loss(nets["a"](x), y)).backward()


def encode_and_decode(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    x, y = data[0]
    scale(loss(nets["b"](nets["a"](x)), y)).backward()


def discriminate(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    x, y = data[0]
    fake = nets["a"](x).detach()
    scale(nets["b"](y).mean() - nets["b"](fake).mean()).backward()


def generate(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    x, _ = data[1]
    scale(nets["b"](nets["a"](x)).mean()).backward()


def both(nets: Nets, data: Data, rank: int, step: int, scale: Scale) -> None:
    plain(nets, data, rank, step, scale)
    x, y = data[1]
    scale(loss(nets["b"](x), y)).backward()


@dataclass(frozen=True)
class Program:
    """``phases``: what computes gradients, and which optimizers step after it."""

    phases: tuple[tuple[Compute, str], ...] = ((plain, "a"),)
    nets: dict[str, Callable[[], nn.Module]] = field(default_factory=lambda: {"a": MLP})
    zero_first: bool = True
    nested: bool = False
    initial: bool = False
    subset: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)
    counts: tuple[tuple[int, ...], ...] = ((0, 3, 1), (2, 0, 4), (3, 1, 0))
    every: int = 1  # so many steps have one backward


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))


PROGRAMS = {
    "eval forward inside": Program(((eval_inside, "a"),), {"a": Norm}),
    "eval forward with grad, on one rank": Program(((eval_with_grad, "a"),)),
    "skipped backward": Program(((skip_by_all, "a"),), every=2),
    # The leader does not leave between a skipped backward and the next: that forward would not sync buffers again.
    "skipped backward, batch norm": Program(
        ((skip_by_all, "a"),), {"a": Norm}, counts=((0, 3, 1), (3, 0, 5), (3, 1, 0)), every=2
    ),
    "two forwards": Program(((forwards(2), "a"),)),
    "three forwards, batch norm": Program(((forwards(3), "a"),), {"a": Norm}),
    "buffers of one's own": Program(nets={"a": Norm}, ddp=OWN_BUFFERS),
    "two backwards through one graph": Program(((backwards, "a"),)),
    "two backwards through one graph, initial": Program(((backwards, "a"),), initial=True),
    "two forwards, then two backwards": Program(((two_losses, "a"),)),
    "two full passes": Program(((two_passes, "a"),)),
    "two full passes, initial, views": Program(
        ((two_passes, "a"),), initial=True, ddp={"gradient_as_bucket_view": True}
    ),
    "zero_grad after step": Program(zero_first=False),
    "an optimizer for some parameters": Program(subset=True),
    "an optimizer for some parameters, initial": Program(subset=True, initial=True),
    "encoder and decoder": Program(((encode_and_decode, "ab"),), {"a": MLP, "b": narrow}),
    "encoder and decoder, initial, tiny buckets": Program(
        ((encode_and_decode, "ab"),), {"a": MLP, "b": narrow}, initial=True, ddp={"bucket_cap_mb": 1e-5}
    ),
    "GAN 2:1": Program(
        ((discriminate, "b"), (discriminate, "b"), (generate, "a")), {"a": MLP, "b": narrow}
    ),
    "GAN 2:1, batch norm": Program(
        ((discriminate, "b"), (discriminate, "b"), (generate, "a")), {"a": Norm, "b": narrow}
    ),
    "Join in Join": Program(((both, "ab"),), {"a": MLP, "b": MLP}, nested=True),
    "Join in Join, initial": Program(((both, "ab"),), {"a": MLP, "b": MLP}, nested=True, initial=True),
}  # fmt: skip


def build(program: Program) -> tuple[Nets, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    nets: Nets = {name: make() for name, make in program.nets.items()}
    trained = {name: list(net.parameters())[2 if program.subset else 0 :] for name, net in nets.items()}
    return nets, {name: torch.optim.Adam(parameters, lr=0.01) for name, parameters in trained.items()}


def run_phase(program: Program, compute: Callable[[], None], which: str, optimizers: dict[str, Any]) -> None:
    def zero() -> None:
        for optimizer in optimizers.values():
            optimizer.zero_grad()

    if program.zero_first:
        zero()
    compute()
    for name in which:
        optimizers[name].step()
    if not program.zero_first:
        zero()


def next_of(weights: Iterator[int], _: Data) -> int:
    return next(weights)


def as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value


def weight_of(rank: int, step: int) -> int:
    return 1 + (rank + 3 * step) % 4


def run(rank: int, name: str, dummy: Any = None, *, weighted: bool = False) -> dict[str, torch.Tensor]:
    """Run a program on one rank; in lockstep, if there is a ``dummy`` for it."""
    program = PROGRAMS[name]
    raw, optimizers = build(program)
    nets = {key: DistributedDataParallel(net, **program.ddp) for key, net in raw.items()}
    for counts in first_and_last(program.counts):
        keywords: dict[str, Any] = {"divide_by_initial_world_size": program.initial}
        listed = [[nets[key], optimizers[key]] for key in nets]
        joins = [Join(each, **keywords) for each in (listed if program.nested else [[*chain.from_iterable(listed)]])]
        with ExitStack() as blocks:
            for join in joins:
                blocks.enter_context(join)
            mine = [streams(rank, step) for step in range(counts[rank])]
            if dummy:
                weights = iter([weight_of(rank, step) for step in range(counts[rank])])
                mine = joins[0].iterate(mine, dummy=dummy, weigh=partial(next_of, weights) if weighted else None)
            for step, data in enumerate(mine):
                for join in joins if weighted and not dummy else ():
                    join.weight = weight_of(rank, step)
                scale = joins[0].scale if weighted else as_it_is
                for compute, which in program.phases:
                    run_phase(program, partial(compute, nets, data, rank, step, scale), which, optimizers)
    return flat_state(*(net.state_dict() for net in raw.values()), *(o.state_dict() for o in optimizers.values()))


def reference(name: str, *, weighted: bool = False) -> dict[str, torch.Tensor]:
    program = PROGRAMS[name]
    nets, optimizers = build(program)
    for counts in first_and_last(program.counts):
        for step in range(max(counts)):
            ranks = [rank for rank in range(RANKS) if counts[rank] > step]
            if weighted:
                total = sum(weight_of(rank, step) for rank in ranks)
                scales = {rank: weight_of(rank, step) / total for rank in ranks}
            else:
                scales = dict.fromkeys(ranks, 1.0 / (RANKS if program.initial else len(ranks)))
            for compute, which in program.phases:
                run_phase(program, partial(compute_all, nets, compute, scales, step), which, optimizers)
    return flat_state(*(net.state_dict() for net in nets.values()), *(o.state_dict() for o in optimizers.values()))


def check(pool: Pool, name: str, dummy: Any = None, *, weighted: bool = False) -> None:
    way = partial(run, weighted=weighted)
    states = [*pool.run(way, name, dummy, ranks=RANKS), reference(name, weighted=weighted)]
    if PROGRAMS[name].ddp == OWN_BUFFERS:  # each rank keeps statistics of its own
        states = [{key: value for key, value in s.items() if ".1." not in key} for s in states]
    *states, expected = states
    for other in states[1:]:
        assert_same(states[0], other)
    assert_same(states[0], expected, TOLERANCE)


# Where modules, and not only forwards, see that a batch has no samples.
EMPTY = ["encoder and decoder", "GAN 2:1, batch norm", "three forwards, batch norm", "skipped backward, batch norm"]


class Row(NamedTuple):
    """A program, how it is run ("block", or in lockstep with these dummies), and whether with weights."""

    name: str
    way: str
    weighted: bool


ROWS = [
    *(Row(name, way, weighted) for way in ("block", "last") for name in PROGRAMS for weighted in (False, True)),
    *(Row(name, "empty", weighted) for name in EMPTY for weighted in (False, True)),
]


CHAIN = Row("encoder and decoder", "block", weighted=False)  # the only case with another header before the end


@pytest.mark.parametrize(
    ("name", "way", "weighted"), dict.fromkeys([*all_or_each(ROWS, Row._asdict, together=2), CHAIN])
)
def test_program_equals_one_process(pool: Pool, name: str, way: str, weighted: bool) -> None:
    check(pool, name, None if way == "block" else way, weighted=weighted)
