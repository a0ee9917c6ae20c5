from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.ending import Ending
from tests.pool import Pool

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Whoever connects to one of torch's stores asks for the name of its address. Where nobody answers, that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ending() -> Iterator[Ending]:
    ending = Ending()
    yield ending
    ending.close()


def import_fsdp(rank: int) -> None:
    import torch.distributed.fsdp  # noqa: F401


@pytest.fixture(scope="module")
def fsdp(pool: Pool) -> None:
    """Importing it takes long, and is not to count as a test's time."""
    pool.run(import_fsdp, ranks=4, timeout=110)
