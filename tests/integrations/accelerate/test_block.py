"""Training with Accelerate on uneven ranks, compared with one process on the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.integrations.ranks import accelerator, imported, launched
from tests.models import assert_same, batch, build, flat_state
from tests.pool import Pool

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")

RANKS = 2
COUNTS = ((5, 2), (0, 3), (4, 1))  # by epoch and rank


@dataclass(frozen=True)
class Case:
    accumulate: int = 1
    iterate: bool = False
    weighted: bool = False
    sharded: bool = False
    prepared: bool = True  # the loader


def rows(case: Case, rank: int, epoch: int, step: int) -> int:
    return 1 + (rank + epoch + 2 * step) % 4 if case.weighted else 5


def mine(case: Case, rank: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(COUNTS[epoch][rank]):
        x, y = batch(rank, epoch, step)
        size = rows(case, rank, epoch, step)
        found.append((x[:size], y[:size]))
    return found


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader_of(case: Case, rank: int, epoch: int) -> Any:
    loader: Any = torch.utils.data.DataLoader(Stream(mine(case, rank, epoch)), batch_size=None)
    if not case.prepared:
        return loader
    return imported("accelerate.data_loader").prepare_data_loader(loader, num_processes=1, process_index=0)


def objects(sharded: bool = False) -> tuple[Any, Any, Any]:
    model = build("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def state_of(model: Any, optimizer: Any, scheduler: Any) -> dict[str, torch.Tensor]:
    from tests.training import whole

    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict()["state"]), scheduler.last_epoch)


def train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FSDPModule

    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator(gradient_accumulation_steps=case.accumulate, fsdp=2 if case.sharded else None)
        model, optimizer, scheduler = accelerate.prepare(*objects())
        assert isinstance(model, FSDPModule) is case.sharded
        for epoch in range(len(COUNTS)):
            with join_uneven_inputs(accelerate, [model, optimizer, scheduler]) as join:
                loader = loader_of(case, rank, epoch)
                weigh = (lambda data: len(data[0])) if case.weighted else None
                for x, y in join.iterate(loader, weigh=weigh) if case.iterate else loader:
                    if case.weighted and not case.iterate:
                        join.weight = len(x)
                    with accelerate.accumulate(model):
                        accelerate.backward(((model(x) - y) ** 2).mean())
                        if accelerate.sync_gradients:
                            accelerate.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
        return state_of(accelerate.unwrap_model(model), optimizer, scheduler.scheduler)


def alone(case: Case) -> dict[str, torch.Tensor]:
    """The same in one process."""
    model, optimizer, scheduler = objects()
    for epoch, counts in enumerate(COUNTS):
        data = [mine(case, rank, epoch) for rank in range(RANKS)]
        for start in range(0, max(counts), case.accumulate):
            window = [each for own in data for each in own[start : start + case.accumulate]]
            weights = [len(x) if case.weighted else 1 for x, _ in window]
            optimizer.zero_grad()
            for weight, (x, y) in zip(weights, window, strict=True):
                (((model(x) - y) ** 2).mean() * weight / sum(weights)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            for _ in range(RANKS):  # Accelerate's way
                scheduler.step()
    return state_of(model, optimizer, scheduler)


CASES = {
    "plain": Case(),
    "iterate": Case(iterate=True),
    "plain, accumulates": Case(accumulate=2),
    "iterate, accumulates": Case(accumulate=2, iterate=True),
    "plain, accumulates, weighted": Case(accumulate=2, weighted=True),
    "iterate, accumulates, weighted": Case(accumulate=3, iterate=True, weighted=True),
    "iterate, accumulates, loader not prepared": Case(accumulate=2, iterate=True, prepared=False),
    "iterate, weighted": Case(iterate=True, weighted=True),
    "sharded, iterate": Case(sharded=True, iterate=True),
    "sharded, iterate, weighted": Case(sharded=True, iterate=True, weighted=True),
    "sharded, iterate, accumulates": Case(accumulate=2, sharded=True, iterate=True),
    "sharded, iterate, accumulates, weighted": Case(accumulate=2, sharded=True, iterate=True, weighted=True),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_exactly(pool: Pool, name: str) -> None:
    expected = alone(CASES[name])
    for state in pool.run(train, CASES[name], ranks=RANKS, timeout=40):
        assert_same(state, expected, 1e-5)
