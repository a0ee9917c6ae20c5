"""Accelerator of this machine, queried in ways that do not initialise it.

A process that has used its GPU cannot be forked and use the GPU again. Counting the devices is not a use, but
``torch.cuda.is_available`` is.
"""

from __future__ import annotations

import torch


def accelerator_of(name: str) -> str:
    """Return the device type that an argument ``accelerator=`` names: ``"cpu"``, or torch's name of the accelerator.

    Args:
        name: ``"cpu"``, the type of an accelerator, ``"gpu"`` for any accelerator, or ``"auto"`` for an accelerator if
            there is one, and the CPU otherwise.

    Raises:
        ValueError: If this machine has no such device.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.device_count() else None
    types = {"cpu": "cpu", "auto": "cpu"}
    if device is not None:
        types |= dict.fromkeys(("auto", "gpu", device.type), device.type)
    if name not in types:
        raise ValueError(
            f"accelerator={name!r}, but torch finds no such device here. Use one of {', '.join(types)}. [J169]"
        )
    return types[name]


def release(module: torch.nn.Module, device: torch.device) -> None:
    """Move a module from an accelerator to the CPU, and free the memory that torch keeps for later on the device."""
    if device.type != "cpu":
        module.cpu()
        getattr(torch.get_device_module(device), "empty_cache", lambda: None)()
