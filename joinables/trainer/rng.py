"""Random state of a run: seeds, and the state with which a process starts (``join.generators`` captures states)."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from join.generators import capture, restore


def seed_all(seed: int) -> None:
    """Start all generators from ``seed``."""
    torch.manual_seed(seed)
    _seed_cpu(seed)


def _seed_cpu(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Return a context in which the generators of the CPU start from ``seed``; its numbers are not drawn outside."""
    before = capture()
    _seed_cpu(seed)
    try:
        yield
    finally:
        restore(before)


def start_from(state: Mapping[str, Any]) -> None:
    """Put the generators of a new process into the state captured in the process that started it.

    This process has chosen its device by then, and the state is the state of one device.
    """
    restore(state)
    if "accelerator" not in state and torch.accelerator.device_count():
        # The starting process has not used its GPU. If it had, torch.manual_seed would have seeded the GPU as well.
        torch.get_device_module().manual_seed_all(torch.initial_seed())


def iterate(loader: Any) -> Iterator[Any]:
    """Iterate over ``loader``; draws the same number of random numbers whether or not its workers are running already.

    A ``DataLoader`` draws a seed when it starts workers. It does so with every iterator, or, with
    ``persistent_workers``, with the first iterator only, and a fit that resumes has a first iterator again. The random
    numbers that such workers draw start from a new seed then.
    """
    if not getattr(loader, "persistent_workers", False):
        return iter(loader)
    # Workers that are started in the next epoch get another seed.
    torch.empty((), dtype=torch.int64, device="cpu").random_()
    with torch.random.fork_rng(devices=()):
        return iter(loader)
