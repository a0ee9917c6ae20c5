"""Heads that take ``num_items_in_batch`` and ignore it: losses as in one process."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from tests.harness import Pool
from tests.integrations.ranks import launched
from tests.integrations.transformers.lm import COUNTS, RANKS, ROWS, WORDS, Stream, alone
from tests.integrations.transformers.training import STEPS, logged, trainer_of
from tests.integrations.transformers.versions import PRECISION

pytest.importorskip("transformers", reason="Transformers is not installed: pip install joinables[transformers]")
pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[transformers]")

CLASSES = 3
HEADS = {
    "BertForSequenceClassification": "single_label_classification",
    "RobertaForSequenceClassification": "multi_label_classification",
    "DistilBertForSequenceClassification": "regression",
    "LlamaForSequenceClassification": "single_label_classification",
    "BertForTokenClassification": "tokens",
}


def build(head: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if head.startswith("DistilBert"):
        sizes = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2}
        sizes |= {"seq_classif_dropout": 0.0, "dropout": 0.0, "attention_dropout": 0.0}
    elif not head.startswith("Llama"):
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, head.partition("For")[0] + "Config")(
        vocab_size=WORDS, num_labels=1 if HEADS[head] == "regression" else CLASSES, pad_token_id=0, **sizes
    )
    if HEADS[head] != "tokens":
        config.problem_type = HEADS[head]
    return getattr(transformers, head)(config)


class Samples:
    """Samples of a batch for a head."""

    def __init__(self, head: str) -> None:
        self.head = head

    def __call__(self, rank: int, epoch: int, step: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1000 * rank + 100 * epoch + step)
        found: list[dict[str, torch.Tensor]] = []
        for _ in range(ROWS):
            labels = {
                "single_label_classification": torch.randint(CLASSES, (), generator=generator),
                "multi_label_classification": torch.randint(2, (CLASSES,), generator=generator).float(),
                "regression": torch.randn((), generator=generator),
                "tokens": torch.randint(CLASSES, (5,), generator=generator),
            }[HEADS[self.head]]
            found.append({"input_ids": torch.randint(1, WORDS, (5,), generator=generator), "labels": labels})
        return found


def train(rank: int, head: str, accumulate: int) -> tuple[list[float], list[float]]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        more = {"gradient_accumulation_steps": accumulate, "max_steps": STEPS[accumulate]}
        stream = Stream(Samples(head), rank, COUNTS)
        trainer = trainer_of(rank, "tokens", folder, model=build(head), train_dataset=stream, **more)
        trainer.train()
        return logged(trainer, "loss"), logged(trainer, "grad_norm")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("head", HEADS)
def test_it_trains_exactly(pool: Pool, head: str, accumulate: int) -> None:
    samples = Samples(head)
    _, losses, _ = alone(build(head), samples, accumulate, STEPS[accumulate])
    for told, norms in pool.run(train, head, accumulate, ranks=RANKS, timeout=60):
        assert told == pytest.approx(losses, abs=PRECISION)
        assert len(norms) == len(losses)
