"""What a module that takes no empty batch runs on instead, call by call."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.harness import Pool


class Picky(nn.Module):
    """Takes rows that it knows, and no others: of three columns in its first call of a step, of two in its second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"wide": nn.Linear(3, 1), "narrow": nn.Linear(2, 1)})

    def forward(self, x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        if not (x == 7).all() or not len(x):
            raise ValueError("unknown rows")
        return self.layers[kind](x), x


def calls_twice(rank: int) -> list[tuple[int, ...]]:
    ddp, shapes = DistributedDataParallel(Picky()), list[tuple[int, ...]]()
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for x in join.iterate([torch.full((4, 3), 7.0)] * (1 + rank)):
            (first, wide), (second, narrow) = ddp(x, "wide"), ddp(x[:, :2], "narrow")
            (first.sum() + second.sum()).backward()
            shapes += [tuple(wide.shape), tuple(narrow.shape)]
            ddp.zero_grad()
    return shapes


def test_each_call_on_a_dummy_runs_as_in_the_last_step_with_data(pool: Pool) -> None:
    zero, one = pool.run(calls_twice, ranks=2)
    assert zero == [(4, 3), (4, 2), (0, 3), (0, 2)]
    assert one == [(4, 3), (4, 2)] * 2


class Refuses(nn.Sequential):
    """Takes no empty batch, and a single row neither, which has no variance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            raise ValueError("no rows")
        return super().forward(x)


def never_has_data(rank: int) -> int:
    ddp = DistributedDataParallel(Refuses(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for x in join.iterate([torch.randn(4, 2)] * 2 * rank):
            ddp.zero_grad()
            ddp(x).sum().backward()
    return int(ddp.module[1].num_batches_tracked)


def test_a_module_that_takes_two_rows_at_least(pool: Pool) -> None:
    assert pool.run(never_has_data, ranks=2) == [2, 2]


class Centred(nn.Module):
    """Takes rows of any length, but no empty batch, which has no smallest element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x - x.amin())


def grows(rank: int, counts: tuple[tuple[int, int], ...]) -> tuple[list[list[tuple[int, ...]]], int]:
    """One block with several loops; the rows of each are longer than in the loop before. Also returns what is kept."""
    ddp, shapes = DistributedDataParallel(Centred()), list[list[tuple[int, ...]]]()
    with Join([ddp], divide_by_initial_world_size=False) as join:
        for columns, count in enumerate(counts, 1):
            shapes.append([])
            for x in join.iterate(torch.ones(17, columns) for _ in range(count[rank])):
                y = ddp(x)
                shapes[-1].append(tuple(y.shape))
                (y - x).sum().backward()
                del x, y
        kept = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape[:1] == (17,)]
    return shapes, len(kept)


def test_a_loop_with_longer_rows_than_the_one_before(pool: Pool) -> None:
    zero, one = pool.run(grows, ((2, 2), (2, 3), (0, 2), (1, 1)), ranks=2)
    assert zero == ([[(17, 1)] * 2, [(17, 2)] * 2 + [(0, 2)], [(0, 3)] * 2, [(17, 4)]], 1)
    assert one == ([[(17, 1)] * 2, [(17, 2)] * 3, [(17, 3)] * 2, [(17, 4)]], 1)


class Frozen(dict[str, int]):
    """A dict that cannot be written, as models of diffusers have."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


class Writes(nn.Module):
    """Counts and draws in its forward, and refuses an empty batch only then."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count, self.log = nn.Linear(2, 1), 0, list[Any]()
        self.drawn: dict[str, list[float]] = {"torch": [], "python": [], "numpy": []}
        self.register_buffer("seen", torch.zeros(()))
        self.turns: list[list[int]] = [[], []]
        self.turn, self.options = self.turns[0], Frozen(width=2)
        self.shared = vars(self.layer)["shared"] = set[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count, self.seen = self.count + 1, self.seen + 1
        self.turn = self.turns[self.count % 2]
        self.turn.append(self.count)
        self.shared.add(self.count)
        self.log.append((self.count, self.seen.item()))
        for name, draw in {"torch": torch.rand(()).item, "python": random.random, "numpy": np.random.rand}.items():
            self.drawn[name].append(draw())
        if not len(x):
            vars(self.layer)["refused"] = True
            raise ValueError("no rows")
        return self.layer(x)

    def written(self) -> list[Any]:
        assert self.layer.shared is self.shared and any(self.turn is each for each in self.turns)
        other = [self.turns, self.shared, self.options]
        return [self.count, self.log, self.drawn, self.seen.item(), hasattr(self.layer, "refused"), *other]


def writes(rank: int, counts: tuple[int, ...]) -> list[Any]:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    module = Writes()
    log, ddp = module.log, DistributedDataParallel(module)
    for epoch in range(2):
        with Join([ddp], divide_by_initial_world_size=False) as join:
            for x in join.iterate([torch.randn(4, 2, generator=torch.Generator())] * counts[rank - epoch]):
                ddp(x).sum().backward()
    assert module.log is log  # which others may hold
    return module.written()


def test_an_attempt_that_raises_leaves_no_trace(pool: Pool) -> None:
    """A step counts and draws once on each rank, as in a single process; rank 2, then rank 0, is without data."""
    [expected] = pool.run(writes, (6, 0), ranks=1)
    assert expected[:2] == [6, [(count, count) for count in range(1, 7)]]
    for written in pool.run(writes, (1, 3, 0)):
        assert written == expected
