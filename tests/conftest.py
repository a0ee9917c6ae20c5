from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.pool import Pool

# Whoever connects to one of torch's stores asks for the name of its address. Where nobody answers, that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def import_fsdp(rank: int) -> None:
    import torch.distributed.fsdp  # noqa: F401


@pytest.fixture(scope="module")
def fsdp(pool: Pool) -> None:
    """Importing it takes long, and is not to count as a test's time."""
    pool.run(import_fsdp, ranks=4, timeout=110)
