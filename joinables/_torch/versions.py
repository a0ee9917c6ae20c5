"""What the versions of torch differ in, one function for each difference, and the error for those that lack something.

Each function says which versions it is for. Where the oldest of them is no longer supported, it goes.
"""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import dis
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


# -- fully_shard ----------------------------------------------------------------------------------------------------


def param_groups(state: Any) -> Iterable[Any]:
    """The groups of parameters of an ``FSDPState``. Up to torch 2.10 it has one or none, later on a list."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


_SHARD = "torch.distributed.fsdp._fully_shard"
NEEDED_TO_RESET = {
    f"{_SHARD}._fsdp_common:TrainingState": ("IDLE",),
    f"{_SHARD}._fsdp_param_group:FSDPCommContext": (
        "all_gather_state",
        "post_forward_order",
        "reduce_scatter_state|reduce_scatter_states",
    ),
    f"{_SHARD}._fsdp_param_group:FSDPParamGroup": (
        "_partial_reduce_output",
        "_reshard_after_forward_event",
        "_to_sharded",
        "_training_state",
        "_wait_all_gather_streams_on_event",
        "finalize_backward",
    ),
    f"{_SHARD}._fsdp_state:FSDPState": (
        "_comm_ctx",
        "_device_handle",
        "_modules_to_run_forward",
        "_state_ctx",
        "_training_state",
    ),
    f"{_SHARD}._fsdp_state:FSDPStateContext": (
        "all_states",
        "iter_forward_root",
        "post_backward_final_callback_queued",
    ),
}
"""What :func:`reset_iter_state` needs before 2.13."""


def reset_iter_state(module: Any) -> None:
    """``FSDPModule.reset_iter_state`` of a root module, which torch has from 2.13 on. Before, the same by hand."""
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return
    root = module._get_fsdp_state()
    stream, context, shared = root._device_handle.current_stream(), root._comm_ctx, root._state_ctx
    for state in (context.all_gather_state, *_take_reduce_scatter_states(context)):
        if state is not None and state.event is not None:
            stream.wait_event(state.event)
    context.all_gather_state = None
    context.post_forward_order.clear()
    for state in shared.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in param_groups(state):
            group.finalize_backward()  # waits for what is under way
            group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _take_reduce_scatter_states(context: Any) -> list[Any]:
    """What keeps reduce-scatters that are under way alive, which goes: one in torch 2.8 to 2.10, a list in 2.12."""
    if hasattr(context, "reduce_scatter_states"):
        found = list(context.reduce_scatter_states)
        context.reduce_scatter_states.clear()
        return found
    found, context.reduce_scatter_state = [context.reduce_scatter_state], None
    return found
