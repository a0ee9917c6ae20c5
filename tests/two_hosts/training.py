"""What is trained on two hosts, and the same in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from join.collectives import collective_of
from joinables.trainer import Strategy, Trainer
from tests.joinables.trainer.modules import Classifier, loader
from tests.training import Case, Data, Loop, Model, Optimizer, Shards, Step, flat_state, train

COUNTS = ((3, 0, 1, 2), (0, 2, 4, 0))  # by epoch and rank; each host has a rank without data
CASES = {
    "DDP": Case(data=Data(COUNTS)),
    "DDP with BatchNorm, weighted": Case(Model("norm"), data=Data(COUNTS, weighted=True)),
    "ZeRO": Case(optimizer=Optimizer(zero=True), data=Data(COUNTS), step=Step(clip=True)),
    "iterate": Case(Model("norm"), data=Data(COUNTS), loop=Loop(iterate="empty")),
    "iterate with ZeRO": Case(
        optimizer=Optimizer(zero=True), data=Data(COUNTS), loop=Loop(iterate="empty", lookahead=2)
    ),
    "fully_shard, iterate": Case(wrapper=Shards(), data=Data(COUNTS), loop=Loop(iterate="empty"), step=Step(clip=True)),
    "fully_shard within each host, iterate": Case(
        wrapper=Shards(replicas=2), data=Data(COUNTS), loop=Loop(iterate="empty")
    ),
}
BATCH_OF_ALL, SAMPLES = 12, 26  # three batches of one process; in the last one, most ranks have nothing
Fitted = tuple[dict[str, torch.Tensor], dict[str, float]]
"""The state after a fit, and its metrics."""


@dataclass(frozen=True)
class Trained:
    """What a rank ends with.

    Attributes:
        states: by case.
        ways: what has carried headers, and where ranks left notes: their classes.
    """

    states: dict[str, dict[str, torch.Tensor]]
    ways: tuple[str, str]


def train_all(rank: int) -> Trained:
    """All cases one after another, on one process group."""
    states = {name: train(rank, case) for name, case in CASES.items()}
    group = collective_of(None)
    return Trained(states, (type(group.line()).__name__, type(group.board()).__name__))


def fit(rank: int, ranks: int, **options: Any) -> Fitted:
    """Fit by the processes that are there."""
    trainer = Trainer(max_epochs=2, seed=1, accelerator="cpu", logger=False, **options)
    module, size = Classifier(), BATCH_OF_ALL // ranks
    trainer.fit(module, loader(SAMPLES, size, shuffle=True), loader(29, size))
    return flat_state(module.state_dict(), [trainer.global_step, trainer.current_epoch]), trainer.callback_metrics


def fit_alone() -> Fitted:
    return fit(0, 1, strategy=Strategy(), devices=1)
