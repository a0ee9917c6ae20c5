"""What the versions of torch differ in, one function for each difference, and the error for those that lack something.

Each function says which versions it is for. Where the oldest of them is no longer supported, it goes.
"""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import dis
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

SUPPORTED = "2.8 to 2.15"
"""The oldest and the newest version that tests are run with: ``docs/versions.md`` says which tests."""


# -- what must be there ---------------------------------------------------------------------------------------------


def require(needed: Mapping[str, Sequence[str]]) -> None:
    """Raise an error that names what this torch lacks.

    Args:
        needed: attributes of modules, objects and classes by their owner, which is written as
            :func:`pkgutil.resolve_name` takes it: ``"module:name"``. Those of a class may also be set by any of its
            methods. ``"a|b"`` stands for one of two.

    Raises:
        ImportError: in one sentence, also with the versions that work.
    """
    missing = [name for owner, names in needed.items() for name in _missing(owner, names)]
    if missing:
        raise ImportError(
            f"joinables needs {', '.join(missing)}, which torch {torch.__version__} does not have;"
            f" install one of torch {SUPPORTED} [J103]"
        )


def _missing(owner: str, names: Sequence[str]) -> Iterator[str]:
    try:
        found = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        yield owner.replace(":", ".")
        return
    absent = [name.split("|") for name in names if not any(hasattr(found, each) for each in name.split("|"))]
    set_later = _set_by_methods(found, {each for either in absent for each in either})
    for either in absent:
        if set_later.isdisjoint(either):
            yield f"{owner.replace(':', '.')}.{either[0]}"


def _set_by_methods(owner: Any, names: set[str]) -> set[str]:
    """Which of these attributes the methods of a class set. Finding that in their code costs some milliseconds."""
    found = set[str]()
    for method in [method for base in getattr(owner, "__mro__", ()) for method in vars(base).values()]:
        for code in _code_of(method):
            if not (names - found).isdisjoint(code.co_names):
                found |= names & {each.argval for each in dis.Bytecode(code) if each.opname == "STORE_ATTR"}
    return found


def _code_of(function: Any) -> Iterator[CodeType]:
    """The code of a function or method, and of those inside it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    waiting = [getattr(getattr(function, "__func__", function), "__code__", None)]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            yield code
            waiting += code.co_consts


# -- DistributedDataParallel ----------------------------------------------------------------------------------------


def forward_sync_buffers(ddp: DistributedDataParallel) -> bool:
    """``ddp.forward_sync_buffers``, whether forwards broadcast buffers: ``broadcast_buffers`` up to torch 2.12."""
    settings = vars(ddp)  # both are plain attributes; where one is missing, Module.__getattr__ costs more
    return bool(settings["forward_sync_buffers" if "forward_sync_buffers" in settings else "broadcast_buffers"])
