"""Private torch APIs that this package calls.

A docstring says what the private API replaces: a public API that torch lacks, or that is too slow.
"""

# Private names are missing from torch's type stubs, or have no types there.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame
from torch.autograd import Variable, profiler
from torch.autograd.function import BackwardCFunction
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.utils import _pytree

from join.collectives.broken import timed_out
from join.collectives.timeouts import TIMEOUTS

pytree = _pytree
"""Functions that take containers of tensors apart and rebuild them. Replaces a public module of that name."""

after_backward: Callable[[Callable[[], object]], None] = cast("Any", Variable._execution_engine).queue_callback
"""Call a function when the current backward pass has computed all gradients.

Replaces a public end-of-backward hook. Callbacks run in the order in which they were queued. A callback may queue
another one, which runs after all callbacks that were queued before.
"""

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F, *, with_calls: bool = True) -> F:
    """Exclude a function from compilation by ``torch.compile`` and compiled autograd.

    Replaces ``torch.compiler.disable``, a slow call, and ``torch._dynamo.skip``, whose import takes a second.

    Args:
        function: The function, or a hook.
        with_calls: Whether the functions that it calls are excluded, too.
    """
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, skip if with_calls else default)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    cast("Any", function)._torchdynamo_disable = True
    return function


_LAZY = "TORCH_GLOO_LAZY_INIT"
_PATIENCE = timedelta(milliseconds=50)  # for a receive over a connection that is open
_NO_TAG = 0x7FFFFFF0  # the tag of a message that no rank sends
_NO_HANDLE = -1  # instead of the number of a handle, which is never negative


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Call ``hook`` with the gradient of a tensor that requires one. Return the hook's handle, or ``None``.

    Replaces ``Tensor.register_hook``, whose handle costs 15 us if a step has emptied the caches. A tensor that a module
    has computed needs no handle, because the hook is freed with the graph.
    """
    if tensor.is_leaf or tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
        return tensor.register_hook(hook)
    tensor._backward_hooks = OrderedDict({_NO_HANDLE: hook})
    tensor.grad_fn._register_hook_dict(tensor)  # pyright: ignore[reportOptionalMemberAccess]
    return None


@contextmanager
def thawed(parameters: Sequence[torch.Tensor]) -> Generator[None]:
    """Let frozen parameters require grad for the duration of a context."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device="cpu")


def accumulators(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes of the graph that accumulate the gradients of parameters, frozen or not.

    A parameter keeps its node while it is frozen and thawed. Replaces ``get_gradient_edge``, which refuses frozen
    parameters and makes a view of each of the others.
    """
    with thawed(parameters), torch.enable_grad():
        reached: Any = _Reach.apply(*parameters)
    return [node for node, _ in reached.grad_fn.next_functions] if parameters else []


def outer_node() -> Any:
    """Return the node of the outermost backward that runs the current backward inside itself, or ``None``.

    A reentrant checkpoint is such a node. Replaces a query for the backward around a backward.
    """
    frame, node, apply = sys._getframe(1), None, BackwardCFunction.apply.__code__
    while frame is not None:
        if frame.f_code is apply:
            node = frame.f_locals["self"]
        frame = frame.f_back
    return node


def once_behind(node: Any, call: Callable[[], object]) -> None:
    """Call a function once, when a node that runs has ended: before the first node behind it runs."""
    handles: list[Any] = []

    def run(*_: Any) -> None:
        if handles:
            while handles:
                handles.pop().remove()
            call()

    handles += [each.register_prehook(run) for each, _ in node.next_functions if each is not None]


backward_under_way: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that runs on this thread, or -1. Replaces a public query."""

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the current backward pass runs an accumulator; ``torch.autograd.grad`` runs none.

Replaces a public query, which ``torch.autograd.graph.register_multi_grad_hook`` makes in the same way. It raises
RuntimeError if ``torch.autograd.grad`` computes the gradient of the parameter.
"""


Writes = list[tuple[int, tuple[int, int]]]


def writes_to(tensors: Iterable[torch.Tensor | None]) -> Writes:
    """Return the id of each tensor, its address and the number of its in-place writes, for a later comparison.

    Replaces a query for changes of a gradient by ``zero_grad`` or a backward, and of a parameter by a step. Writes in
    place through ``.data`` do not count.
    """
    return [(id(tensor), (tensor.data_ptr(), tensor._version)) for tensor in tensors if tensor is not None]


def may_receive(tensor: torch.Tensor) -> bool:
    """Return whether the program writes to a tensor in place, as to momentum, so that Join may do so, too.

    A tensor that is only read may be memory of the user's, such as a batch. Replaces a query for in-place writes.
    """
    return not tensor.is_inference() and tensor._version > 0 and 0 not in tensor.stride()


def are_zero(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all elements of all tensors are 0, with one host synchronisation for each device."""
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        flags.setdefault(tensor.device, []).append(tensor.any())
    return not any(bool(torch.stack(flags_here).any()) for flags_here in flags.values())


_NOTHING = nullcontext()


def profiled(*name: object) -> AbstractContextManager[object]:
    """Return a context that records a range ``join: name`` in ``torch.profiler``.

    Replaces a query for an active profiler. Without a profiler, the context does nothing, because a ``record_function``
    would cost microseconds even then.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"join: {' '.join(map(str, name))}")
    return _NOTHING


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return ``group.get_group_store()``, the store by which the ranks of ``group`` met.

    Groups of torch 2.8 lack the method.
    """
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return distributed_c10d._get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time that an operation of ``group`` may take. Replaces a getter beside ``set_timeout``."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)


def limit(group: dist.ProcessGroup, timeout: timedelta) -> timedelta | None:
    """Set the time that an operation of a gloo ``group`` may take.

    Return the previous time; ``None`` for other backends. Replaces ``monitored_barrier`` and the like, which are not
    the collectives that DDP issues. NCCL would end the process instead.
    """
    backend = group._get_backend(group._device_types[0])
    if not _is_of_gloo(backend):
        return None
    before = timeout_of(group)
    backend._set_default_timeout(timeout)
    return before


def issued_counter_of(group: dist.ProcessGroup) -> Callable[[], int]:
    """Return a function that returns the number of operations that this process started on ``group``.

    The function returns 0 if the group's backend does not count them. Replaces a public counter.
    """
    try:
        group._get_sequence_number_for_group()
    except RuntimeError:  # not every backend counts
        return int
    return group._get_sequence_number_for_group


def started_operations() -> int:
    """Return the number of operations that this process has started on all process groups whose backend counts them.

    Replaces a public counter.
    """
    return sum(issued_counter_of(group)() for group in list(distributed_c10d._world.pg_map))


@contextmanager
def for_small_messages() -> Generator[None]:
    """Make new gloo groups connect ranks on first use, and bind the groups to no device, for the duration of a context.

    Replaces arguments of ``dist.new_group``. Without this, each rank would connect with all others at once. If
    ``init_process_group(device_id=)`` binds groups to a device, a new group would be asked for its backend on that
    device, and gloo supports only CPUs and CUDA's GPUs.
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


_closed: WeakSet[dist.ProcessGroup] = WeakSet()
_aborted: list[Any] = []  # backends, kept because a later abort is for the groups that were made since


one_reader = threading.RLock()
"""Held by a thread that reads a state of the interpreter or of torch, which hangs if another thread reads it, too."""
os.register_at_fork(before=one_reader.acquire, after_in_parent=one_reader.release, after_in_child=one_reader.release)

awaited: WeakSet[threading.Thread] = WeakSet()
"""Daemon threads that call C++, for which the end of the process waits a little."""
_given_up: WeakSet[threading.Thread] = WeakSet()  # those of them that return soon or never: it waits for a moment
_MOMENT = 0.5  # seconds


@atexit.register
def wait_for_threads() -> None:
    """Wait for the threads of this package that call C++, at most for ``TIMEOUTS.note``; half a second if given up.

    Before Python 3.14, a thread that returns from such a call while the interpreter shuts down aborts the process
    ("terminate called without an active exception").
    """
    began = time.monotonic()
    for thread in list(awaited):
        if thread.is_alive():
            limit = _MOMENT if thread in _given_up else TIMEOUTS.note
            thread.join(max(0.0, began + limit - time.monotonic()))


class Aside:
    """Call in a thread of its own, which the caller can give up. It has the methods of an operation of a group.

    Replaces time limits of torch's blocking calls.

    Args:
        call: The function to call.
        or_here: Whether to call it in this thread if the process can have no other.

    Attributes:
        result: The result of the call, once it is completed.
    """

    def __init__(self, call: Callable[[], Any], *, or_here: bool = False) -> None:
        self.result: Any = None
        self._call, self._error = call, list[BaseException]()
        self._thread = threading.Thread(target=self._run, name="join aside", daemon=True)
        awaited.add(self._thread)
        try:
            self._thread.start()
        except RuntimeError:
            if not or_here:
                raise
            self._run()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self._error.append(error)

    def is_completed(self) -> bool:
        """Return whether the call has ended."""
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Wait for the call, and raise its exception, or a ``RuntimeError`` if it is still running at ``timeout``."""
        seconds = None if timeout is None else timeout.total_seconds()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        if self._thread.is_alive():
            _given_up.add(self._thread)
            raise timed_out("a call in a thread", seconds or 0.0)
        for error in self._error:
            raise error
        return True


def abort_on_devices(seconds: float, more: Iterable[Callable[[], object]] = ()) -> bool:
    """Abort the operations of all process groups of this process on accelerators, and call ``more`` meanwhile.

    Wait at most ``seconds`` for all of these. Replaces ``ProcessGroup.abort`` of the backends that need it. With NCCL,
    nothing fails when a rank is gone. The device waits, and so does a thread that reads a tensor from it, until the
    group's watchdog ends the process. Gloo's operations fail by themselves. All groups are aborted, because the stream
    may wait in any of them for a rank that waits in another. They are aborted at the same time, because the abort of
    one may wait for the abort of another (pytorch issue 119797).

    Returns:
        Whether this process has such groups.
    """
    devices = ((group, device) for group in list(distributed_c10d._world.pg_map) for device in group._device_types)
    backends = {group._get_backend(device) for group, device in devices if device.type != "cpu"}
    # MPI's abort ends the process.
    hanging = [backend for backend in backends if backend.name() not in ("gloo", "mpi") and hasattr(backend, "abort")]
    new = [backend for backend in hanging if backend not in _aborted]
    _aborted.extend(new)
    deadline, started = time.monotonic() + seconds, list[Aside]()
    with suppress(RuntimeError):  # there may be no thread left
        started += (Aside(call) for call in (*(backend.abort for backend in new), *more))
    for aborting in started:
        with suppress(Exception):
            aborting.wait(timedelta(seconds=max(0.0, deadline - time.monotonic())))
    return bool(hanging)


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` has a backend for CPU tensors.

    Replaces ``dist.get_backend_config``, which raises for groups that were destroyed or that torch did not make.
    """
    return "cpu" in {device.type for device in group._device_types}


def close_connections(group: dist.ProcessGroup) -> None:
    """Close the gloo connections of ``group``, so that its running operations fail.

    All of them fail here. On the other ranks, those fail that wait for this rank.

    Replaces ``ProcessGroupGloo.abort``, which fails no operation up to torch 2.13. Gloo closes all connections when a
    wait has taken too long, so this function waits for a message that no rank sends. One connection is enough, and the
    nearest ranks come first. Gloo may not have connected with a rank yet, and waits without a limit if that rank is
    gone, so no wait here is longer than a moment. A wait that was given up keeps its thread, so only the first call for
    a group does anything.
    """
    backend = group._get_backend(torch.device("cpu")) if has_cpu_backend(group) else None
    if backend is None or not _is_of_gloo(backend) or group in _closed:
        return
    _closed.add(group)
    world_size = group.size()
    for distance in sorted(range(1, world_size), key=lambda distance: min(distance, world_size - distance)):
        other = (group.rank() + distance) % world_size

        def receive(other: int = other) -> None:
            backend.recv([torch.empty(1, device="cpu")], other, _NO_TAG).wait(timedelta(milliseconds=1))

        try:
            Aside(receive).wait(_PATIENCE)
        except RuntimeError as error:  # over a connection that is already broken, the receive fails at once
            if "Timed out" in str(error):
                return


def _is_of_gloo(backend: Any) -> bool:
    return isinstance(backend, getattr(dist, "ProcessGroupGloo", ()))


def never_destroy(group: dist.ProcessGroup | None) -> None:
    """Never run the destructor of ``group``, if there is one. Replaces an abort, which gloo groups do not have.

    The destructor waits for running operations until the group's time limit expires. If an operation waits for a rank
    that never joins it, the process could not end until then. A group that is not destroyed ends with its process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def let_go_before_exit(group: dist.ProcessGroup) -> None:
    """Let the threads of ``group`` release the tensors of its last operations before the interpreter shuts down.

    A gloo thread releases the tensors some time after the operation is done, and needs the interpreter for that. If it
    does so while the interpreter shuts down, the process ends with SIGABRT ("terminate called without an active
    exception"). This was seen in a script that ended right after a collective. Replaces a way to wait for these
    threads.
    """
    if _is_of_gloo(group._get_backend(group._device_types[0])):
        _pause_at_exit()


@cache
def _pause_at_exit() -> None:
    atexit.register(time.sleep, 0.05)


def never_destroy_at_exit(group: dist.ProcessGroup) -> None:
    """Call :func:`never_destroy` when the interpreter exits, if the group still exists."""
    reference = weakref.ref(group)
    atexit.register(lambda: never_destroy(reference()))
