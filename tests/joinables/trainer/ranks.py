"""Trainers as ranks of the test pool: the flow under a launcher, without the seconds that starting processes costs."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from joinables.trainer import DDPStrategy, Strategy, Trainer
from joinables.trainer.launch import Place


class InPlace(DDPStrategy):
    """Runs in the process group that is there."""

    def place(self, world_size: int) -> Place:
        return Place(dist.get_rank(), dist.get_world_size(), dist.get_rank())

    def launch(self, fn: Callable[..., Any], *args: Any, world_size: int, **how: Any) -> Any:
        assert world_size == dist.get_world_size()
        return Strategy.launch(self, fn, *args, world_size=world_size)


def trainer(*, strategy: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A trainer for this rank of the pool, or for one process where there is no group; it writes no log."""
    options = {"logger": False, **options}
    if not dist.is_initialized():
        return Trainer(strategy=Strategy(), devices=1, **options)
    return Trainer(strategy=InPlace(**(strategy or {})), devices=dist.get_world_size(), **options)


def free_port() -> int:
    """A port below those that the system gives to others meanwhile."""
    while True:
        with socket.socket() as one, suppress(OSError):
            # Not of the global generator: a fit seeds it, in tests that run at once alike.
            one.bind(("127.0.0.1", random.SystemRandom().randrange(20000, 30000)))
            return one.getsockname()[1]


def new_group() -> None:
    """Make a new process group on all ranks, as is needed after a failure."""
    if dist.is_initialized():
        rank, ranks, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore("new", store), rank=rank, world_size=ranks)
