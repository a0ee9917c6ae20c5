""":class:`Collective` over Horovod: :class:`HorovodCollective`. Constructing one imports Horovod.

Horovod matches operations by their names, so the name of the n-th operation of a collective ends with n. Horovod does
not reduce booleans, small integers and bfloat16. They are reduced in a wider type and converted back when the operation
is waited for. Horovod has no store: ``setup`` opens a store on rank 0, unless you pass one.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from join.collectives.base import DONE, ReduceOp, Work, as_bytes, check_op
from join.collectives.broken import CALL_THE_SAME
from join.collectives.store import StoreCollective

_POLL_SECONDS = 0.0005

_WIDER = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.bfloat16: torch.float32,
}

# The number of a collective is part of its operations' names. It is equal on all ranks, which set collectives up in one
# order.
_numbers = count()


class _Handle:
    """Horovod's handle of an operation as a :class:`Work`."""

    def __init__(self, hvd: Any, handle: int, finish: Callable[[torch.Tensor], None]) -> None:
        self._hvd, self._handle, self._finish = hvd, handle, finish
        self._done = False

    def is_completed(self) -> bool:
        return self._done or self._hvd.poll(self._handle)

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        if self._done:
            return True
        if timeout is not None:
            deadline = time.monotonic() + timeout.total_seconds()
            while not self._hvd.poll(self._handle):
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"Waiting for Horovod timed out after {timeout.total_seconds():g} s. {CALL_THE_SAME} [J036]"
                    )
                time.sleep(_POLL_SECONDS)
        received = self._hvd.synchronize(self._handle)
        with torch.no_grad():
            self._finish(received)
        self._done = True
        return True


class HorovodCollective(StoreCollective):
    """All ranks that Horovod started.

    Args:
        store: The store for the notes of ranks that fail. By default, rank 0 opens a store on a free port. The other
            ranks reach it by the host name of rank 0, or on this host if all ranks have the same host name.

    Raises:
        ImportError: If Horovod is not installed.
    """

    def __init__(self, *, store: dist.Store | None = None) -> None:
        try:
            self._hvd: Any = importlib.import_module("horovod.torch")
        except ImportError as missing:
            raise ImportError(
                "HorovodCollective needs Horovod for PyTorch, which is not installed. Run HOROVOD_WITH_PYTORCH=1 pip"
                " install --no-build-isolation horovod. [J037]"
            ) from missing
        self._given_store, self._made = store, False

    @override
    def setup(self, rank: int, world_size: int) -> None:
        self._check_setup(rank, world_size)
        if not self._hvd.is_initialized():
            self._hvd.init()
            self._made = True
        self._take_place(rank, world_size, self._hvd.rank(), self._hvd.size())
        self._names = map(f"join.{next(_numbers)}.{{}}".format, count(1))
        self._open_store(self._given_store)

    @override
    def teardown(self) -> None:
        self.is_set_up, self._opened = False, None
        if self._made:
            self._made = False
            self._hvd.shutdown()

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        self._check_is_set_up()
        if tensor.numel() == 0:
            return DONE
        hvd = self._hvd
        carried = tensor.detach().to(_WIDER.get(tensor.dtype, tensor.dtype)).contiguous()
        handle = hvd.allreduce_async_(
            carried, name=next(self._names), op={"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}[op]
        )
        return _Handle(hvd, handle, lambda received: _put_back(received, tensor))

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_source(source)
        if tensor.numel() == 0:
            return DONE
        carried = tensor.detach().contiguous()
        handle = self._hvd.broadcast_async_(as_bytes(carried), source, name=next(self._names))
        return _Handle(self._hvd, handle, lambda _: _put_back(carried, tensor))

    @override
    def all_gather_into(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)
        if tensor.numel() == 0:
            return DONE

        def finish(received: torch.Tensor) -> None:
            for output, chunk in zip(outputs, received.chunk(len(outputs)), strict=True):
                as_bytes(output).copy_(chunk)

        handle = self._hvd.allgather_async(as_bytes(tensor.contiguous()), name=next(self._names))
        return _Handle(self._hvd, handle, finish)


def _put_back(carried: torch.Tensor, tensor: torch.Tensor) -> None:
    if carried.data_ptr() != tensor.data_ptr():
        tensor.copy_(carried)
