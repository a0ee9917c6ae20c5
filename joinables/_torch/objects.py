"""Private APIs of torch.compile, loaders, optimizers and torch's ``Join`` that this package calls.

A docstring says what the private API replaces: a public API that torch lacks, or that is too slow.
"""

# Private names are missing from torch's type stubs, or have no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import _JoinConfig as TorchJoinConfig
from torch.utils.data import DataLoader

from joinables._torch.versions import require, require_of

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

# -- torch.compile ----------------------------------------------------------------------------------------------------


def compiled_from(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that ``torch.compile`` made ``module`` from, or ``None``.

    Replaces its class, which is slow to import.
    """
    return getattr(module, "_orig_mod", None)


# -- modules ----------------------------------------------------------------------------------------------------------


def is_replicated(module: torch.nn.Module) -> bool:
    """Return whether ``replicate`` has added a hidden DDP module to ``module``.

    Replaces its import, which is private and slow.
    """
    return any(cls.__module__ == "torch.distributed._composable.replicate" for cls in type(module).__mro__)


# -- DataLoader -------------------------------------------------------------------------------------------------------

LoaderT = TypeVar("LoaderT", bound=DataLoader[Any])


def with_parts(loader: LoaderT, **parts: Any) -> LoaderT:
    """Return a copy of a loader of any class with other parts, such as another ``sampler``.

    Replaces an assignment, which ``DataLoader`` forbids. The original keeps its persistent workers.
    """
    copied = copy.copy(loader)
    vars(copied).update(parts, _iterator=None)
    return copied


# -- optimizers -------------------------------------------------------------------------------------------------------


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as stepped for its schedulers, after it has loaded the state of a stepped one.

    Replaces the step itself.
    """
    vars(optimizer).update(_opt_called=True)


def run_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Have the step of an optimizer run its hooks, if its class does not call the constructor of its base.

    Replaces that constructor, which makes the hooks and wraps ``step``.
    """
    step: Any = optimizer.step
    if getattr(step, "hooked", False) or getattr(type(optimizer).step, "hooked", False):
        return
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(optimizer).setdefault(name, OrderedDict())

    @wraps(step)
    def unbound(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    vars(unbound).update(hooked=True)
    # A scheduler that is built later needs a method.
    vars(optimizer).update(step=MethodType(torch.optim.Optimizer.profile_hook_step(unbound), optimizer))


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scheduler of torch was built for an optimizer, whose ``step`` it then marks.

    Replaces a list of schedulers in the optimizer.
    """
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks can be registered on an optimizer; not if it skips the constructor of its base class.

    Replaces an attempt to register a hook.
    """
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def zero_redundancy_optimizer() -> type[ZeroRedundancyOptimizer]:
    """Return the class ``ZeroRedundancyOptimizer``.

    Replaces an import at module level, which would be slow for all users and warn about ``torch.jit.script``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.(script|interface)` is ", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    require({"torch.distributed.optim:ZeroRedundancyOptimizer": ("_sync_params",)})
    return ZeroRedundancyOptimizer


def overlaps_with_ddp(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Return whether the optimizer was built with ``overlap_with_ddp=True``."""
    return optimizer._overlap_with_ddp


def broadcast_shards(optimizer: ZeroRedundancyOptimizer) -> None:
    """Run the collectives of a step without the step. Replaces the rest of a step that raised half-way."""
    optimizer._sync_params()


# -- FSDP -------------------------------------------------------------------------------------------------------------


def fsdp1_groups(module: Any) -> list[Any]:
    """Return the process group that shares the parameters of an FSDP1 module, and the group of its replicas, if any.

    Replaces the public ``process_group``, which consists of one replica's ranks.
    """
    return [module.process_group, *filter(None, [getattr(module, "_inter_node_pg", None)])]


def reducers_of(part: Any) -> list[Any]:
    """Return the objects with the settings of how a module of FSDP reduces gradients; replaces getters.

    FSDP1 has them on the module. ``fully_shard`` has them on groups of parameters, one for a module up to torch 2.10.
    """
    state = part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else part
    require_of(state, ("_fsdp_param_groups|_fsdp_param_group|_comm_hook",))
    return getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", part)]


def reduces(reducer: Any) -> bool:
    """Return whether one of these objects reduces the gradients of the next backward over all ranks.

    Replaces a getter for FSDP1's ``no_sync``, and for the setters of ``fully_shard``.
    """
    return all(getattr(reducer, name, True) for name in ("_sync_gradients", "reduce_grads", "all_reduce_grads"))


def divisors_of(reducer: Any) -> list[Any]:
    """Return the numbers by which one of these objects divides the sums of gradients over ranks.

    ``None`` is the number of ranks. A text is the name of the user's own code, which may divide by any number. Replaces
    a getter for ``set_gradient_divide_factor`` and other setters.
    """
    divisors: list[Any] = [getattr(reducer, "gradient_divide_factor", None)]
    for name in ("_comm_hook", "_all_reduce_hook", "_reduce_scatter_comm"):
        code = getattr(reducer, name, None)
        if code is not None and not code.__module__.startswith("torch."):
            divisors.append(getattr(code, "__name__", type(code).__name__))
    return divisors


# -- torch's own Join -------------------------------------------------------------------------------------------------

is_in_torch_join: Callable[[Any], bool] = attrgetter("_join_config.enable")
"""Return whether torch's own ``Join`` is around a module or optimizer. Replaces its ``_join_config``."""

_routes: dict[int, Callable[[], Any]] = {}  # by the id of the joinable
_original: Callable[[Any], Any] = TorchJoin.notify_join_context  # the method that is replaced while routes exist
_lock = threading.Lock()


@contextmanager
def routed_notifications(joinable: Any, notify: Callable[[], Any], *, first: bool) -> Generator[None]:
    """Route ``Join.notify_join_context(self)`` of a torch ``Joinable`` to ``notify`` for the duration of a context.

    Replaces a hook in torch's ``Join``, whose static method is replaced as long as such a context is open. Calls for
    other objects reach the original method. Both the method and the object's ``_join_config`` are restored.
    """
    global _original
    config = joinable._join_config
    with _lock:
        if not _routes:  # the last route restores the method
            _original = TorchJoin.notify_join_context
            TorchJoin.notify_join_context = staticmethod(_notify_join_context)
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


def _notify_join_context(obj: Any) -> Any:
    notify = _routes.get(id(obj))
    return _original(obj) if notify is None else notify()
