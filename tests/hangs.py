"""Loops that hang: one for each row of the table in ``docs/hang.md``, and more."""

from __future__ import annotations

import faulthandler
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from join import Join, JoinHook
from join.collectives import collective_of
from tests.explained import until_explained
from tests.join.counter import Counter, CounterHook
from tests.training import batch

COUNTS = (1, 3, 3, 3)


def train(model: Any, rank: int, step: int) -> torch.Tensor:
    loss = model(batch(rank, 0, step)[0].to(model.device)).square().mean()
    loss.backward()
    loss.item()
    return loss.detach()


def log_loss(loss: torch.Tensor) -> None:
    dist.all_reduce(loss)
    loss.tolist()


def last_steps(rank: int, model: Any) -> None:
    with Join([], process_group=None):  # which lacks the model
        for step in range(COUNTS[rank] + 1):
            train(model, rank, step)


def metric(rank: int, model: Any, **options: Any) -> None:
    with Join([model], **options):
        for step in range(COUNTS[rank]):
            log_loss(train(model, rank, step))


def barrier(rank: int, model: Any) -> None:
    with Join([model]):
        for step in range(COUNTS[rank]):
            train(model, rank, step)
            dist.barrier()


def gather(rank: int, model: Any) -> None:
    with Join([model]):
        for step in range(COUNTS[rank]):
            dist.all_gather_object([None] * dist.get_world_size(), train(model, rank, step).item())


def evaluation(rank: int, model: Any) -> None:
    with Join([model]):
        for step in range(2):
            train(model, rank, step)
        if rank == 0:
            log_loss(model.module(batch(0, 0, 0)[0].to(model.device)).sum().detach())


def branches(rank: int, model: Any) -> None:
    groups: list[Any] = [dist.new_group(), dist.new_group()]
    with Join([model]) as join:
        for x, _ in join.iterate([batch(rank, 0, step) for step in range(COUNTS[rank])]):
            if rank < 2:
                dist.all_reduce(x.sum(), group=groups[0])
            else:
                dist.broadcast(x.sum(), 0, group=groups[1])


def leaves(rank: int, model: Any) -> None:
    with Join([model]) as join:
        for step, _ in enumerate(join.iterate(range(3))):
            if rank == 1 and step == 1:
                break
            train(model, rank, step)
        dist.barrier()


def works(rank: int, model: Any) -> None:
    """Rank 2 calls one function in C for long, which may be a wait for another rank, too."""
    with Join([model]):
        for step in range(COUNTS[rank]):
            if rank == 2 and step == 1:
                time.sleep(60.0)
            train(model, rank, step)


class Slow(torch.utils.data.Dataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return COUNTS[self.rank]

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1 and self.rank == 2:
            until_explained()
        return batch(self.rank, 0, index)[0]


def loader(rank: int, model: Any) -> None:
    with Join([model]):
        for x in DataLoader(Slow(rank)):
            model(x).sum().backward()


def loader_of_iterate(rank: int, model: Any) -> None:
    with Join([model]) as join:
        for x in join.iterate(DataLoader(Slow(rank)), dummy="last"):
            join.scale(model(x).sum()).backward()


def entering(rank: int, model: Any) -> None:
    if rank == 1:
        until_explained()
    with Join([model]):
        pass


class Late(Counter):
    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return LateHook(self)


class LateHook(CounterHook):
    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        if dist.get_rank() == 1:
            dist.barrier()


def leaving(rank: int, model: Any) -> None:
    with Join([Late(collective_of(None))]):
        pass
    until_explained()


def sizes(rank: int, model: Any) -> None:
    """Not a wait: gloo aborts the process of a rank that receives more than it expects."""
    faulthandler.enable()  # as PYTHONFAULTHANDLER=1 does
    with Join([model]):
        for step in range(COUNTS[rank]):
            log_loss(train(model, rank, step).expand(1000 if rank == 1 else 10).clone())
