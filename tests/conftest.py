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
