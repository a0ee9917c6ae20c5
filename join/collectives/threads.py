""":class:`Collective` whose ranks are threads of this process: :func:`run_threads`.

It is for testing joinables and the protocol itself without processes. 64 ranks start in milliseconds. If a rank issues
the wrong collective, an error names both operations; if a rank does not arrive, an error names the rank. It is not for
training, because the threads share one interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from join.collectives.base import Collective, Kept, ReduceOp, check_op, describe
from join.collectives.board import Board, StoreBoard
from join.collectives.broken import BrokenCollective, timed_out
from join.collectives.line import Work

T = TypeVar("T")
_REDUCTIONS = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


class _Operation:
    """Collective in which the n-th operations of all ranks meet. It is also the ``Work`` on which each rank waits."""

    def __init__(self, world: _World, name: str) -> None:
        self.world, self.name = world, name
        self.tensors: dict[int, torch.Tensor] = {}
        self.receivers: list[Sequence[torch.Tensor]] = []
        self.done = threading.Event()
        self.failure: RuntimeError | None = None

    def fail(self, failure: RuntimeError) -> None:
        """End the operation with ``failure``, because a rank will not reach it."""
        self.failure = self.failure or failure
        self.done.set()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        limit = self.world.timeout if timeout is None else timeout.total_seconds()
        if not self.done.wait(limit):
            missing = sorted(set(range(self.world.size)) - set(self.tensors))
            raise timed_out(f"ranks {missing} in {self.name}", limit)
        if self.failure is not None:
            raise self.failure
        return True


class _World:
    """State that the ranks share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.lock = threading.Lock()
        self.operations: dict[tuple[int, int], _Operation] = {}
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=timeout))
        self.ended: dict[int, BrokenCollective] = {}

    def end(self, rank: int, why: BrokenCollective) -> None:
        """Record that a rank will take part in no further operation."""
        with self.lock:
            self.ended[rank] = why
            for operation in self.operations.values():
                if rank not in operation.tensors:
                    operation.fail(why)


class _ThreadBoard(StoreBoard):
    """Board in the store of the ranks. The world knows which ranks have ended."""

    outlives = True

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(rank, world.size, world.store)
        self._world = world

    @override
    def ended(self) -> list[int]:
        return list(self._world.ended)


class ThreadCollective(Collective):
    """One rank of a world of threads, for :func:`run_threads`.

    Args:
        world: The world.
        number: The number of the collective; those of one number meet.
    """

    def __init__(self, world: _World, number: int = 0) -> None:
        self._world, self._number, self._count = world, number, 0
        self.kept = Kept(is_connected=True)

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        reduction = _REDUCTIONS[op]
        return self._join_operation(
            f"all_reduce({op})", tensor, [tensor], lambda tensors: [reduction(torch.stack(tensors), 0)]
        )

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_source(source)
        return self._join_operation(
            f"broadcast from rank {source}", tensor, [tensor], lambda tensors: [tensors[source].clone()]
        )

    @override
    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)
        # Tensors are cloned, because a rank may gather into the tensor that it passes.
        return self._join_operation("all_gather", tensor, outputs, lambda tensors: [each.clone() for each in tensors])

    def _join_operation(
        self,
        name: str,
        tensor: torch.Tensor,
        receivers: Sequence[torch.Tensor],
        combine: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> Work:
        """Take part in the n-th operation. The last rank writes the combined tensors into all receivers."""
        world, name = self._world, f"{name} of {describe(tensor.dtype, tensor.shape)}"
        with world.lock:
            key = self._number, self._count
            operation = world.operations.setdefault(key, _Operation(world, name))
            if operation.name != name:
                text = (
                    f"Rank {self.rank} called {name} as collective {self._count}, but rank {min(operation.tensors)}"
                    f" called {operation.name}. Call the same collectives in the same order on all ranks. [J043]"
                )
                operation.fail(RuntimeError(text))
                raise RuntimeError(text)
            for rank, failure in world.ended.items():
                if rank not in operation.tensors:
                    operation.fail(failure)
            operation.tensors[self.rank] = tensor
            operation.receivers.append(receivers)
            if len(operation.tensors) == world.size:
                with torch.no_grad():
                    results = combine([operation.tensors[rank] for rank in range(world.size)])
                    for tensors in operation.receivers:
                        for receiver, result in zip(tensors, results, strict=True):
                            receiver.copy_(result)
                del world.operations[key]
                operation.done.set()
        self._count += 1
        return operation

    @override
    def companion(self) -> Collective:
        if self.kept.companion is None:
            self.kept.companion = ThreadCollective(self._world, self._number + 1)
            self.kept.companion.setup(self.rank, self.world_size)
        return self.kept.companion

    @override
    def board(self) -> Board:
        return _ThreadBoard(self._world, self.rank)

    @override
    def issued_counter(self) -> Callable[[], int]:
        return lambda: self._count


def run_threads(world_size: int, fn: Callable[[ThreadCollective], T], timeout: float = 30.0) -> list[T]:
    """Run ``fn(collective)`` on ``world_size`` ranks, each in a thread, and return their results in rank order.

    Args:
        world_size: The number of ranks, at least 1.
        fn: The function that each rank runs. Its argument is the collective of the rank.
        timeout: Seconds that a collective may wait for its last rank.

    Raises:
        ValueError: If ``world_size`` is less than 1.
        Exception: The first exception that a rank raised. Ranks that wait for a rank that has raised or returned raise
            a ``RuntimeError``.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} is less than 1. Pass the number of ranks. [J045]")
    world = _World(world_size, timeout)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        collective = ThreadCollective(world)
        collective.setup(rank, world_size)
        end = "has ended"
        try:
            results[rank] = fn(collective)
        except BaseException as error:
            errors.append(error)
            end = f"raised {type(error).__name__}: {error}"
        world.end(rank, BrokenCollective(f"rank {rank} {end}", [rank]))

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
