"""What tests of engines share: :class:`Engine`, its batches, and one process that trains on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.ending import Ending
from tests.engines.table import Cell
from tests.harness import Pool
from tests.training import FEATURES, TARGETS, assert_same, batch, flat_state, whole
from tests.versions import is_2_8

TOLERANCE = 1e-12
"""Of numbers in float64."""
STOP = 2
"""After how many steps a loop is left that is resumed."""
Batch = tuple[torch.Tensor, torch.Tensor]


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, TARGETS)).double()


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def samples(rank: int, step: int) -> int:
    """How many there are in a batch."""
    return 2 + (rank + 2 * step) % 4


def batch_of(cell: Cell, rank: int, step: int) -> Batch:
    x, y = batch(rank, 0, step)
    return x[: samples(rank, step)].double(), y[: samples(rank, step)].double()


class Feed:
    """The batches of a rank; it can be saved and resumed.

    Args:
        cell: what is tried.
        owner: the rank, or the number of a group of ranks that share their batches.
        stop: after how many steps the loop is left, if it is.
        batch_of: makes a batch.
    """

    def __init__(self, cell: Cell, owner: int, stop: int | None, batch_of: Callable[[Cell, int, int], Batch]) -> None:
        self._cell, self._owner, self._stop, self._batch_of = cell, owner, stop, batch_of
        self._at = 0
        self.place: Any = None
        """Where a loop that was left had come to."""

    def __iter__(self) -> Iterator[Batch]:
        while self._at < self._cell.row.counts[self._owner]:
            self._at += 1
            yield self._batch_of(self._cell, self._owner, self._at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]

    def steps(self, join: Join, **options: Any) -> Iterator[Batch]:
        """What the loop of an engine goes over."""
        cell = self._cell
        if cell.is_plain:
            yield from self
            return
        weigh = (lambda data: len(data[0])) if cell.weighs else None
        options = {"weigh": weigh, "window": cell.window, "resumable": True, **options}
        for step, data in enumerate(join.iterate(self, **options), 1):
            yield data
            if step == self._stop:
                self.place = join.loader_state()
                break


class Engine:
    """What a user's program has: objects, a loop, and a checkpoint.

    Args:
        rank: of this process.
        cell: what is tried.
        seed: of the parameters, which a resumed program takes from the checkpoint.
    """

    model: Any
    optimizer: Any
    batch_of: Callable[[Cell, int, int], Batch] = staticmethod(batch_of)

    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        self.cell = cell

    def owner(self, rank: int) -> int:
        """Whose batches the rank has; its own, or those of a group of ranks."""
        return rank

    def train(self, feed: Feed) -> None:
        """The loop."""
        raise NotImplementedError

    def save(self) -> Any:
        """A checkpoint of this rank."""
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def load(self, checkpoint: Any) -> None:
        model, optimizer = checkpoint
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def state(self) -> dict[str, torch.Tensor]:
        """Where this rank has ended, with whole parameters, as one process names them."""
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return flat_state(whole(model.state_dict()), whole(self.optimizer.state_dict()))


def train(rank: int, kind: type[Engine], cell: Cell) -> dict[str, torch.Tensor]:
    """Train on one rank; a cell that resumes goes on with new objects."""
    stop = STOP if cell.column == "resume" else None
    engine = kind(rank, cell, 0)
    feed = Feed(cell, engine.owner(rank), stop, kind.batch_of)
    engine.train(feed)
    if stop is not None:
        checkpoint, place = engine.save(), feed.place
        engine = kind(rank, cell, 1)
        feed = Feed(cell, engine.owner(rank), None, kind.batch_of)
        engine.load(checkpoint)
        feed.load_state_dict(place)
        engine.train(feed)
    return engine.state()


def windows_of(cell: Cell) -> list[list[list[int]]]:
    """Of each window its steps, and of each step the owners that have a batch."""
    counts = cell.row.counts
    steps = [[owner for owner, count in enumerate(counts) if step < count] for step in range(max(counts))]
    return [steps[at : at + cell.window] for at in range(0, len(steps), cell.window)]


def mean_loss(model: Any, cell: Cell, first: int, window: list[list[int]], make: Any = batch_of) -> torch.Tensor:
    """The mean over a window, whose first step has this number: of its samples, or of its batches."""
    batches = [make(cell, owner, step) for step, owners in enumerate(window, first) for owner in owners]
    weights = [len(x) if cell.weighs else 1 for x, _ in batches]
    losses = [mse_loss(model(x), y) * weight for (x, y), weight in zip(batches, weights, strict=True)]
    return torch.stack(losses).sum() / sum(weights)


def alone(
    cell: Cell,
    model: Any = None,
    optimizer_of: Callable[[Any], Any] = adam,
    loss: Callable[..., torch.Tensor] = mean_loss,
) -> dict[str, torch.Tensor]:
    """Where one process ends on the same global batches."""
    model = build() if model is None else model
    optimizer = optimizer_of(model)
    for at, window in enumerate(windows_of(cell)):
        optimizer.zero_grad()
        loss(model, cell, at * cell.window, window).backward()
        optimizer.step()
    return flat_state(model.state_dict(), optimizer.state_dict())


def check(
    pool: Pool,
    ending: Ending,
    kind: type[Engine],
    cell: Cell,
    expected: dict[str, torch.Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Run a cell: it ends as the table says."""
    ranks = cell.row.ranks
    if cell.timeout is not None and is_2_8:
        pytest.skip("torch 2.8 cannot change how long operations of a gloo group may take")
    if cell.outcome not in ("yes", "no"):
        texts = [end.error for end in ending.ends(train, kind, cell, ranks=ranks)]
        assert all(f"[{cell.outcome}]" in text for text in texts), texts
        return
    expected = alone(cell) if expected is None else expected
    states = pool.run(train, kind, cell, ranks=ranks)
    assert {name for state in states for name in state} >= {name for name in expected if name.startswith("0.")}
    for state in states:
        same = {name: expected[name] for name in state}
        if cell.outcome == "yes":
            assert_same(state, same, tolerance)
        else:
            with pytest.raises(AssertionError, match="differs by"):
                assert_same(state, same, tolerance)
