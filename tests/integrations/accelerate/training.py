"""What is trained with Accelerate on uneven ranks, and training it in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.training import batch, build, flat_state, whole

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


def batches_of(case: Case, rank: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(COUNTS[epoch][rank]):
        x, y = batch(rank, epoch, step)
        size = rows(case, rank, epoch, step)
        batches.append((x[:size], y[:size]))
    return batches


def objects() -> tuple[Any, Any, Any]:
    model = build("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def state_of(model: Any, optimizer: Any, scheduler: Any) -> dict[str, torch.Tensor]:
    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict()["state"]), scheduler.last_epoch)


def alone(case: Case, epochs: int = len(COUNTS), *, clips: bool = True) -> dict[str, torch.Tensor]:
    """The same in one process."""
    model, optimizer, scheduler = objects()
    for epoch, counts in enumerate(COUNTS[:epochs]):
        data = [batches_of(case, rank, epoch) for rank in range(RANKS)]
        for start in range(0, max(counts), case.accumulate):
            window = [pair for own in data for pair in own[start : start + case.accumulate]]
            weights = [len(x) if case.weighted else 1 for x, _ in window]
            optimizer.zero_grad()
            for weight, (x, y) in zip(weights, window, strict=True):
                (((model(x) - y) ** 2).mean() * weight / sum(weights)).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            for _ in range(RANKS):  # Accelerate's way
                scheduler.step()
    return state_of(model, optimizer, scheduler)
