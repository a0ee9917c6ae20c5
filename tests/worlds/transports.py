"""What carries the messages of ranks that are threads: :data:`TRANSPORTS`, and a wrapper of a rank's collective each.

Between machines, messages go over a group, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from join.collectives import Collective, Line, ReduceOp, Work
from join.collectives import shared_memory as memory
from join.collectives.base import GroupLine
from join.collectives.board import Board
from join.collectives.line import MESSAGES


class Bare(Collective):
    """A backend that has the operations of a group, and nothing beside them: headers go between its bursts."""

    def __init__(self, threads: Collective) -> None:
        self.threads = threads
        self.setup(threads.rank, threads.world_size)

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return self.threads.all_reduce(tensor, op)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self.threads.broadcast(tensor, source)

    @override
    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        return self.threads.all_gather(tensor, outputs)

    @override
    def line(self, number: int = MESSAGES) -> Line:
        return GroupLine(self)

    @override
    def board(self) -> Board:
        return self.threads.board()

    @override
    def issued_counter(self) -> Callable[[], int]:
        return self.threads.issued_counter()


class Memory(Bare):
    """A group whose ranks share memory. Threads do not see by a lock of a file that another one has ended."""

    @override
    def companion(self) -> Collective:
        return self.threads.companion()

    @override
    def line(self, number: int = MESSAGES) -> Line:
        kept = self.kept
        if not kept.is_connected:
            made = memory._create(self.world_size) if self.rank == 0 else None
            address = memory._Address(*self.broadcast_object(made, 0, plain=True))
            file = address.file if self.rank == 0 else memory._open(address)
            assert file is not None
            kept.segment, ended = memory.Segment(file, self.rank, self.world_size), self.threads.board().ended
            kept.segment.has_ended = lambda rank: rank in ended()
            self.barrier()
            kept.is_connected, kept.timeout = True, 1e6
        return Collective.line(self, number)

    @override
    def board(self) -> Board:
        return self.threads.board() if self.kept.segment is None else Collective.board(self)


TRANSPORTS: dict[str, Callable[[Collective], Collective]] = {
    "group": lambda threads: threads,  # with a companion, on which its headers go
    "bare": Bare,
    "memory": Memory,
}
