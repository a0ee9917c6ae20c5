""":class:`Collective` of a single rank, without a backend: :class:`SingleCollective`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from join.collectives.base import DONE, HEADERS, Collective, Fold, GroupLine, Line, ReduceOp, RollCall, Work, check_op
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
    def line(self, number: int = HEADERS) -> Line:
        return _OwnLine(self)

    @override
    def board(self) -> Board:
        return StoreBoard(self.rank, self.world_size, self._store)


class _OwnLine(GroupLine):
    """Line of a single rank, whose roll calls make no tensors: there is one in each step of a loop."""

    @override
    def roll_call(self, largest: int, fold: Fold[V]) -> RollCall[V]:
        return _OwnRollCall(fold)


class _OwnRollCall(Generic[V]):
    """Roll call of a single rank, which is done at once."""

    nbytes, wait, is_completed = 0, DONE.wait, DONE.is_completed
    _result: V

    def __init__(self, fold: Fold[V]) -> None:
        self._fold, self._number = fold, -1

    def call(self, number: int, /) -> None:
        if number != self._number:
            self._number, self._result = number, self._fold.of(number, 0)

    def result(self) -> V:
        return self._result
