"""What a loss is a mean over, and what the loop then does: the table in ``docs/weights.md``, row by row.

All losses here become the mean over the samples of all ranks, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.harness import Pool
from tests.training import assert_same

COUNTS = 0, 3, 2
CLASSES = 6  # two for each rank, if a head is spread over ranks
Parameters = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]


def batches(rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    sizes = [1 + (rank + 2 * step) % 4 for step in range(COUNTS[rank])]
    return [
        (
            torch.randn(size, 4, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def build() -> tuple[torch.nn.Linear, torch.nn.Parameter]:
    """A backbone, and the weights of a head."""
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4).double(), torch.nn.Parameter(torch.randn(CLASSES, 4, dtype=torch.float64))


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def one_process() -> Parameters:
    backbone, head = build()
    optimizer = torch.optim.SGD([*backbone.parameters(), head], lr=0.1)
    for number in range(max(COUNTS)):
        parts = [batches(rank)[number] for rank in range(3) if number < COUNTS[rank]]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        step(optimizer, cross_entropy(backbone(x) @ head.T, y))
    return {**backbone.state_dict(), "head": head.detach()}


class Whole(torch.nn.Module):
    """The backbone with its head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(x) @ self.head.T


def parameters_of(whole: Whole) -> Parameters:
    return {**whole.backbone.state_dict(), "head": whole.head.detach()}


def own_mean(rank: int) -> Parameters:
    whole = Whole()
    model, optimizer = DistributedDataParallel(whole), torch.optim.SGD(whole.parameters(), lr=0.1)
    with Join([model, optimizer]) as join:
        for x, y in join.iterate(batches(rank), weigh=lambda batch: len(batch[1])):
            step(optimizer, join.scale(cross_entropy(model(x), y)))
    return parameters_of(whole)


def own_sum(rank: int) -> Parameters:
    whole = Whole()
    model, optimizer = DistributedDataParallel(whole), torch.optim.SGD(whole.parameters(), lr=0.1)
    with Join([model, optimizer]) as join:
        for x, y in join.iterate(batches(rank), weigh=lambda batch: len(batch[1])):
            step(optimizer, join.scale(cross_entropy(model(x), y, reduction="sum") / max(1, len(y))))
    return parameters_of(whole)


def divided_by_all(rank: int) -> Parameters:
    whole = Whole()
    model, optimizer = DistributedDataParallel(whole), torch.optim.SGD(whole.parameters(), lr=0.1)
    with Join([], process_group=None) as join:
        for x, y in join.iterate(batches(rank)):
            samples = torch.tensor(float(len(y)))
            dist.all_reduce(samples)
            step(optimizer, cross_entropy(model(x), y, reduction="sum") / samples * dist.get_world_size())
    return parameters_of(whole)


def summing_engine(rank: int) -> Parameters:
    whole = Whole()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    with Join([], process_group=None, divide_by_initial_world_size=False) as join:
        for x, y in join.iterate(batches(rank), weigh=lambda batch: len(batch[1])):
            optimizer.zero_grad()
            join.scale(cross_entropy(whole(x), y), divided_over=1).backward()
            for parameter in whole.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    return parameters_of(whole)


class RowsOfAll(torch.autograd.Function):
    """The rows of all ranks; their gradients go back to the rank that has them, as DDP expects them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:  # type: ignore[override]
        ctx.counts = counts
        of_all = [torch.zeros(max(counts), rows.shape[1], dtype=rows.dtype) for _ in counts]
        dist.all_gather(of_all, pad(rows, (0, 0, 0, max(counts) - len(rows))))
        return torch.cat([each[:count] for each, count in zip(of_all, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        dist.all_reduce(gradient)
        return gradient.split(ctx.counts)[dist.get_rank()] * len(ctx.counts), None


class SumOfParts(torch.autograd.Function):
    """The sum of a part of each rank; its gradient is the gradient of each part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def head_over_ranks(rank: int) -> Parameters:
    """Each rank has two classes of the head, and computes their scores of the rows of all ranks."""
    backbone, whole_head = build()
    size, model = dist.get_world_size(), DistributedDataParallel(backbone)
    head = torch.nn.Parameter(whole_head.detach().chunk(size)[rank].clone())
    optimizer = torch.optim.SGD([*model.parameters(), head], lr=0.1)
    with Join([], process_group=None) as join:
        for x, y in join.iterate(batches(rank)):
            labels: list[Any] = [None] * size
            dist.all_gather_object(labels, y.tolist())
            scores = RowsOfAll.apply(model(x), [len(each) for each in labels]) @ head.T
            targets = torch.tensor([label for each in labels for label in each])
            own = (targets // len(head) == rank).double()
            score = SumOfParts.apply(own * scores.gather(1, (targets % len(head))[:, None])[:, 0])
            step(optimizer, (SumOfParts.apply(scores.exp().sum(1)).log() - score).mean())
    heads = [torch.zeros_like(head) for _ in range(size)]
    dist.all_gather(heads, head.detach())
    return {**backbone.state_dict(), "head": torch.cat(heads)}


@pytest.mark.parametrize("train", [own_mean, own_sum, divided_by_all, summing_engine, head_over_ranks])
def test_it_equals_one_process(pool: Pool, train: Callable[[int], Parameters]) -> None:
    for found in pool.run(train):
        assert_same(found, one_process(), 1e-12)
