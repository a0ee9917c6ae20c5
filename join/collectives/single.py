"""A :class:`Collective` of one rank, without a backend: :class:`SingleCollective`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from typing_extensions import override

from join.collectives.base import Collective, ReduceOp, check_op
from join.collectives.board import Board, StoreBoard
from join.collectives.work import Done, Work


class SingleCollective(Collective):
    """This process alone. There is nothing to connect, so it works before ``setup`` and after ``teardown`` too."""

    def __init__(self) -> None:
        self._is_set_up = False
        self._texts: dict[str, str] = {}

    @property
    @override
    def rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @property
    @override
    def is_set_up(self) -> bool:
        return self._is_set_up

    @override
    def setup(self, rank: int, world_size: int) -> None:
        self._check_setup(rank, world_size)
        self._check_agrees(rank, world_size, 0, 1)
        self._is_set_up = True

    @override
    def teardown(self) -> None:
        self._is_set_up = False
        self._texts.clear()

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        return Done()

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_source(source)
        return Done()

    @override
    def all_gather_into(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)
        with torch.no_grad():
            outputs[0].copy_(tensor)
        return Done()

    @override
    def set(self, key: str, value: str) -> None:
        self._texts[key] = value

    @override
    def get(self, key: str) -> str:
        if key not in self._texts:
            raise RuntimeError(
                f"key {key!r} is not in the store, and no other rank can put it there; set it first [J040]"
            )
        return self._texts[key]

    @override
    def check(self, key: str) -> bool:
        return key in self._texts

    @override
    def add(self, key: str, amount: int) -> int:
        value = int(self._texts.get(key, "0")) + amount
        self._texts[key] = str(value)
        return value

    @override
    def board(self) -> Board:
        return StoreBoard(0, 1, dist.HashStore())  # nobody else looks at it
