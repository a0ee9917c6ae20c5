""":class:`Collective` of a single rank, without a backend: :class:`SingleCollective`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from join.collectives.base import Collective, ReduceOp, check_op
from join.collectives.line import DONE, MESSAGES, Finished, Line, Sum, Work


class SingleCollective(Collective):
    """This process alone. It needs no ``setup``."""

    rank, world_size = 0, 1

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a Join may be pickled for another process, without the facts that are kept here

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        return DONE

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_source(source)
        return DONE

    @override
    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)
        with torch.no_grad():
            outputs[0].copy_(tensor)
        return DONE

    @override
    def line(self, number: int = MESSAGES) -> Line:
        return _OwnLine()


class _OwnLine(Line):
    """Line of a single rank."""

    @override
    def sum(self, number: int, bits: int) -> Sum[int]:
        return Finished(number)

    @override
    def sum_float(self, number: float) -> Sum[float]:
        return Finished(number)

    @override
    def gather(self, data: bytes) -> Sum[list[bytes]]:
        return Finished([data])
