"""The experiment: a single process, and four ranks with two optimizers under this library's ``Join`` and torch's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch

from demo.compare import Outcome, compare
from demo.contrast import train_by_hand
from demo.data import STEPS
from demo.record import Recorder
from demo.reference import train_alone
from demo.train import train

OptimizerName = Literal["Adam", "ZeRO(Adam)"]
JoinName = Literal["joinables", "torch"]

STRATEGIES: dict[OptimizerName, str] = {"Adam": "ddp", "ZeRO(Adam)": "ddp_zero"}
TOLERANCE = 1e-4
"""The largest difference that counts as rounding. Rounding stays a hundred times below it, and torch's Join
drifts a hundred times above it."""


@dataclass(frozen=True)
class Experiment:
    """The results of all runs.

    Attributes:
        epochs: the number of epochs in each run.
        losses: the loss of each global batch in the single process.
        accuracy: of the single process on the validation images.
        outcomes: the distributed runs, by optimizer and then by ``Join``.
    """

    epochs: int
    losses: list[float]
    accuracy: float
    outcomes: dict[OptimizerName, dict[JoinName, Outcome]]

    @property
    def promise_kept(self) -> bool:
        """Whether all runs with this library's ``Join`` have the result of the single process."""
        return not any(drifted(runs["joinables"]) for runs in self.outcomes.values())


def drifted(outcome: Outcome) -> bool:
    """Return whether a run did not finish with the result of the single process."""
    return outcome.parameter_difference is None or outcome.parameter_difference > TOLERANCE


def _say(what: str) -> None:
    print(f"training {what} ...", file=sys.stderr, flush=True)


def run_experiment(epochs: int) -> Experiment:
    """Run all trainings and compare them.

    ZeRO only shards Adam's state, so a single process with plain Adam is the reference for both optimizers.
    """
    torch.set_num_threads(1)
    _say("a single process")
    alone, accuracy = train_alone(epochs)
    reference = alone.records[0]
    _say(f"four ranks with PyTorch's Join: {' and '.join(STRATEGIES)}")
    by_hand = train_by_hand(epochs, [optimizer == "ZeRO(Adam)" for optimizer in STRATEGIES])
    outcomes: dict[OptimizerName, dict[JoinName, Outcome]] = {}
    for (optimizer, strategy), ranks in zip(STRATEGIES.items(), by_hand, strict=True):
        _say(f"four ranks with this Join: {optimizer}")
        recorder = Recorder(STEPS)
        train(epochs, strategy, recorder)
        outcomes[optimizer] = {
            "joinables": compare(recorder.records, reference, recorder.reports),
            "torch": compare(ranks, reference),
        }
    return Experiment(epochs, list(reference["losses"].values()), accuracy, outcomes)
