"""The data: scikit-learn's handwritten digits, distributed unevenly over four ranks.

The digits are grey images of 8 x 8 pixels in ten classes. The ranks and the single process use the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler, TensorDataset, random_split

BATCH_SIZE = 16
BATCHES = (14, 44, 0, 30)
"""Batches of each rank in an epoch: rank 1 has three times as many as rank 0, and rank 2 has none."""
STEPS = max(BATCHES)
"""Steps in an epoch. Ranks that are out of data shadow the others."""


def load() -> list[Dataset]:
    """Return images of shape ``[1, 8, 8]`` in 0..1 with their labels: the training images and the validation images."""
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
    """Sampler of this rank's images."""

    epoch = 0
    num_replicas = len(BATCHES)  # it distributes the images itself

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for batch in shards(self.epoch)[dist.get_rank()]:
            yield from batch

    def __len__(self) -> int:
        return BATCH_SIZE * BATCHES[dist.get_rank()]


class AllShards(Sampler[list[int]]):
    """Sampler of the global batches: for each step, the images of all ranks that still have data."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for batches in zip_longest(*shards(self.epoch), fillvalue=()):
            yield [image for batch in batches for image in batch]

    def __len__(self) -> int:
        return STEPS
