"""The data: scikit-learn's handwritten digits, dealt out very unevenly.

8 x 8 grey images of ten classes. Everybody who calls :func:`shards` gets the same cut, so the ranks and the single
process see the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BATCH_SIZE = 16
BATCHES = (14, 44, 0, 30)
"""Batches per epoch of each rank: rank 1 has three times as many as rank 0, rank 2 has none."""
STEPS = max(BATCHES)
"""Steps per epoch: ranks that are done shadow those that are not."""

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Digits:
    """Images of shape ``[n, 1, 8, 8]`` in 0..1, and labels of shape ``[n]``."""

    images: torch.Tensor
    labels: torch.Tensor
    validation_images: torch.Tensor
    validation_labels: torch.Tensor


def load() -> Digits:
    """Load the digits and set aside whatever the ranks do not train on."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, validation = order.tensor_split([BATCH_SIZE * sum(BATCHES)])
    return Digits(images[training], labels[training], images[validation], labels[validation])


def shards(digits: Digits, epoch: int) -> list[list[Batch]]:
    """Shuffle the training images and return each rank's batches for ``epoch``."""
    order = torch.randperm(len(digits.labels), generator=torch.Generator().manual_seed(1 + epoch))
    batches = [(digits.images[chosen], digits.labels[chosen]) for chosen in order.split(BATCH_SIZE)]
    ends = torch.tensor(BATCHES).cumsum(0).tolist()
    return [batches[end - count : end] for end, count in zip(ends, BATCHES, strict=True)]
