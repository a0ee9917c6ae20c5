"""Ranks that hang until one of them has explained why: then all processes end, and stderr has the explanation."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from tests.shorter import using


class _Handler(logging.StreamHandler[Any]):
    @override
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        dist.distributed_c10d._get_default_store().set("explained", "")


def until_explained() -> None:
    """Wait as a rank does that is busy with something else."""
    while not dist.distributed_c10d._get_default_store().check(["explained"]):
        threading.Event().wait(0.05)


def _end() -> None:
    until_explained()
    os._exit(0)


@contextmanager
def ends_once_explained(seconds: float = 1.0) -> Generator[None]:
    """Run a body that hangs, which is explained after some seconds."""
    logging.getLogger("join").addHandler(_Handler())
    threading.Thread(target=_end, daemon=True).start()
    with using(explain=seconds):
        try:
            yield
        finally:  # also where another rank has ended first
            threading.Event().wait()
