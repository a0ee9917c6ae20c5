"""A collective as a user writes one for another library: six methods, here over any store of torch."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from join.collectives import Collective, ReduceOp, Work

Tensors = list[torch.Tensor]
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
}


class Exchange:
    """The n-th operation of all ranks, which each of them has written into the store."""

    def __init__(self, store: Any, keys: Sequence[str], fill: Callable[[Tensors], object]) -> None:
        self.store, self.keys, self.fill, self.is_done = store, keys, fill, False

    def is_completed(self) -> bool:
        if not self.is_done and self.store.check(self.keys):
            with torch.no_grad():
                self.fill([pickle.loads(self.store.get(key)) for key in self.keys])
            self.is_done = True
        return self.is_done

    def wait(self, timeout: timedelta = timedelta(seconds=60), /) -> bool:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("timed out")
            if not threading.main_thread().is_alive():
                # Python would end this thread as it comes back from the store, and to unwind C++ aborts the process.
                raise RuntimeError("the process ends")
            time.sleep(0.001)
        return True


class OverStore(Collective):
    """Ranks that write their tensors into a store."""

    is_open = False

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def setup(self, rank: int, world_size: int) -> None:
        super().setup(rank, world_size)
        self.count, self.is_open = 0, True

    def teardown(self) -> None:
        super().teardown()
        self.is_open = False

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return self._exchange(tensor, lambda tensors: tensor.copy_(REDUCTIONS[op](torch.stack(tensors))))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._exchange(tensor, lambda tensors: tensor.copy_(tensors[source]))

    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        def fill(tensors: Tensors) -> None:
            for output, received in zip(outputs, tensors, strict=True):
                output.copy_(received)

        return self._exchange(tensor, fill)

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1)).wait()

    def _exchange(self, tensor: torch.Tensor, fill: Callable[[Tensors], object]) -> Work:
        self.count += 1
        self.store.set(f"{self.count}/{self.rank}", pickle.dumps(tensor.detach()))  # pyright: ignore[reportArgumentType]
        return Exchange(self.store, [f"{self.count}/{rank}" for rank in range(self.world_size)], fill)
