"""Loop bodies that cut or collect micro-batches, or divide losses by the samples of all ranks, and one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from tests.training import batch, build

COUNTS = 2, 5
STEPS = 2  # gradient_accumulation_steps


def data_of(rank: int) -> list[Any]:
    return [tuple(part[: 2 + (step + rank) % 3] for part in batch(rank, 0, step)) for step in range(COUNTS[rank])]


def parts(loader: Iterable[Any]) -> Iterator[Any]:
    for x, y in loader:
        yield from ((x[:1], y[:1]), (x[1:], y[1:]))


def cut(accelerate: Any, join: Any, model: Any, optimizer: Any, rank: int, before: bool) -> None:
    for whole in join.iterate(parts(data_of(rank)) if before else data_of(rank)):
        for x, y in [whole] if before else parts([whole]):
            with accelerate.accumulate(model):
                accelerate.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()


def divide(accelerate: Any, join: Any, model: Any, optimizer: Any, rank: int, collects: bool | str) -> None:
    """Accelerate's guide on batches of several sizes: sums over samples, divided by the samples of all ranks."""
    collected, counted, other = list[Any](), torch.tensor(0), torch.nn.Linear(1, 1)
    for pair in join.iterate(data_of(rank), fill_window=True):
        if not collected:
            ahead = [] if join.shadowing else [pair, *join.pending[: STEPS - 1]]
            counted = torch.tensor(sum(len(x) for x, _ in ahead))
            if collects == "gather":
                counted = accelerate.gather_for_metrics(counted[None]).sum()
            else:
                torch.distributed.all_reduce(counted)
        collected = [*collected, pair]
        with accelerate.accumulate(other):  # as the other model of a GAN
            pass
        for x, y in (collected if join.ends_window else []) if collects else [pair]:
            with nullcontext() if collects else accelerate.accumulate(model):
                loss = (model(x) - y).square().sum() * accelerate.num_processes * STEPS / counted
                accelerate.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if join.ends_window:
            collected = []


def alone(body: Any) -> dict[str, torch.Tensor]:
    net = build("mlp")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ranks = [list(parts(data_of(rank))) if body is cut else data_of(rank) for rank in range(len(COUNTS))]
    for start in range(0, max(map(len, ranks)), STEPS):
        window = [pair for own in ranks for pair in own[start : start + STEPS]]
        total = len(window) if body is cut else sum(len(x) for x, _ in window)
        optimizer.zero_grad()
        for x, y in window:
            error = (net(x) - y).square()
            ((error.mean() if body is cut else error.sum()) / total).backward()
        optimizer.step()
    return net.state_dict()
