"""Numbered samples for the examples of pages: as a map-style data set and as streams, and training in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from join import Join, JoinError

RANKS, SIZE = 2, 4
"""The number of ranks, and of samples in a batch."""


@dataclass(frozen=True)
class Data:
    """The data of all ranks: ``count`` samples, as a map-style data set or as a stream for each rank."""

    kind: str
    count: int

    def share(self, rank: int) -> list[int]:
        """The numbers of the samples in a rank's stream: few on rank 1, and none on rank 0 if there is only one."""
        few = -(-self.count // 4)
        return list(range(few)) if rank else list(range(few, self.count))

    def loader(self, rank: int) -> DataLoader[Any]:
        """The loader of a rank, which is not prepared yet."""
        return DataLoader(Samples(self.count) if self.kind == "map" else Stream(self.share(rank)), batch_size=SIZE)


BOTH = [Data(kind, count) for kind in ("map", "stream") for count in (17, 1)]
"""Uneven data of both kinds; of one sample, one rank has none."""


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([number / 32, (1.0 + number) % 3, number % 2])
    return x, x.sin().sum(0, keepdim=True)


class Samples(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return sample(range(self.count)[number])


class Stream(IterableDataset[Any]):
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        return map(sample, self.numbers)


class Net(nn.Sequential):
    """Notes the samples that it is trained on, without those of dummies."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            is_dummy = Join.current().shadowing
        except JoinError:  # not in a block
            is_dummy = False
        if self.training and not is_dummy:
            self.seen += (x[:, 0] * 32).int().tolist()
        return super().forward(x)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.05)


@dataclass
class Trained:
    """What a rank, or one process, ends with.

    Attributes:
        state: The parameters.
        seen: The numbers of the samples that it was trained on, in order.
        logged: For each step, the mean loss of the batches of all ranks; empty if the example logs nothing.
    """

    state: dict[str, torch.Tensor]
    seen: list[int]
    logged: list[float]


def steps_of(ranks: list[Trained]) -> list[list[list[int]]]:
    """For each step, the batches of the ranks that had any; frameworks distribute samples in different orders."""
    starts = range(0, max(len(rank.seen) for rank in ranks), SIZE)
    return [[rank.seen[start : start + SIZE] for rank in ranks if rank.seen[start:]] for start in starts]


def alone(
    ranks: list[Trained],
    *,
    by_samples: bool = True,
    logs_by_samples: bool | None = None,
    window: int = 1,
    decay: float = 1.0,
) -> Trained:
    """Train in one process, on the batches that all ranks were trained on.

    Args:
        ranks: What the ranks end with.
        by_samples: Whether the batch of a rank counts by its number of samples, in gradients.
        logs_by_samples: Whether it does in the mean that is logged; the default is ``by_samples``.
        window: The number of steps that the optimizer makes one step for.
        decay: By how much the learning rate is multiplied after each of its steps.
    """
    net, logged, steps = Net(), list[float](), steps_of(ranks)
    optimizer = adam(net)
    logs_by_samples = by_samples if logs_by_samples is None else logs_by_samples
    for start in range(0, len(steps), window):
        of_window = steps[start : start + window]
        total = sum(len(numbers) if by_samples else 1 for batches in of_window for numbers in batches)
        for batches in of_window:
            counts = torch.tensor([float(len(numbers)) for numbers in batches])
            pairs = [map(torch.stack, zip(*map(sample, numbers), strict=True)) for numbers in batches]
            losses = torch.stack([nn.functional.mse_loss(net(x), y) for x, y in pairs])
            (losses @ (counts if by_samples else torch.ones_like(counts)) / total).backward()
            logged.append((losses.detach() @ counts / counts.sum() if logs_by_samples else losses.mean()).item())
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= decay
    return Trained(net.state_dict(), [], logged)


def assert_as_one_process(data: Data, ranks: list[Trained], expected: Trained) -> None:
    """Check that the ranks were trained on each sample once, and that all of them end as one process does."""
    assert sorted(number for rank in ranks for number in rank.seen) == list(range(data.count))
    for rank in ranks:
        for name, value in expected.state.items():
            torch.testing.assert_close(rank.state[name], value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(rank.logged, expected.logged, rtol=1e-4, atol=1e-6)
