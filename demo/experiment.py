"""The experiment: one process, then four ranks with two optimizers under two kinds of ``Join``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tqdm import tqdm

from demo.compare import Outcome, compare
from demo.data import BATCHES, STEPS, load
from demo.launch import launch
from demo.model import accuracy
from demo.reference import train_alone
from demo.train import JoinName, OptimizerName, Run, train

OPTIMIZERS: tuple[OptimizerName, ...] = ("Adam", "ZeRO(Adam)")
JOINS: tuple[JoinName, ...] = ("joinables", "torch")
PATIENCE = 20.0
"""Seconds. A step takes a hundredth of one; a run without any for this long hangs."""
TOLERANCE = 1e-4
"""Rounding errors stay a hundred times below, the drift under torch's Join is a hundred times above."""


@dataclass(frozen=True)
class Experiment:
    """What came out.

    Attributes:
        epochs: how long everybody trained.
        losses: the loss of each global batch, in one process.
        accuracy: on the validation images, of one process.
        outcomes: the distributed runs, by optimizer and then by ``Join``.
    """

    epochs: int
    losses: list[float]
    accuracy: float
    outcomes: dict[OptimizerName, dict[JoinName, Outcome]]

    @property
    def promise_kept(self) -> bool:
        """Whether all runs with this library's ``Join`` ended where the one process did."""
        return not any(drifted(runs["joinables"]) for runs in self.outcomes.values())


def drifted(outcome: Outcome) -> bool:
    """Whether a run did not end where the one process did."""
    return outcome.parameter_difference is None or outcome.parameter_difference > TOLERANCE


def run_experiment(epochs: int) -> Experiment:
    """Train everything, with a progress bar where there is a terminal.

    ZeRO only shards Adam's state, so that one process with plain Adam is the reference for both optimizers.
    """
    torch.set_num_threads(1)
    digits = load()
    runs = [Run(optimizer, join, epochs, digits) for join in JOINS for optimizer in OPTIMIZERS]
    reference = train_alone(digits, epochs)
    with tqdm(
        total=len(runs) * epochs * STEPS, desc=f"{len(BATCHES)} ranks", unit="step", leave=False, disable=None
    ) as bar:
        results = launch(len(BATCHES), train, runs, PATIENCE, bar.update)
    outcomes: dict[OptimizerName, dict[JoinName, Outcome]] = {optimizer: {} for optimizer in OPTIMIZERS}
    for run, result in zip(runs, results, strict=True):
        outcomes[run.optimizer][run.join] = compare(result, reference, digits)
    alone = accuracy(reference.model, digits.validation_images, digits.validation_labels)
    return Experiment(epochs, reference.losses, alone, outcomes)
