"""Training with Accelerate on uneven ranks, compared with one process on the same batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.harness import Pool
from tests.integrations.accelerate.training import COUNTS, RANKS, Case, alone, batches_of, objects, state_of
from tests.integrations.ranks import accelerator, imported, launched
from tests.training import assert_same

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader_of(case: Case, rank: int, epoch: int) -> Any:
    loader: Any = torch.utils.data.DataLoader(Stream(batches_of(case, rank, epoch)), batch_size=None)
    if not case.prepared:
        return loader
    return imported("accelerate.data_loader").prepare_data_loader(loader, num_processes=1, process_index=0)


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


def refused_on_entering(rank: int) -> None:
    from join import Join
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator()
        model, optimizer, _ = accelerate.prepare(*objects())
        backward = accelerate.backward
        data = torch.utils.data.TensorDataset(torch.ones(6, 4))
        accelerate.prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="repeats samples"):
                join_uneven_inputs(accelerate, [model, optimizer]).open()
        assert not Join.is_open_on(None)
        assert accelerate.backward == backward


def test_a_block_that_is_refused_on_entering_is_not_open(pool: Pool) -> None:
    pool.run(refused_on_entering, ranks=RANKS)
