"""A tiny language model, uneven streams for it, and training it in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from tests.integrations.transformers.versions import FIRST_TOKEN

RANKS, ROWS, WORDS = 2, 2, 17
COUNTS = ((5, 2), (0, 3), (4, 1))
"""Batches by epoch and rank; an epoch after these has none."""


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    layers: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, hidden_size=8, intermediate_size=8, pad_token_id=0, **layers)
    return LlamaForCausalLM(config)


class Regression(torch.nn.Module):
    """Counts no tokens: its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def regression() -> Any:
    torch.manual_seed(0)
    return Regression()


def sentences(rank: int, epoch: int, step: int) -> list[dict[str, torch.Tensor]]:
    """The samples of a batch: of the length of the step, and in parts without labels."""
    generator = torch.Generator().manual_seed(1000 * rank + 100 * epoch + step)
    words = torch.randint(1, WORDS, (ROWS, 4 + (step + rank) % 3), generator=generator)
    labels = words.clone()
    labels[torch.rand(words.shape, generator=generator) < 0.3] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def points(rank: int, epoch: int, step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * epoch + step)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)} for _ in range(ROWS)
    ]


class Stream(IterableDataset[Any]):
    """The samples of a rank, of another number in each epoch."""

    def __init__(self, samples: Any, rank: int, counts: tuple[tuple[int, ...], ...] = COUNTS) -> None:
        self.samples, self.rank, self.counts, self.epoch = samples, rank, counts, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def batches(self, epoch: int) -> int:
        return self.counts[epoch][self.rank] if epoch < len(self.counts) else 0

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.batches(self.epoch)):
            yield from self.samples(self.rank, self.epoch, step)


class SizedStream(Stream):
    def __len__(self) -> int:
        return ROWS * self.batches(0)


def collated(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def epoch_of(stream: type[Stream], samples: Any, epoch: int, counts: tuple[tuple[int, ...], ...]) -> list[list[Any]]:
    """By rank, the batches of an epoch."""
    found: list[list[Any]] = []
    for rank in range(RANKS):
        source = stream(samples, rank, counts)
        found.append([collated(samples(rank, epoch, step)) for step in range(source.batches(epoch))])
    return found


def tokens(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"][:, FIRST_TOKEN:] != -100).sum())


def evaluation_loss(model: Any, batch: dict[str, torch.Tensor]) -> float:
    return model(**batch, num_items_in_batch=tokens(batch)).loss.item()


def alone(
    model: Any, samples: Any, accumulate: int, max_steps: int, rate: float = 1e-2, evaluated: list[Any] | None = None
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Train in one process: the parameters, the loss of each step, and after each the loss of batches evaluated."""
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, 0, max_steps)
    losses: list[float] = []
    evaluations: list[float] = []
    model.train()
    for epoch in range(1000):
        data = epoch_of(Stream, samples, epoch, COUNTS)
        for start in range(0, max(map(len, data)), accumulate):
            window = [batch for own in data for batch in own[start : start + accumulate]]
            optimizer.zero_grad()
            total = 0.0
            for batch in window:
                if samples is sentences:
                    loss = model(**batch, num_items_in_batch=sum(map(tokens, window))).loss
                else:
                    loss = model(**batch)["loss"] / len(window)
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(total)
            if evaluated:
                model.eval()
                with torch.no_grad():
                    means = [evaluation_loss(model, batch) for batch in evaluated]
                evaluations.append(sum(means) / len(means))
                model.train()
            if len(losses) == max_steps:
                return {name: value.detach().clone() for name, value in model.state_dict().items()}, losses, evaluations
    raise AssertionError("there are not as many batches")
