"""Every private API of ``DistributedDataParallel`` that this package calls, and what each stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from joinables._torch import autograd
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
"""What its constructor sets. Looked for on each module: tools replace the constructor by one that calls it."""


def check(ddp: DistributedDataParallel) -> None:
    """Raise an ``ImportError`` if this torch does not set what this package uses."""
    require_of(ddp, ATTRIBUTES)


# -- DistributedDataParallel: forward -------------------------------------------------------------------------------


def is_in_forward(ddp: DistributedDataParallel) -> bool:
    """Whether the module inside is called by ``ddp``'s forward. Stands in for ``ddp`` telling its caller."""
    return DistributedDataParallel._get_active_ddp_module() is ddp


# -- DistributedDataParallel: buffers -------------------------------------------------------------------------------


def broadcasts_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether synchronised forwards broadcast buffers. Stands in for ``broadcast_buffers`` plus 'has any buffers'."""
    ddp._assign_modules_buffers()
    return forward_sync_buffers(ddp) and len(ddp.modules_buffers) > 0


def syncs_buffers_after_forward(ddp: DistributedDataParallel) -> bool:
    """Whether the user registered a buffer comm hook for after the forward pass."""
    before, ddp.require_forward_param_sync = ddp.require_forward_param_sync, True
    try:
        return bool(ddp._check_sync_bufs_post_fwd())
    finally:
        ddp.require_forward_param_sync = before


@torch.no_grad()
def sync_buffers(ddp: DistributedDataParallel, source: int) -> None:
    """Broadcast buffers from rank ``source`` of the group, or run the user's buffer comm hook.

    Stands in for ``DistributedDataParallel._sync_buffers``, which always takes rank 0. Buffers may have been reassigned
    since the last time; their versions are kept because autograd may have saved them.
    """
    ddp._assign_modules_buffers()
    with torch.autograd._unsafe_preserve_version_counter(tuple(ddp.modules_buffers)):
        ddp._sync_module_buffers(source)


def copied_buffers(ddp: DistributedDataParallel, but: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Copies of the module's buffers, by name, but for those of the layers called so."""
    buffers: dict[str, torch.Tensor] = {}
    for name, buffer in ddp.module.named_buffers():
        if name.rpartition(".")[0] not in but:
            buffers[name] = buffer.clone()
    return buffers


def restore_buffers(ddp: DistributedDataParallel, copies: Mapping[str, torch.Tensor]) -> None:
    """Put copies of the module's buffers back, but for those that the forward has made longer: caches of masks."""
    set_buffers(ddp.module, copies, reshape=False)


@torch.no_grad()
def set_buffers(module: torch.nn.Module, values: Mapping[str, torch.Tensor], *, reshape: bool) -> None:
    """Give buffers other values, in place; one of another shape is replaced with ``reshape``, else left alone.

    The buffers' versions are kept because autograd may have saved them.
    """
    buffers = dict(module.named_buffers())
    same = [name for name, value in values.items() if name in buffers and buffers[name].shape == value.shape]
    with torch.autograd._unsafe_preserve_version_counter(tuple(buffers[name] for name in same)):
        for name in same:
            buffers[name].copy_(values[name])
    for name in (values.keys() & buffers.keys()) - set(same) if reshape else ():
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._buffers[last] = values[name].to(buffers[name].device)


def suppress_buffer_sync(ddp: DistributedDataParallel) -> None:
    """Keep the next forward from synchronising buffers by itself. Stands in for a switch that DDP lacks."""
    vars(ddp)["require_forward_param_sync"] = False  # a plain attribute; Module.__setattr__ costs ten times as much


# -- DistributedDataParallel: gradients -----------------------------------------------------------------------------


def parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that DDP keeps in step, in an order that is the same on all ranks.

    Stands in for ``ddp.module.parameters()`` without ``parameters_to_ignore``: those that are spread over the ranks of
    a tensor-parallel module are no parameters of it any more once its first forward has run.
    """
    return list(ddp._module_parameters)


def parameters_of_each_rank(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that DDP ignores, so that each rank has its own."""
    kept = {id(parameter) for parameter in ddp._module_parameters}
    return [parameter for parameter in ddp.module.parameters() if id(parameter) not in kept]


def buffers(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """The buffers that DDP keeps in step, by name."""
    ignored = cast("set[str]", ddp.parameters_to_ignore)
    return {name: buffer for name, buffer in ddp.module.named_buffers() if name not in ignored}


def buffer_places(ddp: DistributedDataParallel) -> dict[str, tuple[dict[str, torch.Tensor | None], str]]:
    """Where a module looks up the buffers that DDP keeps in step: a dictionary and a key, by name.

    Stands in for ``named_buffers()``, which takes ten times as long.
    """
    parts = {name: name.rpartition(".") for name in buffers(ddp)}
    return {name: (ddp.module.get_submodule(owner)._buffers, last) for name, (owner, _, last) in parts.items()}


def reduced_parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters in the reducer's order: without those that were frozen when the module was wrapped."""
    kept = parameters(ddp)
    if all(parameter.requires_grad for parameter in kept):
        return kept
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    reduced = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return [parameter for parameter in kept if id(parameter) in reduced]


def expect_backward(ddp: DistributedDataParallel, outputs: Sequence[torch.Tensor]) -> None:
    """Make the reducer reduce the gradients of the next backward pass.

    Stands in for what the end of a synchronised forward does; needed for a second backward through one forward.
    """
    find_unused = ddp.find_unused_parameters and not ddp.static_graph
    ddp.reducer.prepare_for_backward(list(outputs) if find_unused else [])


def has_finished(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer has reduced all it waited for. Stands in for asking it; DDP asks in its next forward."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def first_static_backward(ddp: DistributedDataParallel) -> bool:
    """Whether the next synchronised backward is the first of a static graph, which the reducer treats differently.

    There it only counts, for each parameter, how often its gradient arrives, and reduces everything at the end: first
    the map of used parameters, then the buckets.
    """
    return bool(ddp.static_graph) and not ddp._static_graph_delay_allreduce_enqueued


def shadow_backward(
    ddp: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], arrivals: Sequence[int] | None
) -> None:
    """Let the reducer go through a backward pass in which no gradient arrives; awaits its collectives.

    Stands in for a backward of a model without data. The reducer's own hook is called for every parameter from inside
    an otherwise empty backward pass, so buckets, comm hooks, used maps, views and divisors are all the reducer's own
    work. What a parameter's ``grad`` holds is contributed; nothing if it is ``None``. The result lands in ``grad``.

    Args:
        ddp: the module.
        parameters: of :func:`reduced_parameters`.
        arrivals: for a static graph, how often each parameter's gradient arrives in one backward; ``None`` is once.
    """
    reducer = ddp.reducer
    first = first_static_backward(ddp)
    counts = arrivals if arrivals is not None else [1] * len(parameters)

    def arrive(gradient: torch.Tensor) -> None:
        for index in reversed(range(len(parameters))):  # roughly the order of a real backward: buckets fill in sequence
            for _ in range(counts[index]):
                reducer._autograd_hook(index)
        if first:
            autograd.after_backward(reducer._delay_all_reduce)

    with torch.enable_grad():
        reducer.prepare_for_forward()
        expect_backward(ddp, [_reaching(parameters)] if ddp.find_unused_parameters else [])
        start = torch.zeros((), requires_grad=True, device=parameters[0].device)
        start.register_hook(arrive)
        start.clone().backward()
    if first:
        ddp._static_graph_delay_allreduce_enqueued = True


def _reaching(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """An output whose graph reaches every parameter, also one that is frozen now, for ``find_unused_parameters``."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    output = _Reach.apply(*parameters)
    for parameter in frozen:
        parameter.requires_grad_(False)
    return output


class _Reach(torch.autograd.Function):
    """A graph that touches all parameters; it is searched, never run backward."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        raise AssertionError("this graph is not meant to be run backward")


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether gradients go through a comm hook, the user's or one of torch's. Stands in for asking the reducer."""
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))


def hooks_remember(ddp: DistributedDataParallel) -> bool:
    """Whether a comm hook may add what it has left out of earlier gradients, as PowerSGD's do.

    Stands in for ``ddp._comm_hooks``, a list of hooks and their states; those without one get the process group.
    """
    states = [state for _, state in cast("Any", ddp)._comm_hooks]
    return any(state is not None and not isinstance(state, dist.ProcessGroup) for state in states)


def forget_use(ddp: DistributedDataParallel) -> None:
    """Forget which parameters earlier backwards under ``no_sync`` used, because their gradients are gone.

    Stands in for ``zero_grad`` telling the reducer: with ``find_unused_parameters`` it remembers the use until the next
    reduction, and takes a missing gradient of a used parameter for a fault of its own. The reset also makes it forget
    that buckets were rebuilt, which they never are where it matters.
    """
    if ddp.find_unused_parameters and not ddp.static_graph:
        ddp.reducer._reset_state()


def used_anywhere(ddp: DistributedDataParallel) -> torch.Tensor:
    """For each reduced parameter, whether the last reduction touched its ``grad``, with ``find_unused_parameters``.

    Stands in for the result of the used map's all-reduce, which lies in the reducer's copy of the map afterwards. It is
    on the device of the module: whoever reads it there does not wait for it.
    """
    return ddp.reducer._get_local_used_map() > 0


@torch.no_grad()
def multiply_gradients(
    parameters: Sequence[torch.nn.Parameter], factor: float, used: torch.Tensor | None = None
) -> None:
    """Multiply gradients in place, all at once where a device can. Stands in for a public call over several tensors.

    Args:
        parameters: in the reducer's order.
        factor: the number that gradients are multiplied by.
        used: for each parameter, whether its gradient is; ``None``: all are.
    """
    gradients: list[torch.Tensor] = []
    for index, parameter in enumerate(parameters):
        if (gradient := parameter.grad) is None:
            continue
        if used is None:
            gradients.append(gradient)
        else:  # on the device, so that nobody waits for it
            torch.where(used[index].to(gradient.device), gradient * factor, gradient, out=gradient)
    if gradients:
        torch._foreach_mul_(gradients, factor)


def take_out(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Set tensors to 0, all at once where a device can; copies of what they held. Stands in for public calls, too."""
    if not tensors:
        return []
    copies = torch._foreach_mul(tensors, 1.0)
    torch._foreach_zero_(tensors)
    return copies


def add_to(tensors: list[torch.Tensor], others: list[torch.Tensor], times: float) -> None:
    """Add ``others``, so many ``times``, in place, all at once where a device can. Stands in for a public call."""
    if tensors:
        torch._foreach_add_(tensors, others, alpha=times)


def will_rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer rebuilds its buckets after the next complete backward; it does so once.

    A static graph's first backward does not record the order in which gradients arrive, so it needs a second one.
    """
    return not ddp._has_rebuilt_buckets and (bool(ddp.static_graph) or not ddp.find_unused_parameters)


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Rebuild the buckets now, if the reducer has what it needs: two broadcasts from rank 0.

    Stands in for the rebuild that DDP does in its next forward, a place that a joined rank never comes to.
    """
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
