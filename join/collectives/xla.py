""":class:`Collective` over PyTorch/XLA: :class:`XLACollective`. Constructing one imports ``torch_xla``.

Its ranks are the processes that ``torch_xla.launch`` has started, one for each device. Tensors may be on the device. If
they are on the CPU, they are copied to the device and back. Devices meet only in equal programs. So each operation is a
program of its own, and all pending work runs before it. A program starts once the one before is done. This is waited
for here, since a rank that waits in XLA does not see that another rank has failed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from join.collectives._torch_private import Aside
from join.collectives.base import Collective, ReduceOp, check_op, put_back, widened
from join.collectives.line import DONE, Work


class XLACollective(Collective):
    """All ranks that PyTorch/XLA has started.

    Raises:
        ImportError: If PyTorch/XLA is not installed.
    """

    def __init__(self) -> None:
        try:
            self._xla: Any = importlib.import_module("torch_xla")
            self._model: Any = importlib.import_module("torch_xla.core.xla_model")
            self._runtime: Any = importlib.import_module("torch_xla.runtime")
        except ImportError as missing:
            raise ImportError(
                "XLACollective needs PyTorch/XLA, which is not installed. Run pip install torch_xla, with the torch of"
                " the same version. [J863]"
            ) from missing

    def place(self) -> tuple[int, int, int]:
        """Return the rank of this process, the number of ranks, and its rank on this machine."""
        return self._runtime.global_ordinal(), self._runtime.world_size(), self._runtime.local_ordinal()

    def device(self) -> torch.device:
        """Return the device of this process."""
        return torch.device(self._xla.device())

    def devices_of_process(self) -> int:
        """Return the number of devices of this process. If there are several, each has a rank, which is a thread."""
        return self._runtime.addressable_device_count()

    @override
    def _connected_as(self) -> tuple[int, int]:
        return self.place()[:2]

    @override
    def setup(self, rank: int, world_size: int) -> None:
        super().setup(rank, world_size)
        self._last: Work = DONE

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        return self._reduce(tensor, widened(tensor), op)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_source(source)
        # A sum with zeros. For xm.collective_broadcast, the receivers multiply their own numbers by zero, and these may
        # be NaN.
        own = widened(tensor)
        return self._reduce(tensor, own if self.rank == source else torch.zeros_like(own), "sum")

    @override
    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        self._check_outputs(tensor, outputs)

        def fill(rows: torch.Tensor) -> None:
            for output, row in zip(outputs, rows, strict=True):
                put_back(output, row.view(output.shape))

        # With pin_layout=True, XLA would all-reduce a tensor of the size of all outputs.
        gather = partial(self._model.all_gather, pin_layout=False)
        return self._run(gather, tensor.detach().reshape(1, -1), fill)

    def _reduce(self, tensor: torch.Tensor, own: torch.Tensor, op: ReduceOp) -> Work:
        kind = {"sum": self._model.REDUCE_SUM, "min": self._model.REDUCE_MIN, "max": self._model.REDUCE_MAX}[op]
        return self._run(partial(self._model.all_reduce, kind), own, partial(put_back, tensor))

    def _run(self, program: Callable[[Any], Any], own: torch.Tensor, then: Callable[[torch.Tensor], None]) -> Work:
        """Run a program on the device, with a copy of ``own``, and pass the result to ``then``."""
        if own.numel() == 0:  # on all ranks
            return DONE
        self.finish(self._last)
        argument = own.to(self._xla.device(), copy=True)
        self._xla.sync()
        result = program(argument)
        self._xla.sync()
        if own.is_cpu:
            self._last = Aside(lambda: then(result.cpu()))
            return self._last
        then(result)
        return DONE
