"""A Trainer in the manner of TRL's: it has a loss of its own, and gathers what it logs in each micro-batch."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.harness import Pool
from tests.integrations.ranks import launched
from tests.integrations.transformers.lm import (
    COUNTS,
    RANKS,
    Regression,
    Stream,
    alone,
    collated,
    epoch_of,
    llama,
    points,
    sentences,
)
from tests.integrations.transformers.training import TO_EVALUATE, parameters, trainer_of
from tests.training import assert_same

pytest.importorskip("transformers", reason="Transformers is not installed: pip install joinables[transformers]")
pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[transformers]")


STEPS = {1: 12, 3: 5}
"""By windows: all of the three epochs."""


def tuner() -> Any:
    from transformers import Trainer

    class Tuner(Trainer):
        counted = 0

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs["labels"]
            outputs = model(input_ids=inputs["input_ids"])
            loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            count = torch.tensor(labels.numel())
            self.counted += int(self.accelerator.gather_for_metrics(count).sum())
            loss = loss / num_items_in_batch
            if self.args.average_tokens_across_devices:
                loss = loss * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    return Tuner


def train(rank: int, accumulate: int) -> tuple[Any, ...]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        more = {"gradient_accumulation_steps": accumulate, "max_steps": STEPS[accumulate]}
        trainer = trainer_of(rank, "tokens", folder, base=tuner(), **more)
        trainer.train()
        counted, trainer.counted = trainer.counted, 0
        trainer.evaluate()
        return parameters(trainer), counted, trainer.counted


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_trains_exactly(pool: Pool, accumulate: int) -> None:
    expected, _, _ = alone(llama(), sentences, accumulate, STEPS[accumulate])
    for state, counted, evaluated in pool.run(train, accumulate, ranks=RANKS, timeout=40):
        assert_same(state, expected, 1e-5)
        epochs = [
            batch for epoch in range(len(COUNTS)) for own in epoch_of(Stream, sentences, epoch, COUNTS) for batch in own
        ]
        assert counted == sum(batch["labels"].numel() for batch in epochs)
        assert evaluated == sum(collated(sentences(0, 0, step))["labels"].numel() for step in range(TO_EVALUATE[0][0]))


class Normalised(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(self.norm(x), labels)


def train_normalised(rank: int, counts: tuple[int, int]) -> dict[str, torch.Tensor]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        stream = Stream(points, rank, (counts,))
        more = {"gradient_accumulation_steps": 2, "max_steps": -(-max(counts) // 2)}
        trainer = trainer_of(rank, "samples", folder, model=Normalised(), train_dataset=stream, **more)
        trainer.train()
        return parameters(trainer)


@pytest.mark.parametrize(
    ("counts", "seen"),
    [
        ((3, 4), [(0, 0), (0, 1), (0, 2), (1, 3)]),
        ((2, 3), [(0, 0), (0, 1), (1, 2)]),
        ((0, 1), [(1, 0)]),
        ((0, 4), [(1, 0), (1, 1), (1, 2), (1, 3)]),
    ],
)
def test_dummies_do_not_count_in_buffers(pool: Pool, counts: tuple[int, int], seen: list[tuple[int, int]]) -> None:
    model = Normalised()
    for rank, step in seen:
        model(**collated(points(rank, 0, step)))
    for state in pool.run(train_normalised, counts, ranks=RANKS, timeout=40):
        assert_same({name: state[name] for name, _ in model.named_buffers()}, dict(model.named_buffers()), 1e-6)
