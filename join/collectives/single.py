""":class:`Collective` of a single rank, without a backend: :class:`SingleCollective`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from join.collectives.base import DONE, MESSAGES, Collective, Gather, Line, ReduceOp, Sum, Work, check_op
from join.collectives.board import Board, StoreBoard

V = TypeVar("V")


class SingleCollective(Collective):
    """This process alone."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self._store = dist.HashStore()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a Join may be pickled for another process, and the store stays here

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        return DONE

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_source(source)
        return DONE

    @override
    def all_gather_into(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)
        with torch.no_grad():
            outputs[0].copy_(tensor)
        return DONE

    @override
    def line(self, number: int = MESSAGES) -> Line:
        return _OwnLine()

    @override
    def board(self) -> Board:
        return StoreBoard(self.rank, self.world_size, self._store)


class _OwnLine(Line):
    """Line of a single rank, which makes no tensors: a loop sends a message in each of its steps."""

    @override
    def sum(self, number: int, bits: int) -> Sum[int]:
        return _Own(number)

    @override
    def sum_float(self, number: float) -> Sum[float]:
        return _Own(number)

    @override
    def gather(self, data: bytes) -> Gather:
        return _Own([data])


class _Own(Generic[V]):
    """Result of a single rank, which is done at once."""

    nbytes, wait, is_completed = 0, DONE.wait, DONE.is_completed

    def __init__(self, value: V) -> None:
        self._value = value

    def total(self) -> V:
        return self._value

    rows = total
