""":class:`Collective` over Horovod: :class:`HorovodCollective`. Constructing one imports Horovod.

Horovod matches operations by their names, and the name of the n-th operation of a collective ends with n. So the
operations of a collective meet in their own order, whatever ``hvd.DistributedOptimizer`` starts between them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
from typing_extensions import override

from join.collectives._torch_private import Aside
from join.collectives.base import Collective, ReduceOp, as_bytes, check_op, put_back, widened
from join.collectives.broken import timed_out
from join.collectives.line import DONE, Work
from join.collectives.timeouts import TIMEOUTS

_POLL_SECONDS = 0.0005
_numbers = count()
"""Numbers of the collectives of this process. They are equal on all ranks, which set collectives up in one order."""


class HorovodCollective(Collective):
    """All ranks that Horovod has started.

    ``setup`` initialises Horovod if the script has not done so. In this case, ``teardown`` shuts Horovod down.

    Raises:
        ImportError: If Horovod is not installed.
    """

    def __init__(self) -> None:
        try:
            self._hvd: Any = importlib.import_module("horovod.torch")
        except ImportError as missing:
            raise ImportError(
                "HorovodCollective needs Horovod for PyTorch, which is not installed. Run HOROVOD_WITH_PYTORCH=1 pip"
                " install --no-build-isolation horovod. [J861]"
            ) from missing
        self._has_initialised = False

    def place(self) -> tuple[int, int, int]:
        """Return the rank of this process, the number of ranks, and its rank on this machine; initialises Horovod."""
        if not self._hvd.is_initialized():
            self._hvd.init()
        return self._hvd.rank(), self._hvd.size(), self._hvd.local_rank()

    @override
    def _connected_as(self) -> tuple[int, int]:
        return self.place()[:2]

    @override
    def setup(self, rank: int, world_size: int) -> None:
        initialises = not self._hvd.is_initialized()
        self._has_initialised |= initialises
        try:
            super().setup(rank, world_size)
        except ValueError:
            if initialises:
                self.teardown()
            raise
        self._names = map(f"join.{next(_numbers)}.{{}}".format, count())

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._has_initialised:
            self._has_initialised = False
            self._hvd.shutdown()

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        operator = {"sum": self._hvd.Sum, "min": self._hvd.Min, "max": self._hvd.Max}[op]
        start = partial(self._hvd.allreduce_async_, op=operator)
        return self._start(start, widened(tensor), partial(put_back, tensor))

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_source(source)
        carried = tensor.detach().contiguous()
        start = partial(self._hvd.broadcast_async_, root_rank=source)
        return self._start(start, as_bytes(carried), lambda _: put_back(tensor, carried))

    @override
    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)

        def fill(received: torch.Tensor) -> None:
            for output, part in zip(outputs, received.chunk(len(outputs)), strict=True):
                as_bytes(output).copy_(part)

        return self._start(self._hvd.allgather_async, as_bytes(tensor.contiguous()), fill)

    def _start(self, start: Callable[..., int], carried: torch.Tensor, then: Callable[[torch.Tensor], None]) -> Work:
        if carried.numel() == 0:  # on all ranks
            return DONE
        return _Started(self._hvd, start(carried, name=next(self._names)), then)

    @override
    def companion(self) -> Collective:
        if self.kept.companion is None:
            self.kept.companion = HorovodCollective()
            self.kept.companion.setup(self.rank, self.world_size)
        return self.kept.companion

    @override
    def abort(self, *, connections: bool = False) -> bool:
        """Shut Horovod down, so that operations fail on all ranks that wait in one.

        This waits for all processes that live, and not for a process that is stopped.
        """
        if connections:
            with suppress(RuntimeError):
                Aside(self._hvd.shutdown).wait(timedelta(seconds=TIMEOUTS.note))
        return False


class _Started:
    """Operation of Horovod that has been started.

    Args:
        hvd: The module ``horovod.torch``.
        handle: Horovod's handle of the operation.
        then: Called with the result, once.
    """

    def __init__(self, hvd: Any, handle: int, then: Callable[[torch.Tensor], None]) -> None:
        self._hvd, self._handle, self._then = hvd, handle, then
        self._end: Future[None] = Future()  # Horovod forgets the result, or the error, when it is asked for it

    def is_completed(self) -> bool:
        return self._end.done() or self._hvd.poll(self._handle)

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        started, limit = time.monotonic(), float("inf") if timeout is None else timeout.total_seconds()
        while not self.is_completed():
            if time.monotonic() - started > limit:
                raise timed_out("Horovod", limit)
            time.sleep(_POLL_SECONDS)
        if not self._end.done():
            try:
                self._end.set_result(self._then(self._hvd.synchronize(self._handle)))
            except RuntimeError as error:  # HorovodInternalError
                self._end.set_exception(error)
        self._end.result()
        return True
