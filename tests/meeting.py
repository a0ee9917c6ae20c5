"""Ranks that wait for each other outside of collectives: in a test, after their process group has broken."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(seconds=40)


def tell() -> None:
    """Let others know that this rank is through with what they wait for."""
    _store().set(f"test-rank-{dist.get_rank()}", "")


def wait_for(ranks: Iterable[int]) -> None:
    """Wait until these ranks have told so."""
    _store().wait([f"test-rank-{rank}" for rank in ranks], PATIENCE)


def store_file() -> Path:
    """Return the file of the store. A rank holds its lock in each call of the store, even while it is stopped."""
    store: Any = _store()
    return Path(store.underlying_store.path)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
