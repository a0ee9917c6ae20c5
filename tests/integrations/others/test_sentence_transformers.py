"""The trainer of sentence-transformers with the mixin."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.harness import Pool
from tests.integrations.ranks import imported, launched
from tests.training import assert_same

pytest.importorskip("sentence_transformers", reason="It is not installed: pip install sentence-transformers")

COUNTS, ROWS, WORDS = (3, 1), 2, 20


def part(name: str) -> Any:
    """A module of theirs, which is in another place before sentence-transformers 6."""
    new = find_spec("sentence_transformers.sentence_transformer") is not None
    old_name = {"modules": "models"}.get(name, name)
    return imported(f"sentence_transformers.{f'sentence_transformer.{name}' if new else old_name}")


def model_of() -> Any:
    library, tokenizers = imported("sentence_transformers"), imported("tokenizers")
    torch.manual_seed(0)
    words = {"<unk>": 0} | {f"w{number}": number for number in range(1, WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    static = part("modules").StaticEmbedding(tokenizer, embedding_dim=6)
    return library.SentenceTransformer(modules=[static], device="cpu")


def samples(rank: int, step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    found: list[dict[str, Any]] = []
    for _ in range(ROWS):
        pair = [
            " ".join(f"w{int(each)}" for each in row) for row in torch.randint(1, WORDS, (2, 4), generator=generator)
        ]
        found.append({"one": pair[0], "other": pair[1], "score": torch.rand((), generator=generator).item()})
    return found


def train(rank: int) -> dict[str, torch.Tensor]:
    from joinables.integrations.transformers import JoinTrainerMixin

    library, data = imported("sentence_transformers"), imported("datasets")
    with launched(), tempfile.TemporaryDirectory() as folder:
        arguments = library.SentenceTransformerTrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=ROWS,
            max_steps=max(COUNTS),
            learning_rate=0.5,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            logging_nan_inf_filter=False,
        )
        model, base = model_of(), library.SentenceTransformerTrainer
        kind: Any = type("Uneven", (JoinTrainerMixin, base), {})
        own = [row for step in range(COUNTS[rank]) for row in samples(rank, step)]
        kinds = {"one": data.Value("string"), "other": data.Value("string"), "score": data.Value("float32")}
        stream = data.IterableDataset.from_generator(lambda: iter(own), data.Features(kinds))
        loss = part("losses").CosineSimilarityLoss(model)
        kind(model, args=arguments, train_dataset=stream, loss=loss).train()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_it_trains_exactly(pool: Pool) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = part("losses").CosineSimilarityLoss(model)
    features_of = model.preprocess if hasattr(model, "preprocess") else model.tokenize
    for step in range(max(COUNTS)):
        rows = [row for rank in range(2) if step < COUNTS[rank] for row in samples(rank, step)]
        features = [features_of([row[name] for row in rows]) for name in ("one", "other")]
        optimizer.zero_grad()
        loss(features, torch.tensor([row["score"] for row in rows])).backward()
        optimizer.step()
    for state in pool.run(train, ranks=2, timeout=60):
        assert_same(state, model.state_dict(), 1e-5)
