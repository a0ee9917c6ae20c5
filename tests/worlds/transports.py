"""What carries the messages of ranks that are threads: :data:`TRANSPORTS`, and a wrapper of a rank's collective each.

Between machines, messages go over a group, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from join.collectives import Collective, Work
from join.collectives.base import MESSAGES, GroupLine, Line, ReduceOp
from join.collectives.board import Board
from join.collectives.shared_memory import Lane, Segment, SharedBoard, SharedMemoryLine, opened


class Bare(Collective):
    """A backend that has the operations of a group, and nothing beside them: headers go between its bursts."""

    def __init__(self, threads: Collective) -> None:
        self.rank, self.world_size, self.threads = threads.rank, threads.world_size, threads

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return self.threads.all_reduce(tensor, op)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self.threads.broadcast(tensor, source)

    @override
    def all_gather_into(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        return self.threads.all_gather_into(tensor, outputs)

    @override
    def board(self) -> Board:
        return self.threads.board()

    @override
    def issued_counter(self) -> Callable[[], int]:
        return self.threads.issued_counter()


class Memory(Bare):
    """A group whose ranks share memory. Threads do not see by a lock of a file that another one has ended."""

    def __init__(self, threads: Collective) -> None:
        super().__init__(threads)
        self._segment: Segment | None = None
        self._lanes: dict[int, Lane] = {}
        self._ended = threads.board().ended

    @override
    def companion(self) -> Collective:
        return self.threads.companion()

    @override
    def line(self, number: int = MESSAGES) -> Line:
        if self._segment is None:
            self._segment = segment = opened(self)
            assert segment is not None
            segment.has_ended = lambda rank: rank in self._ended()
            self.barrier()
        assert self._segment is not None
        if number not in self._lanes:
            self._lanes[number] = Lane(self._segment, number, timeout=1e6)
        return SharedMemoryLine(self._lanes[number], lambda: GroupLine(self.companion()))

    @override
    def board(self) -> Board:
        return self.threads.board() if self._segment is None else SharedBoard(self._segment)


TRANSPORTS: dict[str, Callable[[Collective], Collective]] = {
    "group": lambda threads: threads,  # with a companion, on which its headers go
    "bare": Bare,
    "memory": Memory,
}
