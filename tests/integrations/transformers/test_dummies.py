"""Losses that look at their batches, metrics by batch, windows without tokens, and streams that are the same."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch

from join import JoinError
from tests.ending import Ending
from tests.harness import Pool
from tests.integrations.ranks import launched
from tests.integrations.transformers.lm import RANKS, ROWS, Stream, alone, llama, points, regression, sentences
from tests.integrations.transformers.training import STEPS, TO_EVALUATE, parameters, trainer_of
from tests.training import assert_same

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[transformers]")


def train_bare(rank: int) -> dict[str, torch.Tensor]:
    """``JoinTrainer`` as it is."""
    from joinables.integrations.transformers import JoinTrainer

    with launched(), tempfile.TemporaryDirectory() as folder:
        made = trainer_of(rank, "tokens", folder)
        trainer = JoinTrainer(llama(), made.args, made.data_collator, Stream(sentences, rank))
        trainer.train()
        return parameters(trainer)


def guarded() -> Any:
    class Guarded(transformers.Trainer):
        dummies = 0

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *arguments, **named)
            self.dummies += self.shadowing
            if not torch.isfinite(loss) or not loss.item():
                raise ValueError("there is nothing to learn")
            with pytest.raises(JoinError, match=r"accelerator\.gather would count dummies too\. .* \[J521\]"):
                self.accelerator.gather(loss.detach())
            with pytest.raises(JoinError, match=r"accelerator\.reduce got a value .* \[J725\]"):
                self.accelerator.reduce(loss.detach())
            return loss

    return Guarded


def train_guarded(rank: int) -> tuple[dict[str, torch.Tensor], int]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(rank, "tokens", folder, base=guarded())
        trainer.train()
        return parameters(trainer), trainer.dummies


def test_a_trainer_as_it_is_and_one_that_looks_at_its_losses(pool: Pool) -> None:
    expected, _, _ = alone(llama(), sentences, 1, STEPS[1])
    for state in pool.run(train_bare, ranks=RANKS, timeout=60):
        assert_same(state, expected, 1e-5)
    for rank, (state, dummies) in enumerate(pool.run(train_guarded, ranks=RANKS, timeout=60)):
        assert_same(state, expected, 1e-5)
        assert dummies == (3, 4)[rank]  # in ten steps


def without_labels(rank: int, epoch: int, step: int) -> list[dict[str, torch.Tensor]]:
    """Samples; those of a step have no token to learn, on any rank."""
    samples = sentences(rank, epoch, step)
    return samples if step != 1 else [each | {"labels": torch.full_like(each["labels"], -100)} for each in samples]


def train_without_tokens(rank: int) -> dict[str, torch.Tensor]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        stream = Stream(without_labels, rank, ((2, 3),))
        trainer = trainer_of(rank, "tokens", folder, train_dataset=stream, max_steps=3)
        trainer.train()
        return parameters(trainer)


def test_a_window_without_tokens_has_gradients_of_0(pool: Pool) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = transformers.get_scheduler("linear", optimizer, 0, 3)
    for step in range(3):
        data = [without_labels(rank, 0, step) for rank in range(RANKS) if step < (2, 3)[rank]]
        batches = [{name: torch.stack([each[name] for each in own]) for name in own[0]} for own in data]
        count = sum(int((each["labels"][:, 1:] != -100).sum()) for each in batches)
        optimizer.zero_grad(set_to_none=False)  # momentum acts in the step without tokens, too
        for each in batches if count else []:
            model(**each, num_items_in_batch=count).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    for state in pool.run(train_without_tokens, ranks=RANKS, timeout=60):
        assert_same(state, dict(model.state_dict()), 1e-5)


def evaluate_by_batch(rank: int) -> tuple[float, list[bool]]:
    seen = [0, 0]
    ends: list[bool] = []

    def count(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen[0] += len(prediction.label_ids)
        ends.append(compute_result)
        return {"n": seen[0]} if compute_result else {}

    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(rank, "samples", folder)
        trainer.args.batch_eval_metrics, trainer.compute_metrics = True, count
        return trainer.evaluate()["eval_n"], ends


def test_metrics_by_batch(pool: Pool) -> None:
    steps = max(TO_EVALUATE[0])
    for count, ends in pool.run(evaluate_by_batch, ranks=RANKS, timeout=60):
        assert count == ROWS * sum(TO_EVALUATE[0])
        assert ends == [False] * (steps - 1) + [True]


def warned(rank: int, same: bool) -> list[str]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        stream = Stream(points, 0 if same else rank, ((2, 2),))
        trainer = trainer_of(rank, "samples", folder, model=regression(), train_dataset=stream, max_steps=2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.train()
        return [str(each.message) for each in told if "begins with the same batch" in str(each.message)]


@pytest.mark.parametrize("same", [False, True])
def test_ranks_that_read_the_same_stream_are_warned(pool: Pool, same: bool) -> None:
    for told in pool.run(warned, same, ranks=RANKS, timeout=60):
        assert [text.partition(" begins")[0] for text in told] == ["The train_dataset of ranks [0, 1]"] * same


class Uncopied(dict[str, Any]):
    def __deepcopy__(self, _: Any) -> Any:
        raise RuntimeError("there is only one")


def fail(rank: int) -> str:
    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(rank, "samples", folder, train_dataset=Stream(points, rank, ((1, 2),)), max_steps=2)
        collate = trainer.data_collator
        trainer.data_collator = lambda samples: Uncopied(collate(samples))
        with pytest.raises(JoinError) as caught:
            trainer.train()
        return str(caught.value)


def test_advice_is_in_the_words_of_a_trainer(ending: Ending) -> None:
    """Also on the rank that is told of the error of another one."""
    for text in ending.run(fail, ranks=2):
        assert "from the data_collator. [J067]" in text and "join.iterate(" not in text
