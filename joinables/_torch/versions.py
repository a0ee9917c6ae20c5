"""What the versions of torch differ in, one function for each difference, and the error for those that lack something.

Each function says which versions it is for. Where the oldest of them is no longer supported, it goes.
"""

# What is private is not in torch's type stubs, or has no types there.
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
"""The oldest and the newest version that tests are run with: ``docs/versions.md`` says which tests."""


# -- what must be there ---------------------------------------------------------------------------------------------


def require(needed: Mapping[str, Sequence[str]]) -> None:
    """Raise an error that names what this torch lacks.

    Args:
        needed: attributes of modules and classes by their owner, which is written as :func:`pkgutil.resolve_name` takes
            it: ``"module:name"``.

    Raises:
        ImportError: in one sentence, also with the versions that work.
    """
    missing: list[str] = []
    for owner, names in needed.items():
        try:
            resolved = pkgutil.resolve_name(owner)
        except (ImportError, AttributeError):
            missing.append(owner.replace(":", "."))
        else:
            missing += [f"{owner.replace(':', '.')}.{name}" for name in names if not hasattr(resolved, name)]
    _raise_if_any(missing)


def require_of(obj: object, names: Sequence[str]) -> None:
    """Raise the same error for attributes that an object lacks; ``"a|b"`` stands for one of two."""
    choices = [name.split("|") for name in names]
    _raise_if_any(
        [f"{type(obj).__name__}.{choice[0]}" for choice in choices if not any(hasattr(obj, name) for name in choice)]
    )


def _raise_if_any(missing: Sequence[str]) -> None:
    if missing:
        raise ImportError(
            f"joinables needs {', '.join(missing)}, which torch {torch.__version__} does not have;"
            f" install one of torch {SUPPORTED} [J103]"
        )


# -- DistributedDataParallel ----------------------------------------------------------------------------------------


def forward_sync_buffers(ddp: DistributedDataParallel) -> bool:
    """``ddp.forward_sync_buffers``, whether forwards broadcast buffers: ``broadcast_buffers`` up to torch 2.12."""
    settings = vars(ddp)  # both are plain attributes; where one is missing, Module.__getattr__ costs more
    return bool(settings["forward_sync_buffers" if "forward_sync_buffers" in settings else "broadcast_buffers"])
