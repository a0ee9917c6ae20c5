"""The private torch APIs that this package calls, each with what it stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd import Variable, profiler
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.utils import _pytree

pytree = _pytree
"""Containers of tensors, taken apart and put together. Stands in for a public module of that name."""

after_backward: Callable[[Callable[[], object]], None] = cast("Any", Variable._execution_engine).queue_callback
"""Runs what it is given when the backward pass that is under way has computed all gradients.

Stands in for a public end-of-backward hook. Callbacks run in the order in which they were queued; a callback may queue
another, which runs after all that were queued before.
"""

_LAZY = "TORCH_GLOO_LAZY_INIT"
_NO_TAG = 0x7FFFFFF0  # of a message that nobody sends
_NO_HANDLE = -1  # in the place of the number of a handle; these are not negative


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Have ``hook`` called with the gradient of a tensor that requires one; the handle, or ``None``.

    Stands in for ``Tensor.register_hook``, whose handle costs 15 us where a step has emptied the caches. Where a module
    has computed the tensor nobody needs one, since the hook goes with the graph.
    """
    if tensor.is_leaf or tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
        return tensor.register_hook(hook)
    tensor._backward_hooks = OrderedDict({_NO_HANDLE: hook})
    tensor.grad_fn._register_hook_dict(tensor)  # pyright: ignore[reportOptionalMemberAccess]
    return None


_NOTHING = nullcontext()


def profiled(*name: object) -> AbstractContextManager[object]:
    """A range ``join: name`` in what ``torch.profiler`` records. Stands in for a way to ask whether anything records.

    Without a profiler nothing is entered, since a ``record_function`` costs microseconds then, too.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"join: {' '.join(map(str, name))}")
    return _NOTHING


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """``group.get_group_store()``, which groups of torch 2.8 lack: the store by which the ranks of ``group`` met."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return distributed_c10d._get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long an operation of ``group`` may take. Stands in for a getter beside ``set_timeout``."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)


def limit(group: dist.ProcessGroup, timeout: timedelta) -> timedelta | None:
    """Set how long an operation of ``group`` may take, if it is gloo's; what it was before.

    Stands in for ``monitored_barrier`` and the like, which are no collectives of DDP's. NCCL ends the process instead.
    """
    backend = group._get_backend(group._device_types[0])
    if not _is_of_gloo(backend):
        return None
    before = timeout_of(group)
    backend._set_default_timeout(timeout)
    return before


def issued_on(group: dist.ProcessGroup) -> int:
    """How many operations were started on ``group`` in this process. Stands in for a counter; 0 if there is none."""
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:  # not all backends count
        return 0


@contextmanager
def for_small_messages() -> Generator[None]:
    """Within the context, new groups of gloo's connect ranks when these first need it, and are bound to no device.

    Stands in for arguments of ``dist.new_group``. Else each rank connects with all others. And where
    ``init_process_group(device_id=)`` binds groups, they ask a new one for its backend on that device, and gloo has one
    for CPUs and CUDA's GPUs only.
    """
    default: Any = dist.group.WORLD
    bound, lazy = default.bound_device_id, os.environ.get(_LAZY)
    default.bound_device_id, os.environ[_LAZY] = None, "1"
    try:
        yield
    finally:
        default.bound_device_id = bound
        if lazy is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = lazy


_aborted: list[Any] = []  # backends; kept, since whoever aborts comes again for those that were made meanwhile


def abort_on_devices(seconds: float) -> bool:
    """Abort the operations of all process groups of this process on accelerators, and wait for that so many seconds.

    Stands in for ``ProcessGroup.abort`` of the backends that need it. With NCCL nothing breaks when a rank is gone: the
    device waits, and so does whoever reads a tensor from it, until the watchdog of the group ends the process. Gloo's
    operations break by themselves. All groups, since the stream may wait in any of them for a rank that waits in
    another; at once, since the abort of one may wait for another's (pytorch issue 119797).

    Returns:
        Whether there are such groups.
    """
    devices = ((group, device) for group in list(distributed_c10d._world.pg_map) for device in group._device_types)
    backends = {group._get_backend(device) for group, device in devices if device.type != "cpu"}
    # MPI's abort ends the process.
    hanging = [backend for backend in backends if backend.name() not in ("gloo", "mpi") and hasattr(backend, "abort")]
    new = [backend for backend in hanging if backend not in _aborted]
    _aborted.extend(new)
    threads = [threading.Thread(target=backend.abort, name="join abort", daemon=True) for backend in new]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return bool(hanging)


def close_connections(group: dist.ProcessGroup) -> None:
    """Close gloo's connections of ``group``, so that all that is under way on it breaks, here and on the other ranks.

    Stands in for ``ProcessGroupGloo.abort``, which breaks nothing up to torch 2.13. When somebody has waited for too
    long, gloo gives up all connections; so this waits for a message that nobody sends.
    """
    backend = group._get_backend(torch.device("cpu")) if "cpu" in {d.type for d in group._device_types} else None
    if backend is None or not _is_of_gloo(backend):
        return
    for distance in range(1, group.size()):  # one whose connection has broken before is not waited for
        nothing, other = torch.empty(1, device="cpu"), (group.rank() + distance) % group.size()
        try:
            backend.recv([nothing], other, _NO_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return


def _is_of_gloo(backend: Any) -> bool:
    return isinstance(backend, getattr(dist, "ProcessGroupGloo", ()))


def never_destroy(group: dist.ProcessGroup) -> None:
    """Never run the destructor of ``group``. Stands in for an abort that gloo's groups do not have.

    The destructor waits for operations that are under way, for as long as the group's time limit: for one that nobody
    else comes to, the process could not end meanwhile. One that is not destroyed ends with its process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def let_go_before_exit(group: dist.ProcessGroup) -> None:
    """Before the interpreter takes itself down, let the threads of ``group`` drop the tensors of its last operations.

    A thread of gloo's drops them some time after the operation is done, and needs the interpreter for that. One that
    comes to it while the interpreter takes itself down ends the process by SIGABRT ("terminate called without an active
    exception"): seen where a script ended right after a collective. Stands in for a way to wait for these threads.
    """
    if _is_of_gloo(group._get_backend(group._device_types[0])):
        atexit.unregister(_pause)
        atexit.register(_pause)


def _pause() -> None:
    time.sleep(0.05)


def never_destroy_at_exit(group: dist.ProcessGroup) -> None:
    """Call :func:`never_destroy` when the interpreter exits, if the group is still there."""
    reference = weakref.ref(group)

    def hold() -> None:
        if (group := reference()) is not None:
            never_destroy(group)

    atexit.register(hold)
