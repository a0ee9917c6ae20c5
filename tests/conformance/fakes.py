"""Horovod and PyTorch/XLA as their collectives use them, over a store: :func:`over_horovod`, :func:`over_xla`."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from join.collectives import horovod
from join.collectives.horovod import HorovodCollective
from join.collectives.xla import XLACollective
from tests.conformance.own_collective import REDUCTIONS, Exchange, Tensors

Combine = Callable[[Tensors], torch.Tensor]


class HorovodInternalError(RuntimeError):
    """Named as Horovod's."""


class Started:
    """An operation that has been started, on tensors of any device, and its result."""

    def __init__(self, library: Library, name: str, tensor: torch.Tensor, combine: Combine) -> None:
        self._store, self._received = library.store, Tensors()
        keys = [f"{name}/{rank}" for rank in range(library.world_size())]
        library.store.set(keys[library.rank()], pickle.dumps(tensor))
        self._exchange = Exchange(library.store, keys, lambda tensors: self._received.append(combine(tensors)))

    def cpu(self) -> torch.Tensor:
        self._exchange.wait()
        return self._received[0]

    def is_completed(self) -> bool:
        return self._exchange.is_completed()


class Library:
    """What both libraries know: the ranks."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        self.store = store
        self.rank = self.global_ordinal = self.local_rank = self.local_ordinal = lambda: rank
        self.size = self.world_size = lambda: world_size


class Horovod(Library):
    """``horovod.torch``. A rank that shuts it down breaks the operations of all."""

    Sum, Min, Max = "sum", "min", "max"
    is_up, times = False, 0

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self) -> None:
        self.is_up, self.times = True, self.times + 1

    def shutdown(self) -> None:
        self.is_up = False
        self.store.set(f"shut down {self.times}", "")

    def allreduce_async_(self, tensor: torch.Tensor, name: str, op: str) -> Any:
        assert tensor.dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
        return Started(self, name, tensor, lambda tensors: REDUCTIONS[op](torch.stack(tensors))), tensor

    def broadcast_async_(self, tensor: torch.Tensor, root_rank: int, name: str) -> Any:
        return Started(self, name, tensor, lambda tensors: tensors[root_rank]), tensor

    def allgather_async(self, tensor: torch.Tensor, name: str) -> Any:
        return Started(self, name, tensor, torch.cat), None

    def poll(self, handle: Any) -> bool:
        return handle[0].is_completed() or self.store.check([f"shut down {self.times}"])

    def synchronize(self, handle: Any) -> torch.Tensor:
        if not handle[0].is_completed():
            raise HorovodInternalError("Horovod has been shut down.")
        result = handle[0].cpu()
        return result if handle[1] is None else handle[1].copy_(result)


class XLA(Library):
    """``torch_xla``, ``torch_xla.core.xla_model`` and ``torch_xla.runtime``, with the CPU for a device."""

    REDUCE_SUM, REDUCE_MIN, REDUCE_MAX = "sum", "min", "max"

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self._names = map(str, count())
        self._running: Started | None = None
        self._next: Started | None = None

    def device(self) -> str:
        return "cpu"

    def addressable_device_count(self) -> int:
        return 1

    def sync(self) -> None:
        """Start a program. Like XLA, wait for the one before."""
        if self._next is not None:
            if self._running is not None:
                self._running.cpu()
            self._running, self._next = self._next, None

    def _program(self, tensor: torch.Tensor, combine: Combine) -> Started:
        self._next = Started(self, next(self._names), tensor, combine)
        return self._next

    def all_reduce(self, reduce_type: str, inputs: torch.Tensor) -> Started:
        return self._program(inputs, lambda tensors: REDUCTIONS[reduce_type](torch.stack(tensors)))

    def all_gather(self, value: torch.Tensor, dim: int = 0, pin_layout: bool = True) -> Started:
        assert not pin_layout
        return self._program(value, lambda tensors: torch.cat(tensors, dim))


@contextmanager
def over_horovod(rank: int, world_size: int, store: dist.Store) -> Iterator[HorovodCollective]:
    """A collective over fake Horovod that is not set up. Ranks are processes."""
    horovod._numbers = count()  # ranks of a pool have taken part in different tests
    with mock.patch.dict(sys.modules, {"horovod.torch": Horovod(rank, world_size, store)}):
        yield HorovodCollective()


@contextmanager
def over_xla(rank: int, world_size: int, store: dist.Store) -> Iterator[XLACollective]:
    """A collective over fake PyTorch/XLA that is not set up."""
    modules = dict.fromkeys(
        ("torch_xla", "torch_xla.core.xla_model", "torch_xla.runtime"), XLA(rank, world_size, store)
    )
    with mock.patch.dict(sys.modules, modules):
        yield XLACollective()
