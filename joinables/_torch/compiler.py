"""Every private API of ``torch.compile`` that this package calls, each with what it stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo import decorators

F = TypeVar("F", bound=Callable[..., Any])


def compiled_from(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that ``torch.compile`` made this one from. Stands in for its class, which is costly to import."""
    return getattr(module, "_orig_mod", None)


compiler_under_way: Callable[[], object] = eval_frame.get_eval_frame_callback
"""The callback of ``torch.compile`` that is active, or None. Stands in for the slow ``torch.compiler.disable``."""


def not_compiled(function: F) -> F:
    """Leave a function uncompiled, but not what it calls. Stands in for the slow ``torch.compiler.disable``."""
    return cast("F", decorators.skip(function))


def _run(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


call_uncompiled: Callable[..., Any] = torch.compiler.disable(_run)
"""Calls a function and leaves it uncompiled, with all that it calls. Costly, also where nothing is compiled."""
