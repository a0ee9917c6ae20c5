"""Private APIs of ``DistributedDataParallel`` that this package calls.

A docstring says what the private API replaces: a public API that torch lacks, or that is too slow.
"""

# Private names are missing from torch's type stubs, or have no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter, is_, methodcaller
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import transfer
from join.collectives._torch_private import thawed
from joinables._torch.versions import forward_sync_buffers, require_of

ATTRIBUTES = (
    "_comm_hooks",
    "_has_rebuilt_buckets",
    "_module_parameters",
    "find_unused_parameters",
    "forward_sync_buffers|broadcast_buffers",
    "modules_buffers",
    "parameters_to_ignore",
    "reducer",
    "require_forward_param_sync",
    "static_graph",
)
"""Attributes that the constructor sets. They are checked on each module, since tools wrap the constructor in their own.
"""


ARGUMENTS = {
    "_use_python_reducer": "torch._dynamo.config.optimize_ddp='python_reducer'",
    "_delay_all_reduce_params": "delay_all_reduce_named_params",
    "skip_all_reduce_unused_params": "skip_all_reduce_unused_params",
    "mixed_precision": "mixed_precision",
}
"""Arguments of the constructor that are not supported, by the attribute that they set."""
NO_MEANS = ("ddp_zero_hook", "debugging_hooks", "optimizer_overlap_hooks", "post_localSGD_hook")
"""Modules of torch's comm hooks that leave no mean over ranks in the gradients, or step an optimizer."""

_MORE_OFTEN = "training graph has changed"  # in the reducer's error about a gradient that arrives too often


def check(ddp: DistributedDataParallel) -> None:
    """Raise an ``ImportError`` if the module lacks an attribute that this package uses."""
    require_of(ddp, ATTRIBUTES)


def unsupported(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the arguments and comm hooks of the module that are not supported.

    A hook of torch may wrap another one, so the state that it shares with that one counts, too. Optimizers that
    ``_apply_optimizer_in_backward`` made register their hook in the first forward. Replaces queries for all of these.
    """
    found = [name for attribute, name in ARGUMENTS.items() if vars(ddp).get(attribute)]
    for hook, state in vars(ddp).get("_comm_hooks", ()):
        found += [part.__name__ for part in (hook, type(state)) if part.__module__.rpartition(".")[2] in NO_MEANS]
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters(ddp)):
        found.append("_apply_optimizer_in_backward")
    return found


# -- DistributedDataParallel: forward -------------------------------------------------------------------------------


def is_in_forward(ddp: DistributedDataParallel) -> bool:
    """Return whether ``ddp``'s forward is calling the inner module. Replaces a notification of the caller."""
    return DistributedDataParallel._get_active_ddp_module() is ddp


# -- DistributedDataParallel: buffers -------------------------------------------------------------------------------


def broadcasts_buffers(ddp: DistributedDataParallel) -> bool:
    """Return whether synchronised forwards broadcast buffers. Replaces ``broadcast_buffers`` and a count."""
    ddp._assign_modules_buffers()
    return forward_sync_buffers(ddp) and len(ddp.modules_buffers) > 0


def has_buffer_hook(ddp: DistributedDataParallel) -> bool:
    """Return whether the user registered a buffer comm hook."""
    return hasattr(ddp, "buffer_hook")


def syncs_buffers_after_forward(ddp: DistributedDataParallel) -> bool:
    """Return whether the user registered a buffer comm hook that runs after the forward pass."""
    return has_buffer_hook(ddp) and ddp.buffer_hook.buffer_comm_hook_location.name == "POST_FORWARD"


@torch.no_grad()
def sync_buffers(ddp: DistributedDataParallel, source: int) -> None:
    """Broadcast buffers from rank ``source`` of the group, or run the user's buffer comm hook.

    Replaces ``DistributedDataParallel._sync_buffers``, which always broadcasts from rank 0. Buffers may have been
    reassigned since the last call. Their version counters are preserved because autograd may have saved them.
    """
    ddp._assign_modules_buffers()
    with torch.autograd._unsafe_preserve_version_counter(tuple(ddp.modules_buffers)):
        ddp._sync_module_buffers(source)


@torch.no_grad()
def set_tensors(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Set buffers and parameters to new values in place.

    A buffer whose shape has changed, such as a cache of masks that a forward has enlarged, is replaced. The version
    counters of tensors are preserved because autograd may have saved them.
    """
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    same = [name for name, value in values.items() if name in held and held[name].shape == value.shape]
    with torch.autograd._unsafe_preserve_version_counter(tuple(held[name] for name in same)):
        for name in same:
            held[name].copy_(values[name])
    for name in values.keys() - set(same):
        owner, _, last = name.rpartition(".")
        if last in (places := module.get_submodule(owner)._buffers):
            places[last] = values[name]


def suppress_buffer_sync(ddp: DistributedDataParallel) -> None:
    """Prevent the next forward from synchronising buffers. Replaces a switch that DDP lacks."""
    vars(ddp)["require_forward_param_sync"] = False  # a plain attribute; Module.__setattr__ takes ten times as long


# -- DistributedDataParallel: gradients -----------------------------------------------------------------------------


def parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters that DDP synchronises, in an order that is equal on all ranks.

    Replaces ``ddp.module.parameters()`` without ``parameters_to_ignore``. A tensor-parallel module whose parameters are
    spread over ranks no longer has them as parameters once its first forward has run.
    """
    return list(ddp._module_parameters)


def held_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a module, those that several of its parts hold more than once.

    Replaces ``module.parameters()``, which takes three times as long.
    """
    return [each for part in module.modules() for each in part._parameters.values() if each is not None]


def parameters_of_each_rank(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters that DDP ignores, so that each rank has its own."""
    held, synchronised = held_parameters(ddp.module), ddp._module_parameters
    if len(held) == len(synchronised) and all(map(is_, held, synchronised)):  # the usual case; a set takes long
        return []
    of_all = set(map(id, synchronised))
    return [parameter for parameter in held if id(parameter) not in of_all]


def parameters_beyond(ddp: DistributedDataParallel, reduced: Container[int]) -> list[torch.nn.Parameter]:
    """Return the parameters that can ever have a gradient, are not in ``reduced`` and are not ignored by DDP.

    Args:
        ddp: The module.
        reduced: The ids of parameters.
    """
    held = [each for each in held_parameters(ddp.module) if id(each) not in reduced]
    ignored = cast("set[str]", ddp.parameters_to_ignore)
    own = {id(each) for name, each in ddp.module.named_parameters() if name in ignored} if ignored else set[int]()
    found = [each for each in held if id(each) not in own and not each.is_inference()]
    return [each for each in found if each.is_floating_point() or each.is_complex()]


@torch.no_grad()
def broadcast(ddp: DistributedDataParallel, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Overwrite ``tensors`` in place with the tensors of rank ``source`` of the module's process group.

    Replaces a broadcast of each tensor, or a Python object for each. ``_distributed_broadcast_coalesced`` takes twice
    as long for many small tensors, and thousands of new objects make the garbage collector search all others. The extra
    memory is one chunk of 64 MiB.

    Args:
        ddp: The module.
        tensors: Parameters of the module, or gradients: of the same shapes and dtypes on all ranks.
        source: The rank whose tensors are sent.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    full = list(filter(torch.Tensor.numel, tensors))
    for tensor, kind in zip(full, map(attrgetter("dtype", "device"), full), strict=True):
        alike[kind].append(tensor)
    group = cast("dist.ProcessGroup", ddp.process_group)
    for (dtype, device), those in alike.items():
        sizes = list(map(torch.Tensor.numel, those))
        begins, begin = list(accumulate(sizes, initial=0)), 0
        while begin < len(those):
            end = max(bisect_right(begins, begins[begin] + transfer.CHUNK_BYTES // dtype.itemsize) - 1, begin + 1)
            chunk = those[begin:end]
            if dist.get_rank(group) == source:
                dist.broadcast(torch._utils._flatten_dense_tensors(chunk), group=group, group_src=source)
            else:
                flat = torch.empty(begins[end] - begins[begin], dtype=dtype, device=device)
                dist.broadcast(flat, group=group, group_src=source)
                rows = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in chunk]
                torch.split_with_sizes_copy(flat, sizes[begin:end], out=rows)
                for tensor, row in zip(chunk, rows, strict=True):
                    if row is not tensor and not tensor.is_contiguous():  # so that its row is a copy
                        tensor.copy_(row.view(tensor.shape))
            begin = end


def buffers(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return the buffers that DDP synchronises, by name."""
    ignored = cast("set[str]", ddp.parameters_to_ignore)
    return {name: buffer for name, buffer in ddp.module.named_buffers() if name not in ignored}


def buffer_places(ddp: DistributedDataParallel) -> dict[str, tuple[dict[str, torch.Tensor | None], str]]:
    """Return the place of each buffer that DDP synchronises: the dictionary that the module reads, and the key.

    Replaces ``named_buffers()``, which takes ten times as long.
    """
    parts = {name: name.rpartition(".") for name in buffers(ddp)}
    return {name: (ddp.module.get_submodule(owner)._buffers, last) for name, (owner, _, last) in parts.items()}


def reduced_parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters in the reducer's order, without parameters that were frozen when the module was wrapped."""
    synchronised = parameters(ddp)
    if ddp._get_ddp_logging_data().get("num_parameter_tensors") == len(synchronised):
        return synchronised
    try:
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # one of the buckets is sparse, and the block is refused
        return synchronised
    reduced = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return [parameter for parameter in synchronised if id(parameter) in reduced]


def expect_backward(ddp: DistributedDataParallel, outputs: Sequence[torch.Tensor]) -> None:
    """Make the reducer reduce the gradients of the next backward pass.

    Replaces the last part of a synchronised forward. A second backward through one forward needs it.
    """
    find_unused = ddp.find_unused_parameters and not ddp.static_graph
    ddp.reducer.prepare_for_backward(list(outputs) if find_unused else [])


check_finished: Callable[[Any], None] = methodcaller("_check_reducer_finalized")
"""Raise a ``RuntimeError`` unless a reducer has reduced all expected gradients.

Replaces the check that DDP makes in its next forward, which the last backward lacks.
"""


def has_finished(ddp: DistributedDataParallel) -> bool:
    """Return whether the reducer has reduced all expected gradients."""
    try:
        check_finished(ddp.reducer)
    except RuntimeError:
        return False
    return True


def first_static_backward(ddp: DistributedDataParallel) -> bool:
    """Return whether no gradient has entered an output of a module with ``static_graph`` yet.

    In the first backward, the reducer counts how often the gradient of each parameter arrives, and reduces everything
    at the end.
    """
    return not ddp._static_graph_delay_allreduce_enqueued


def shadow_backward(ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Run the reducer through a backward pass in which no gradient arrives, and wait for its collectives.

    Replaces a backward of a model without data. The reducer's own hook is called for every parameter inside an
    otherwise empty backward pass, so buckets, comm hooks, used maps, views and divisors are handled by the reducer
    itself. The ``grad`` of a parameter is contributed, or nothing if it is ``None``. The result is in ``grad``
    afterwards.

    Args:
        ddp: The module.
        parameters: The result of :func:`reduced_parameters`. Without any, the collectives run on zeros, and nothing is
            done for each parameter. The buckets must have been rebuilt, and no record of used parameters be reduced.
    """
    if not parameters:
        ddp._match_all_reduce_for_bwd_pass()
        return
    reducer = ddp.reducer

    def arrive(gradient: torch.Tensor) -> None:
        for index in reversed(range(len(parameters))):  # about the order of a real backward, so buckets fill in order
            reducer._autograd_hook(index) if not ddp.static_graph else arrive_often(index)

    def arrive_often(index: int) -> None:
        try:
            while True:  # the reducer raises an error if the gradient arrives once more than in the static graph
                reducer._autograd_hook(index)
        except RuntimeError as error:
            if _MORE_OFTEN not in str(error):
                raise

    with torch.enable_grad():
        reducer.prepare_for_forward()
        expect_backward(ddp, _reaching(parameters) if ddp.find_unused_parameters else [])
        start = torch.zeros((), requires_grad=True, device=parameters[0].device)
        start.register_hook(arrive)
        start.clone().backward()


def _reaching(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return outputs that reach all parameters, frozen or not, for ``find_unused_parameters``; none runs backward."""
    with thawed(parameters):
        return [parameter.view_as(parameter) for parameter in parameters]


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Return whether gradients pass through a comm hook, the user's or one of torch's. Replaces a query."""
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))


def have_hooks(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether a hook is called when a gradient has been added to ``grad``. Replaces a query."""
    return any(map(attrgetter("_post_accumulate_grad_hooks"), parameters))


def hooks_remember(ddp: DistributedDataParallel) -> bool:
    """Return whether a comm hook may add parts of earlier gradients that it had not sent, as PowerSGD's hooks do.

    Replaces a query of ``ddp._comm_hooks``, a list of hooks and their states. Hooks without a state have the process
    group.
    """
    states = [state for _, state in cast("Any", ddp)._comm_hooks]
    return any(state is not None and not isinstance(state, dist.ProcessGroup) for state in states)


def forget_use(ddp: DistributedDataParallel) -> None:
    """Forget which parameters earlier backwards under ``no_sync`` used, because their gradients are gone.

    Replaces a notification of the reducer by ``zero_grad``. With ``find_unused_parameters``, the reducer remembers the
    use until the next reduction, and treats a missing gradient of a used parameter as an internal fault. The reset also
    clears the record that buckets were rebuilt. With ``find_unused_parameters`` they are never rebuilt, so this has no
    effect.
    """
    if ddp.find_unused_parameters and not ddp.static_graph:
        ddp.reducer._reset_state()


def used_anywhere(ddp: DistributedDataParallel) -> torch.Tensor | None:
    """Return for each reduced parameter whether the last reduction changed its ``grad``; ``None`` means all.

    It needs ``find_unused_parameters``. Replaces the result of the all-reduce of the used map, which is in the
    reducer's copy of the map afterwards. The result is on the module's device, so using it there does not make the host
    wait. A gradient that is a view of its bucket is reduced with it, even if no rank used the parameter.
    """
    return None if ddp.gradient_as_bucket_view else ddp.reducer._get_local_used_map() > 0


@torch.no_grad()
def multiply_gradients(
    parameters: Sequence[torch.nn.Parameter], factor: float, used: torch.Tensor | None = None
) -> None:
    """Multiply gradients in place, with one call for all if the device supports it.

    Replaces a public call for many tensors.

    Args:
        parameters: The parameters in the reducer's order.
        factor: The number by which gradients are multiplied.
        used: For each parameter, whether its gradient is multiplied; ``None`` means all.
    """
    gradients: list[torch.Tensor] = []
    for index, parameter in enumerate(parameters):
        if (gradient := parameter.grad) is None:
            continue
        if used is None:
            gradients.append(gradient)
        else:  # on the device, so that the host does not wait
            torch.where(used[index].to(gradient.device), gradient * factor, gradient, out=gradient)
    if gradients:
        torch._foreach_mul_(gradients, factor)


def copies_of(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return copies of tensors, with one call for all. Replaces a public call for many tensors."""
    return torch._foreach_mul(tensors, 1.0) if tensors else []


def add_to(tensors: list[torch.Tensor], others: list[torch.Tensor], times: float) -> None:
    """Add ``others``, multiplied by ``times``, to tensors in place, with one call for all. Replaces a public call."""
    if tensors:
        torch._foreach_add_(tensors, others, alpha=times)


def will_rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Return whether the reducer rebuilds its buckets after the next complete backward, which it does once.

    The first backward of a static graph does not record the order in which gradients arrive, so a second one is needed.
    """
    return not ddp._has_rebuilt_buckets and (bool(ddp.static_graph) or not ddp.find_unused_parameters)


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Rebuild the buckets now, if the reducer has recorded the order of gradients: two broadcasts from rank 0.

    Replaces the rebuild in DDP's next forward, which a joined rank never runs.
    """
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
