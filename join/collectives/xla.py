""":class:`Collective` over PyTorch/XLA: :class:`XlaCollective`. Constructing one imports ``torch_xla``.

Its ranks are the processes that ``torch_xla.launch`` or ``torch_xla.distributed.xla_multiprocessing.spawn`` started,
one for each device. Tensors may be on the host or on the XLA device; host tensors are sent through the device. XLA
compiles the programs of a device, and ranks can only meet in equal programs. So all pending work runs before a
collective, and each operation is done when it returns. XLA has no store: ``setup`` opens a store on rank 0, unless you
pass one.

*Tested:* the conformance suite with torch_xla 2.9.0 and torch 2.9.0 on a CPU at world size 1, with and without
``XLA_ALWAYS_ALLREDUCE=1`` (without it, ``xm.all_reduce`` of a single rank does nothing); and with 3 ranks over a fake
with the signatures of torch_xla. *Not tested:* several real ranks (two CPU devices never met in an all-reduce), and any
device except a CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from join.collectives.base import DONE, ReduceOp, Work, check_op
from join.collectives.store import StoreCollective

_WIDER = {torch.bool: torch.int32, torch.bfloat16: torch.float32}


class XlaCollective(StoreCollective):
    """All ranks that PyTorch/XLA started.

    Args:
        store: The store for the notes of ranks that fail. By default, rank 0 opens a store on a free port. The other
            ranks reach it by the host name of rank 0, or on this host if all ranks have the same host name.

    Raises:
        ImportError: If PyTorch/XLA is not installed.
    """

    def __init__(self, *, store: dist.Store | None = None) -> None:
        try:
            self._xla: Any = importlib.import_module("torch_xla")
            self._model: Any = importlib.import_module("torch_xla.core.xla_model")
            self._runtime: Any = importlib.import_module("torch_xla.runtime")
        except ImportError as missing:
            raise ImportError(
                "XlaCollective needs PyTorch/XLA, which is not installed. Run pip install torch_xla. [J049]"
            ) from missing
        self._given_store = store

    @override
    def setup(self, rank: int, world_size: int) -> None:
        self._check_setup(rank, world_size)
        self._take_place(rank, world_size, self._runtime.global_ordinal(), self._runtime.world_size())
        self._open_store(self._given_store)

    @override
    def teardown(self) -> None:
        self.is_set_up, self._opened = False, None

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        self._check_is_set_up()
        with torch.no_grad():
            tensor.copy_(self._reduced(tensor, op))
        return DONE

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_source(source)
        # This is a sum with zeros. xm.collective_broadcast would multiply the receiver's tensor by zero, and its values
        # may be NaN.
        with torch.no_grad():
            received = self._reduced(tensor if self.rank == source else torch.zeros_like(tensor), "sum")
            if self.rank != source:
                tensor.copy_(received)
        return DONE

    @override
    def all_gather_into(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)
        if tensor.numel() == 0:
            return DONE
        with torch.no_grad():
            # The default pin_layout=True would all-reduce a tensor of the size of all outputs together.
            gathered = self._model.all_gather(self._on_device(tensor.reshape(1, -1)), pin_layout=False)
            self._xla.sync()
            for output, row in zip(outputs, gathered.to(tensor.device), strict=True):
                output.copy_(row.view(tensor.shape))
        return DONE

    def _reduced(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        ops = {"sum": self._model.REDUCE_SUM, "min": self._model.REDUCE_MIN, "max": self._model.REDUCE_MAX}
        result = self._model.all_reduce(ops[op], self._on_device(tensor))
        self._xla.sync()
        return result.to(tensor.device)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the XLA device, in a dtype that every device can add, after all pending work has run."""
        carried = tensor.detach().to(_WIDER.get(tensor.dtype, tensor.dtype), copy=True).to(self._xla.device())
        self._xla.sync()
        return carried
