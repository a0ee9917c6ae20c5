"""Names and kinds of the arguments of a trainer and its callbacks: :func:`check_kinds`, :func:`check_choice`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

_KINDS: dict[str, tuple[Any, float | None, str]] = {
    "num_nodes": (Integral, 1, "a whole number from 1"),
    "max_epochs": (Integral, -1, "a whole number, or -1 or None for no limit"),
    "max_steps": (Integral, -1, "a whole number, or -1 or None for no limit"),
    "accumulate_grad_batches": (Integral, 1, "a whole number from 1"),
    "gradient_clip_val": (Real, math.ulp(0.0), "a positive number, or None for no clipping"),
    "log_every_n_steps": (Integral, 0, "a whole number, or 0 for no values of single steps"),
    "enable_progress_bar": (bool, None, "True, False or None"),
    "default_root_dir": ((str, os.PathLike), None, "the path of a folder, or None for the current directory"),
    "seed": (Integral, None, "a whole number, or None to draw one"),
    "save_top_k": (Integral, -1, "a whole number, or -1 for all"),
    "every_n_epochs": (Integral, 1, "a whole number from 1"),
    "every_n_train_steps": (Integral, 1, "a whole number from 1, or None for epochs"),
    "patience": (Integral, 0, "a whole number from 0"),
    "min_delta": (Real, 0, "a number from 0"),
}
"""For each argument its types, its smallest value, and a description, which also says whether ``None`` is a value."""


REST = (
    "For the rest of Lightning's names, train with Lightning's Trainer and strategy='join' of"
    " joinables.integrations.lightning"
)


def lacking(kind: str, name: str, owner: type) -> AttributeError:
    """Return the error for an attribute that an object of the class ``kind``, derived from ``owner``, lacks."""
    known = ", ".join(each for each in vars(owner) if not each.startswith(("_", "on_")))
    return AttributeError(f"{kind} has no attribute {name!r}. {owner.__name__} has {known}. {REST}. [J870]")


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise an error for the first argument of a wrong type, or out of range.

    Args:
        arguments: The arguments by name, and other variables, which are not checked.

    Raises:
        TypeError: If it has a wrong type.
        ValueError: If it is too small.
    """
    for name, (types, least, kind) in _KINDS.items():
        if name not in arguments or (arguments[name] is None and "None" in kind):
            continue
        value = arguments[name]
        is_of_type = isinstance(value, types) and isinstance(value, bool) == (types is bool)
        if not is_of_type or (least is not None and not value >= least):
            error = ValueError if is_of_type else TypeError
            raise error(f"{name}={value!r} has a wrong type or is out of range. Pass {kind}. [J741]")


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Raise a ``ValueError`` unless ``value`` is one of ``known``."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(known)}. [J166]")
