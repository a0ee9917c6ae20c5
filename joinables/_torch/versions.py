"""Differences between versions of torch, with one function for each, and the error for an unsupported version.

Each function says which versions it is for. Remove a function once the oldest of its versions is no longer supported.
"""

# Private names are missing from torch's type stubs, or have no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

SUPPORTED = "2.8 to 2.15"
"""Oldest and newest version with which the tests run. ``docs/support.md`` lists the tests."""


# -- required attributes --------------------------------------------------------------------------------------------


def require(needed: Mapping[str, Sequence[str]]) -> None:
    """Raise an error that names the required attributes that this torch lacks.

    Args:
        needed: The attributes of modules and classes by their owner. The owner is written as for
            :func:`pkgutil.resolve_name`: ``"module:name"``.

    Raises:
        ImportError: With the missing attributes and the supported versions.
    """
    missing: list[str] = []
    for owner, names in needed.items():
        try:
            resolved = pkgutil.resolve_name(owner if ":" in owner else f"{owner}:")
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not f"{error.name}.".startswith("torch."):
                raise  # torch has the module, which imports a package that is not installed
            missing.append(owner.replace(":", "."))
        else:
            missing += [f"{owner.replace(':', '.')}.{name}" for name in names if not hasattr(resolved, name)]
    _raise_if_any(missing)


def require_of(obj: object, names: Sequence[str]) -> None:
    """Raise the error of :func:`require` for attributes that an object lacks. ``"a|b"`` requires one of two."""
    choices = [name.split("|") for name in names]
    _raise_if_any(
        [f"{type(obj).__name__}.{choice[0]}" for choice in choices if not any(hasattr(obj, name) for name in choice)]
    )


def _raise_if_any(missing: Sequence[str]) -> None:
    if missing:
        raise ImportError(
            f"joinables needs {', '.join(missing)}, which torch {torch.__version__} does not have. Install torch"
            f" {SUPPORTED}. [J103]"
        )


# -- DistributedDataParallel ----------------------------------------------------------------------------------------


def forward_sync_buffers(ddp: DistributedDataParallel) -> bool:
    """Return whether forwards broadcast buffers.

    The attribute is ``forward_sync_buffers``, or ``broadcast_buffers`` up to torch 2.12.
    """
    settings = vars(ddp)  # both are plain attributes, and Module.__getattr__ is slow for a missing one
    return bool(settings["forward_sync_buffers" if "forward_sync_buffers" in settings else "broadcast_buffers"])
