"""What ``train`` returns, and losses of one's own: on all ranks the numbers of a single process."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.harness import Pool
from tests.integrations.ranks import launched
from tests.integrations.transformers.lm import RANKS, ROWS, WORDS, SizedStream, Stream, alone, llama
from tests.integrations.transformers.training import STEPS, parameters, trainer_of
from tests.training import assert_same

pytest.importorskip("transformers", reason="Transformers is not installed: pip install joinables[transformers]")
pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[transformers]")

import transformers


def words(rank: int, epoch: int, step: int) -> list[dict[str, torch.Tensor]]:
    """Rows of one length, whose mean over tokens is the mean over batches.

    The first word has no label: it has no loss, but counted up to Transformers 5.10.
    """
    generator = torch.Generator().manual_seed(1000 * rank + 100 * epoch + step)
    rows = torch.randint(1, WORDS, (ROWS, 5), generator=generator)
    return [{"input_ids": row, "labels": row.clone().index_fill(0, torch.tensor(0), -100)} for row in rows]


class Metric(transformers.Trainer):
    """Keeps a metric of its own in each micro-batch."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seen: list[float] = []

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        rows = self.accelerator.gather_for_metrics(inputs["labels"].double().mean(1))
        self.seen.append(rows.mean().item())
        return super().compute_loss(model, inputs, *arguments, **named)


class Mean(Metric):
    """Computes a mean over the batch, as the guide of Transformers does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        super().compute_loss(model, {**inputs})
        noise = torch.rand(()) * 0.0  # draws of its own do not make it count
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + noise
        return (loss, outputs) if return_outputs else loss


def mean_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sum_over(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    total = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / (labels[:, 1:].numel() if num_items_in_batch is None else num_items_in_batch)


def train(rank: int, how: str, accumulate: int) -> tuple[dict[str, torch.Tensor], float, list[float]]:
    base = {"Mean": Mean, "Metric": Metric}.get(how, transformers.Trainer)
    with launched(), tempfile.TemporaryDirectory() as folder:
        more = {"gradient_accumulation_steps": accumulate, "max_steps": STEPS[accumulate], "logging_steps": 4}
        trainer = trainer_of(rank, "tokens", folder, base=base, train_dataset=Stream(words, rank), **more)
        trainer.compute_loss_func = {"mean_of": mean_of, "sum_over": sum_over}.get(how)
        output = trainer.train()
        assert output.training_loss == output.metrics["train_loss"]
        return parameters(trainer), output.training_loss, getattr(trainer, "seen", [])


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("how", ["plain", "Metric", "Mean", "mean_of", "sum_over"])
def test_a_loss_of_ones_own(pool: Pool, how: str, accumulate: int) -> None:
    """The loss of a run is the mean over its steps, of which the last were not logged."""
    expected, losses, _ = alone(llama(), words, accumulate, STEPS[accumulate])
    for state, loss, seen in pool.run(train, how, accumulate, ranks=RANKS, timeout=60):
        assert_same(state, expected, 2e-5)
        assert loss == pytest.approx(sum(losses) / len(losses), abs=1e-4)
        assert all(value == value for value in seen)  # none is a mean over no rows
        assert bool(seen) == (how in ("Mean", "Metric"))


def count(rank: int) -> tuple[float, float, float]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        more = {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2}
        stream = SizedStream(words, rank, ((5, 0), (5, 0)))
        trainer = trainer_of(rank, "tokens", folder, train_dataset=stream, **more)
        metrics = trainer.train().metrics
        epochs = [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
        assert epochs == pytest.approx([0.4, 0.8, 1.0, 1.4, 1.8, 2.0])
        return (
            trainer.state.total_flos,
            metrics["train_samples_per_second"] * metrics["train_runtime"],
            metrics["epoch"],
        )


def test_counts(pool: Pool) -> None:
    """A rank without data has the counts of all ranks, too."""
    numbers = pool.run(count, ranks=RANKS, timeout=60)
    for flos, samples, epoch in numbers:
        assert flos == numbers[0][0] > 0 and epoch == 2.0
        assert samples == pytest.approx(2 * 5 * ROWS, rel=0.01)


def compiled(rank: int) -> tuple[dict[str, torch.Tensor], str]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        more = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 8, "eval_strategy": "epoch"}
        trainer = trainer_of(rank, "tokens", folder, train_dataset=Stream(words, rank), **more)
        trainer.train()
        return llama_of(trainer), type(trainer.model_wrapped._orig_mod).__name__


def llama_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.in_test_all
def test_a_compiled_model_stays_in_ddp(pool: Pool) -> None:
    """In several epochs, with evaluations between them."""
    expected, _, _ = alone(llama(), words, 1, 8)
    for state, kind in pool.run(compiled, ranks=RANKS, timeout=120):
        assert kind == "DistributedDataParallel"
        assert_same(state, expected, 2e-5)
