"""Names and numbers in the arguments of a trainer and its callbacks: :func:`check_kinds`, :func:`accelerator_of`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import torch

_NUMBERS: dict[str, tuple[int | None, str]] = {
    "devices": (1, "a number of processes, or 'auto', and choose GPUs by CUDA_VISIBLE_DEVICES"),
    "num_nodes": (1, "a whole number from 1"),
    "max_epochs": (0, "a whole number, or None for no limit"),
    "max_steps": (0, "a whole number, or None for no limit"),
    "accumulate_grad_batches": (1, "a whole number from 1"),
    "seed": (None, "a whole number, or None to draw one"),
    "save_top_k": (-1, "a whole number, or -1 for all"),
    "every_n_train_steps": (1, "a whole number from 1, or None for epochs"),
}
"""For each argument its smallest value, and a description, which also says whether ``None`` is a value."""


REST = "For Lightning's other names, train with its Trainer and strategy='join' of joinables.integrations.lightning"


def lacking(holder: object, name: str, owner: type) -> AttributeError:
    """Return the error for an attribute that an object of a class derived from ``owner`` lacks."""
    kind, names = type(holder).__name__, (*vars(owner), *vars(holder))
    known = ", ".join(each for each in names if not each.startswith(("_", "on_")))
    is_moved = name in ("all_gather", "reduce")
    others = f"Call self.trainer.strategy.{name}" if is_moved else f"{owner.__name__} has {known}"
    return AttributeError(f"{kind} has no attribute {name!r}. {others}. {REST}. [J870]")


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise an error for the first argument of a wrong type, or out of range.

    Args:
        arguments: The arguments by name, and other variables, which are not checked.

    Raises:
        TypeError: If it has a wrong type.
        ValueError: If it is too small.
    """
    for name, (least, kind) in _NUMBERS.items():
        if name not in arguments or (arguments[name] in (None, "auto") and str(arguments[name]) in kind):
            continue
        value = arguments[name]
        is_number = not isinstance(value, bool) and isinstance(value, Integral)
        if not is_number or (least is not None and value < least):
            error = ValueError if is_number else TypeError
            raise error(f"{name}={value!r} has a wrong type or is out of range. Pass {kind}. [J741]")


def listed(argument: Any) -> list[Any]:
    """Return the objects of an argument, which may be one, several, or ``None`` or ``False`` for none."""
    if isinstance(argument, (list, tuple)):
        return list(cast("Sequence[Any]", argument))
    return [] if argument is None or argument is False else [argument]


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Raise a ``ValueError`` unless ``value`` is one of ``known``."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(known)}. [J166]")


def accelerator_of(name: str) -> str:
    """Return the device type that an argument ``accelerator=`` names: ``"cpu"``, or torch's name of the accelerator.

    The accelerator is not initialised: a process that has used its GPU cannot be forked and use the GPU again. Counting
    the devices is not a use, but ``torch.cuda.is_available`` is.

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
