"""The accelerator of this machine, asked in ways that leave it alone.

A process that has used its GPU cannot be forked and use it once more, and to ask torch whether there is one
(``torch.cuda.is_available``) is a use; to count them is none.
"""

from __future__ import annotations

from typing import Any

import torch


def accelerator_of(name: str) -> str:
    """The type of the device that an argument ``accelerator=`` means: ``"cpu"``, or what torch calls it.

    Args:
        name: ``"cpu"``, the type of an accelerator, ``"gpu"`` for whatever there is, or ``"auto"`` for that or the CPU.

    Raises:
        ValueError: if this machine has no such device.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.device_count() else None
    meant = {"cpu": "cpu", "auto": "cpu"}
    if device is not None:
        meant |= dict.fromkeys(("auto", "gpu", device.type), device.type)
    if name not in meant:
        raise ValueError(f"accelerator={name!r}, and torch finds no such device here; use {' or '.join(meant)} [J169]")
    return meant[name]


def used_accelerator() -> Any:
    """Torch's module of the accelerator, such as ``torch.cuda``, if this process has used one; else ``None``."""
    device = torch.accelerator.current_accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    return module if module is not None and module.is_initialized() else None
