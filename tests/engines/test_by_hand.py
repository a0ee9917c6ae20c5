"""Engines that are not listed: the block lists nothing, and ``join.scale`` knows by what they divide.

Listed in a plain block, all that they hold is state, and nothing in the list communicates: an error before the loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from typing_extensions import override

from join import Join
from tests.ending import Ending
from tests.engines.table import Cell, cells_of
from tests.engines.training import Engine, Feed, adam, build, check
from tests.harness import Pool


def sum_gradients(model: torch.nn.Module, divided_by: int) -> None:
    """Reduce all gradients as one flat tensor."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat / divided_by, gradients)


class AveragingByHand(Engine):
    divided_over: int | None = None  # the number of ranks

    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        super().__init__(rank, cell, seed)
        self.model = build(seed)
        self.optimizer = adam(self.model)
        self.listed = [self.model, self.optimizer] if cell.is_plain else []
        self.options: Any = {} if self.listed else {"process_group": None}

    @override
    def train(self, feed: Feed) -> None:
        with Join(self.listed, divide_by_initial_world_size=False, **self.options) as join:
            for x, y in feed.steps(join):
                join.scale(mse_loss(self.model(x), y), self.divided_over).backward()
                if join.ends_window:
                    sum_gradients(self.model, self.divided_over or dist.get_world_size())
                    self.optimizer.step()
                    self.optimizer.zero_grad()


class SummingByHand(AveragingByHand):
    divided_over = 1


class Counting:
    """As DeepSpeed does, it divides each loss, and steps with every ``window``-th micro-batch."""

    def __init__(self, model: Any, optimizer: Any, window: int) -> None:
        self.model, self.optimizer, self.window, self.micro_batches = model, optimizer, window, 0

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.window).backward()

    def step(self) -> None:
        self.micro_batches += 1
        if self.micro_batches % self.window == 0:
            sum_gradients(self.model, dist.get_world_size())
            self.optimizer.step()
            self.optimizer.zero_grad()


class CountingEngine(AveragingByHand):
    @override
    def train(self, feed: Feed) -> None:
        window = self.cell.window
        engine = Counting(self.model, self.optimizer, window)
        with Join(self.listed, divide_by_initial_world_size=False, loss_divided_by=window, **self.options) as join:
            for x, y in feed.steps(join, fill_window=True):
                engine.backward(join.scale(mse_loss(self.model(x), y)))
                engine.step()
        assert engine.micro_batches % window == 0  # nothing is left for the next epoch


KINDS = {"averaging by hand": AveragingByHand, "summing by hand": SummingByHand, "counting engine": CountingEngine}


@pytest.mark.parametrize("cell", cells_of(*KINDS), ids=str)
def test_by_hand(pool: Pool, ending: Ending, cell: Cell) -> None:
    check(pool, ending, KINDS[cell.engine], cell)
