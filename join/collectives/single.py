""":class:`Collective` of a single rank, without a backend: :class:`SingleCollective`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from join.collectives.base import DONE, Collective, ReduceOp, Work, check_op
from join.collectives.board import Board, StoreBoard


class SingleCollective(Collective):
    """This process alone."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self._store = dist.HashStore()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a trainer that is pickled for another process has a collective; its store stays here

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
    def board(self) -> Board:
        return StoreBoard(self.rank, self.world_size, self._store)
