"""Number formats: :class:`Precision`, from the names that ``Trainer(precision=)`` takes."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from join.batch import map_tensors

_NAMES = {
    "32": "32", "32-true": "32", "64": "64", "64-true": "64", "bf16": "bf16-mixed", "bf16-mixed": "bf16-mixed",
    "16": "16-mixed", "16-mixed": "16-mixed",
}  # fmt: skip


class Precision:
    """The formats in which a run keeps and computes floating-point numbers.

    Args:
        precision: ``32``; ``64``, which makes the module and its batches double, for good; ``"bf16-mixed"``, autocast;
            ``"16-mixed"``, autocast with a ``GradScaler``.
        device: the device's type.
    """

    def __init__(self, precision: int | str, device: str) -> None:
        name = _NAMES.get(str(precision))
        if name is None:
            raise ValueError(f"precision={precision!r} is unknown; use 32, 64, 'bf16-mixed' or '16-mixed' [J256]")
        self.name, self._device = name, device

    @property
    def scales_loss(self) -> bool:
        """Whether gradients need a ``GradScaler``."""
        return self.name == "16-mixed"

    def convert_module(self, module: torch.nn.Module) -> None:
        """Convert the module's parameters and buffers, in place; for 64 only."""
        if self.name == "64":
            module.double()

    def convert_batch(self, batch: Any) -> Any:
        """The batch with its floating-point tensors converted as the module's are."""
        if self.name != "64":
            return batch
        return map_tensors(lambda x: x.double() if x.is_floating_point() else x, batch)

    def forward_context(self) -> AbstractContextManager[object]:
        """The context for a forward: autocast for mixed precision."""
        if self.name in ("32", "64"):
            return contextlib.nullcontext()
        return torch.autocast(self._device, torch.bfloat16 if self.name == "bf16-mixed" else torch.float16)
