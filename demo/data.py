"""The data: scikit-learn's handwritten digits, dealt out very unevenly.

8 x 8 grey images of ten classes. The ranks and the single process cut them alike, so they see the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler, TensorDataset, random_split

BATCH_SIZE = 16
BATCHES = (14, 44, 0, 30)
"""Batches per epoch of each rank: rank 1 has three times as many as rank 0, rank 2 has none."""
STEPS = max(BATCHES)
"""Steps per epoch: ranks that are done shadow those that are not."""


def load() -> list[Dataset]:
    """Images of shape ``[1, 8, 8]`` in 0..1 with their label: those to train on, and what is left to validate on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target, dtype=torch.int64))
    training = BATCH_SIZE * sum(BATCHES)
    return random_split(data, [training, len(data) - training], torch.Generator().manual_seed(0))


def shards(epoch: int) -> list[list[list[int]]]:
    """Shuffle the training images and return each rank's batches, as numbers of images."""
    order = torch.randperm(BATCH_SIZE * sum(BATCHES), generator=torch.Generator().manual_seed(1 + epoch))
    batches = order.view(-1, BATCH_SIZE).tolist()
    return [batches[sum(BATCHES[:rank]) : sum(BATCHES[: rank + 1])] for rank in range(len(BATCHES))]


class Shard(Sampler[int]):
    """The images of this process's rank."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for batch in shards(self.epoch)[dist.get_rank()]:
            yield from batch

    def __len__(self) -> int:
        return BATCH_SIZE * BATCHES[dist.get_rank()]


class AllShards(Sampler[list[int]]):
    """The global batches: for each step, the images of all ranks that still have some."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for batches in zip_longest(*shards(self.epoch), fillvalue=()):
            yield [image for batch in batches for image in batch]

    def __len__(self) -> int:
        return STEPS
