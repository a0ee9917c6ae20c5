"""Every private API of torch.compile, loaders, optimizers and torch's ``Join`` that this package calls.

Each function says what it stands in for.
"""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo import decorators
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import _JoinConfig as TorchJoinConfig
from torch.utils.data import DataLoader

from joinables._torch.versions import require

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

# -- torch.compile ----------------------------------------------------------------------------------------------------

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


# -- DataLoader -------------------------------------------------------------------------------------------------------

LoaderT = TypeVar("LoaderT", bound=DataLoader[Any])


def with_parts(loader: LoaderT, **parts: Any) -> LoaderT:
    """A copy of a loader, whatever its class and constructor, with another ``sampler``, say.

    Stands in for assigning those, which ``DataLoader`` forbids. The original keeps its persistent workers.
    """
    copied = copy.copy(loader)
    vars(copied).update(parts, _iterator=None)
    return copied


# -- optimizers -------------------------------------------------------------------------------------------------------


def has_stepped(target: Any) -> bool:
    """Whether an optimizer has made a step. Stands in for a question that schedulers ask before they warn."""
    return bool(getattr(target, "_opt_called", False))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know that an optimizer is where others have stepped to. Stands in for the step itself."""
    vars(optimizer).update(_opt_called=True)


def zero_redundancy_optimizer() -> type[ZeroRedundancyOptimizer]:
    """The class. Stands in for an import that does not warn of ``torch.jit.script`` and costs only who needs it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.(script|interface)` is ", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    require({"torch.distributed.optim:ZeroRedundancyOptimizer": ("_sync_params",)})
    return ZeroRedundancyOptimizer


def overlaps_with_ddp(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Whether the optimizer was built with ``overlap_with_ddp=True``."""
    return optimizer._overlap_with_ddp


def broadcast_shards(optimizer: ZeroRedundancyOptimizer) -> None:
    """The collectives of a step without the step. Stands in for the rest of a step that raised half-way."""
    optimizer._sync_params()


# -- torch's own Join -------------------------------------------------------------------------------------------------

is_in_torch_join: Callable[[Any], bool] = attrgetter("_join_config.enable")
"""Whether torch's own ``Join`` is around a module or optimizer. Stands in for its ``_join_config``."""

_routes: dict[int, Callable[[], Any]] = {}  # by the id of the joinable
_original: Callable[[Any], Any] = TorchJoin.notify_join_context  # while there are routes: what is replaced
_lock = threading.Lock()


@contextmanager
def routed_notifications(joinable: Any, notify: Callable[[], Any], *, first: bool) -> Generator[None]:
    """Send a torch ``Joinable``'s ``Join.notify_join_context(self)`` to ``notify`` while the context is open.

    Stands in for a hook in torch's ``Join``: its static method is replaced while any such context is open, calls for
    other objects pass through, and both the method and the object's ``_join_config`` are put back.
    """
    config = joinable._join_config
    with _lock:
        if not _routes:
            _replace_method()  # which is put back with the last route, whichever that is
        _routes[id(joinable)] = notify
    joinable._join_config = TorchJoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=first)
    try:
        yield
    finally:
        joinable._join_config = config
        with _lock:
            del _routes[id(joinable)]
            if not _routes:
                TorchJoin.notify_join_context = staticmethod(_original)


def _replace_method() -> None:
    global _original
    _original = TorchJoin.notify_join_context
    TorchJoin.notify_join_context = staticmethod(_notify_join_context)


def _notify_join_context(obj: Any) -> Any:
    notify = _routes.get(id(obj))
    return _original(obj) if notify is None else notify()
