"""The seam between the protocol and whatever carries it: :class:`Collective`.

A collective connects the ranks of one group. Operations are matched by their order: the n-th operation of one rank
meets the n-th of every other. Next to them is a small key-value store, for texts that need no meeting.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

import torch

ReduceOp: TypeAlias = Literal["sum", "min", "max"]


class Work(Protocol):
    """A collective under way; ``torch.distributed.Work`` is one."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Block until done.

        Raises:
            RuntimeError: when ``timeout`` passes first, after which waiting again is allowed.
        """
        ...

    def is_completed(self) -> bool:
        """Whether the operation is done."""
        ...


class Collective(ABC):
    """The ranks of one group, and what they can do together. Tensors may live on any device the group can carry."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Start reducing ``tensor`` over all ranks, in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying ``tensor`` of rank ``source`` into that of every other rank, in place."""

    @abstractmethod
    def set(self, key: str, value: str) -> None:
        """Put a text into the store, seen by all ranks."""

    @abstractmethod
    def get(self, key: str) -> str:
        """Read a text from the store, waiting until it is there."""

    @abstractmethod
    def check(self, key: str) -> bool:
        """Whether the store has ``key``."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a counter in the store and return its new value."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Return rank ``source``'s ``value`` on every rank; it is pickled.

        Raises:
            RuntimeError: on every rank, if ``source`` cannot pickle it.
        """
        data, error = bytearray(), ""
        if self.rank == source:
            try:
                data = bytearray(pickle.dumps(value))
            except Exception as unpicklable:
                error = f"{type(unpicklable).__name__}: {unpicklable}"
                data = bytearray(error.encode())
        head = torch.tensor([len(data), not error], dtype=torch.int64)
        self.broadcast(head, source).wait()
        size, ok = int(head[0]), bool(head[1])
        data = data or bytearray(size)
        self.broadcast(torch.frombuffer(data, dtype=torch.uint8), source).wait()
        if not ok:
            raise RuntimeError(f"rank {source} cannot pickle what it should broadcast: {data.decode()}")
        return value if self.rank == source else pickle.loads(data)

    @abstractmethod
    def next_block(self) -> int:
        """The number of the next ``Join`` block on this group; the same on all ranks, since they enter in one order."""
