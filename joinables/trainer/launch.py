"""A function run as all ranks of a process group: :class:`Launcher`.

If the launcher starts the processes, the parent and each worker share the work as follows. The rest of it is in
:mod:`joinables.processes`::

    parent                                      worker
    pickles fn and args into a file
    starts the workers                          maps the file; the last one removes it
                                                meets the others at a store: a file
                                                runs fn
                                                the first puts one tuple into the queue: its result
    gets the tuple, once; maps its files

With several nodes, there is a parent on each. The first worker of a node has the lowest rank there. A process beside
the parent of the first node serves the store, at the address that ``MASTER_ADDR`` and ``MASTER_PORT`` name.

A process that torchrun or another launcher has started does the middle part of the worker, and keeps the result or the
exception of ``fn`` for itself. The variables of torchrun describe it, which are read, never set, or an object of the
user, such as a cluster environment of Lightning.

The tuple has short fields themselves, and of long ones the name of a file. So it is shorter than ``PIPE_BUF``, and no
pipe can be full while its reader waits for the writer to end. Files are mapped and not copied: all workers share the
tensors of the call in memory until they change them.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from typing_extensions import override

from join.errors import add_note, described
from join.generators import used_accelerator
from joinables.processes import RUNNING, Failure, LaunchError, ending_forks, how_it_ended, rank_of_group, run
from joinables.trainer import output, settings
from joinables.trainer.files import replacing, save, temporary_folder
from joinables.trainer.rendezvous import RUN_ID, USE_AGENT_STORE, fresh_store, job_of

StartMethod: TypeAlias = Literal["spawn", "fork", "forkserver"]

_T = TypeVar("_T")

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", RUN_ID, USE_AGENT_STORE)
_SHORT, _MOST_FIELDS = 200, 15  # characters of a field of the tuple, and fields; longer ones go through files


class WorkerDied(LaunchError):
    """A worker that ended without a result or an exception: it was killed, or it exited.

    Args:
        rank: The worker's rank.
        exit_code: The exit code as in ``multiprocessing.Process.exitcode``: negative for a signal.
    """

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(rank, exit_code)  # the arguments instead of a message, so that the error can be pickled
        self.rank, self.exit_code = rank, exit_code

    @override
    def __str__(self) -> str:
        if self.exit_code < 0:
            #: SIGKILL is sent when memory has run out (see the kernel's log), or by the person or scheduler that ended
            #: the job. SIGABRT and SIGSEGV come from native code. Read its last messages in the output.
            return f"Rank {self.rank} {how_it_ended(self.exit_code)}. [J214]"
        return (
            f"Rank {self.rank} exited with code {self.exit_code} before it returned a result. Look in the output for"
            " a call of sys.exit or os._exit on that rank. If it exited while it imported the main script, put the"
            ' statements that start the run under if __name__ == "__main__". [J215]'
        )


class WorkerRaised(LaunchError):
    """A worker that raised an exception that cannot be sent; the message has its rank, and the exception's text."""


class NotPicklable(LaunchError):
    """An ``fn``, an argument or a result that cannot be pickled for another process."""


class RemoteTraceback(Exception):
    """A worker's traceback as text: the ``__cause__`` of the exception that a launch raises for that worker."""


class Launcher:
    """Runner of a function as every rank of a process group, in processes that it starts or that are running already.

    ``Launcher`` starts the processes unless torchrun or the launcher of ``environment`` has started this one. Workers
    keep the parent's number of torch threads unless all of them together would exceed the number of processors. They
    have the parent's environment variables. They end with the parent, and at Ctrl-C. If there are several, each line of
    their output begins with the rank.

    Args:
        world_size: The number of ranks.
        start_method: How processes are started, if this launcher starts them. ``fork`` does not pickle ``fn`` and its
            arguments. It is safe only before the parent has computed on several threads, or on a GPU. With the other
            two, each worker imports the main script, so start the run under ``if __name__ == "__main__"``.
        backend: The backend of the process group.
        timeout: The timeout of the process group's collectives; torch's by default.
        environment: The object that describes this process, as ``DDPStrategy(cluster_environment=)``, if a launcher
            has started it; by default, the environment variables of torchrun say whether it has.
        node: The part of the ranks that this launcher starts, if another one starts others; by default all ranks.

    Raises:
        ValueError: If ``world_size`` is not positive or is not the number of processes that were started, or if
            ``start_method`` is unknown.
    """

    def __init__(
        self,
        world_size: int,
        *,
        start_method: StartMethod = "spawn",
        backend: str = "gloo",
        timeout: timedelta | None = None,
        environment: Any = None,
        node: Node | None = None,
    ) -> None:
        self._environment = launcher_of(world_size, environment)
        started = world_size if self._environment is None else place_of(self._environment).world_size
        self._node = node or Node(range(world_size))
        if world_size < 1 or world_size != started:
            raise ValueError(
                f"{world_size=} is not positive, or is not the number of processes that a launcher has started. Pass"
                " the number of processes that torchrun has started, or at least 1 without it. [J411]"
            )
        multiprocessing.get_context(start_method)  # raises a ValueError if the method is unknown
        self._world_size, self._start_method = world_size, start_method
        self._options: dict[str, Any] = {"backend": backend, "timeout": timeout}

    def launch(self, fn: Callable[..., _T], *args: Any) -> _T:
        """Run ``fn(*args)`` on all ranks, with the default process group set up.

        Processes that ``fn`` forks or starts are not ranks: a launch does not wait for them, and a fork that leaves
        ``fn`` ends.

        If a launcher started the processes, all of them have to call this method equally often. Each process then
        receives its own result. After an exception its process group stays, since taking it down could wait for
        messages that the other ranks never send.

        Args:
            fn: The function. It is importable, unless processes are forked or a launcher started them.
            args: The arguments. They are pickled as they are. Workers share the memory of the tensors, each until
                it changes them. The class ``Place`` as an argument becomes the :class:`Place` of the rank.

        Returns:
            The result of ``fn`` on rank 0, or on the lowest rank that this launcher has started. Its tensors are on the
            CPU if it comes from a process started here.

        Raises:
            NotPicklable: If ``fn`` or an argument (before any process starts) or the result cannot be pickled.
            WorkerDied: If a worker ended before ``fn`` did.
            WorkerRaised: If a worker raised an exception that cannot be pickled, or a long one while the disk was full.
            LaunchError: If this process has a process group or has used its GPU, and processes are to be forked, or if
                the port of the store of several nodes is taken.
            OSError: If the call or the result does not fit on the disk of the temporary folder, which ``TMPDIR`` names.
            BaseException: The exception that ``fn`` raised on a rank, with the worker's traceback as its cause. If
                several ranks failed, it is the exception that caused the others, of the lowest such rank.
        """
        if self._environment is None:
            return self._start(fn, args)
        place = place_of(self._environment)
        store = fresh_store(_store_of(self._environment), place.rank, place.world_size)
        with rank_of_group(place.rank, place.world_size, store, **self._options), ending_forks():
            return fn(*_placed(args, place))

    def _start(self, fn: Callable[..., _T], args: tuple[Any, ...]) -> _T:
        """Run ``fn(*args)`` in processes that are started for it."""
        ranks, method = self._node.ranks, self._start_method
        threads = min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // len(ranks)))
        with temporary_folder() as name:
            folder = Path(name)
            if method != "fork" and _needs_fork((fn, args, settings.capture()), folder / "call"):
                # This process may have computed on several threads, and a fork of it has none of them.
                method, threads = "fork", 1
            has_used_gpu = self._options["backend"] != "gloo" and used_accelerator() is not None
            if method == "fork" and (dist.is_initialized() or has_used_gpu):
                raise LaunchError(
                    "Processes cannot be forked from this one, because it has used its GPU or has a process group. Pass"
                    " start_method='spawn'. Functions and classes of a notebook, a prompt, python -c or stdin exist in"
                    " forked processes only: restart this process and launch first, as strategy='ddp_fork' of a Trainer"
                    " requires, too, or move the definitions into a file, and import them. [J620]"
                )
            results = multiprocessing.get_context(method).SimpleQueue()
            call = (fn, args) if method == "fork" else None
            _serve_beside(self._node)
            _, failures = run(self._work, ranks, threads, folder, results, call, method=method, folder=folder)
            if failures:
                error = _error_of(failures[0])
                more = [each for each in failures[1:] if each.blame != RUNNING]  # the others only waited for this rank
                if more:
                    add_note(error, "; ".join(f"rank {each.rank} failed too: {each.text[:200]}" for each in more))
                raise error
            is_tuple, *fields = results.get()
            got = tuple(read(folder / field) if isinstance(field, Path) else field for field in fields)
            return cast("Any", got if is_tuple else got[0])

    def _work(self, rank: int, threads: int, folder: Path, results: Any, call: Any) -> None:
        """Run the function as one rank; the first puts the result before it waits for other ranks, which may fail.

        Args:
            rank: The rank.
            threads: Its number of torch threads.
            folder: The folder of the launch, which has the call for workers that are not forked.
            results: The queue into which the first worker puts one tuple: the result of the function.
            call: The function and its arguments, for forked workers.
        """
        torch.set_num_threads(threads)
        output.begin(rank, self._world_size)
        fn, args = call or _read_call(folder)
        ranks, address = self._node.ranks, self._node.address
        store: dist.Store = dist.FileStore(f"{folder}/store", len(ranks))
        if store.add("opened", 1) == len(ranks):  # the file should not stay if the parent is killed
            (folder / "call").unlink(missing_ok=True)
        if address is not None:
            store = fresh_store(dist.TCPStore(*address, is_master=False), rank, self._world_size)
        with rank_of_group(rank, self._world_size, store, **self._options):
            with ending_forks():
                result: Any = fn(*_placed(args, place := Place(rank, self._world_size, ranks.index(rank))))
            if place.local_rank == 0:
                is_tuple = type(result) is tuple and len(cast("tuple[Any, ...]", result)) <= _MOST_FIELDS
                fields: Sequence[Any] = cast("tuple[Any, ...]", result) if is_tuple else [result]
                results.put((is_tuple, *(_put(field, folder / f"result-{i}") for i, field in enumerate(fields))))


@dataclass(frozen=True)
class Node:
    """Ranks that one launcher starts.

    Attributes:
        ranks: The ranks.
        address: The address of the store, if several launchers start ranks.
    """

    ranks: range
    address: tuple[str, int] | None = None


def node_of(devices: int, num_nodes: int, environ: Mapping[str, str]) -> Node | None:
    """Return the part of the ranks that this process starts as one of several nodes, from environment variables.

    Returns:
        The part. ``None`` if the variables ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` do not name one.
    """
    number, host, port = (environ.get(name, "") for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"))
    if not (number.isdecimal() and int(number) < num_nodes and host and port.isdecimal()):
        return None
    first = int(number) * devices
    return Node(range(first, first + devices), (host, int(port)))


# -- processes that a launcher has started ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The numbers of a process in its run.

    Attributes:
        rank: The number of the process among all processes, from 0.
        world_size: The number of processes.
        local_rank: The number of the process among those of the same node, from 0.
    """

    rank: int
    world_size: int
    local_rank: int


def place_of(environment: Any, *, address: bool = False) -> Place:
    """Return the numbers of this process, which a launcher has started.

    Args:
        environment: The launcher: variables of torchrun, or an object of the user.
        address: Whether the address of the store is checked, too.

    Raises:
        ValueError: If a variable, a method or a property is missing or fails, or its value makes no sense.
    """
    cause: Exception | None = None
    try:
        variables = _variables_of(environment)
        rank, ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        # Systems that start one process on each node set no number on the node.
        place = Place(rank, ranks, int(variables.get("LOCAL_RANK", "0") if ranks == 1 else variables["LOCAL_RANK"]))
        host, port = (variables["MASTER_ADDR"], int(variables["MASTER_PORT"])) if address else ("-", 1)
        if 0 <= place.rank < place.world_size and place.local_rank >= 0 and host and 0 < port < 2**16:
            return place
        problem = f"{place} at {host}:{port} is not possible"
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        cause, problem = error, described(error)
    raise ValueError(
        f"cluster_environment={environment!r} does not describe this process ({problem}). Start the script with"
        " torchrun, which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or unset these variables. An"
        " object of your own has the methods global_rank(), world_size() and local_rank(), which return numbers from 0"
        " on, and the properties main_address and main_port with a host and a free port of rank 0. [J711]"
    ) from cause


def _variables_of(environment: Any) -> dict[str, Any]:
    """Return the variables of torchrun that say the same as a launcher."""
    if isinstance(environment, dict):
        return cast("dict[str, Any]", environment)
    numbers = {"RANK": environment.global_rank(), "WORLD_SIZE": environment.world_size()}
    address = {"MASTER_ADDR": environment.main_address, "MASTER_PORT": environment.main_port}
    return {**numbers, "LOCAL_RANK": environment.local_rank(), **address}


def launcher_of(world_size: int, own: Any = None, environ: Mapping[str, str] = os.environ) -> Any:
    """Return the launcher that started the processes of a run with ``world_size`` processes; ``None`` without one.

    It is ``own``, or the variables of torchrun, which another launcher or the user may have set. A launcher that has
    started a single process has not started a larger run.

    Args:
        world_size: The number of processes.
        own: The launcher that the user has passed, if any. Then environment variables are not read.
        environ: The environment variables of the process.

    Raises:
        RuntimeError: If srun or mpirun has started several processes, since each would train by itself.
    """
    if own is not None:
        return own
    # RANK alone is too common a name to identify torchrun.
    by_hand = "RANK" in environ and ("WORLD_SIZE" in environ or "LOCAL_RANK" in environ)
    if by_hand or RUN_ID in environ:
        found = {name: environ[name] for name in _VARIABLES if name in environ}
        return None if place_of(found).world_size == 1 < world_size else found
    for launcher, name in {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}.items():
        if environ.get(name, "1") != "1":
            raise RuntimeError(
                f"{launcher} has started {environ[name]} processes ({name}), but nothing says that they train together."
                " Start one torchrun on each node, or pass the cluster environment of your cluster to DDPStrategy."
                " [J873]"
            )
    return None


def _store_of(environment: Any) -> dist.Store:
    """Connect to the store where the processes of a launcher meet, and serve it first if this is rank 0.

    With torchrun, its agent may serve the store, which then holds keys of ranks from before a restart, and those of
    other jobs. So each job uses a part of it. Rank 0 of another job may serve a store at the same address, which
    ``fresh_store`` notices.

    Raises:
        ValueError: If the environment does not describe this process.
        torch.distributed.DistError: If the store cannot be reached within 5 minutes, or its port is taken.
    """
    place, variables = place_of(environment, address=True), _variables_of(environment)
    address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    if variables.get(USE_AGENT_STORE) == str(True):
        store = dist.TCPStore(*address, place.world_size, is_master=False)
        return dist.PrefixStore(job_of(variables, place.world_size), store)
    if place.rank == 0:
        if address not in _served:
            # Multi-tenant: the script itself may have made a process group on the same port.
            options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
            _served[address] = dist.TCPStore(*address, **options)
        return _served[address]
    return dist.TCPStore(*address, place.world_size, is_master=False)


_served: dict[tuple[str, int], dist.TCPStore] = {}
"""The stores that this process serves. They live until it ends, since other ranks may need them longer."""

_servers: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
"""The processes that serve stores for the launches of this process. They end with it."""

_SERVER = """
import sys
from torch.distributed import TCPStore

store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
print(flush=True)
sys.stdin.read()
"""


def _serve_beside(node: Node) -> None:
    """Have a process serve the store of all nodes, if this is the first node.

    A thread of this process could do it. But it may hold a lock while a later launch forks, which would stay locked in
    the worker for good.

    Raises:
        LaunchError: If it cannot be served there.
    """
    if node.address is None or 0 not in node.ranks or node.address in _servers:
        return
    host, port = node.address
    command = [sys.executable, "-c", _SERVER, host, str(port)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ)
    if not cast("BinaryIO", server.stdout).readline():
        error = server.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
        #: The text comes from torch or from the system. Another program may listen on the port, or a process group that
        #: the script has made.
        raise LaunchError(
            f"The store of all nodes cannot be served at {host}:{port}: {error}. Set MASTER_ADDR to an address of the"
            " node with NODE_RANK=0, and MASTER_PORT to a free port there. [J887]"
        )
    _servers[node.address] = server


# -- the parent -------------------------------------------------------------------------------------------------------


def _needs_fork(call: Any, path: Path) -> bool:
    """Write the call for processes that are not forked, and return whether only forked processes can run it.

    Other processes cannot import definitions of a session: a notebook, the prompt of Python, ``python -c`` or stdin.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    is_session = getattr(main, "__spec__", None) is None and file in (None, "<stdin>")
    try:
        write(call, path)
    except NotPicklable:
        if is_session:
            return True
        raise
    if not is_session or file:  # a process that is not forked would look for a file of the name "<stdin>"
        return is_session
    with open(path, "rb") as written, mmap.mmap(written.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(b"c__main__\n") >= 0  # as pickle writes the module of a function or class


def read(path: Path) -> Any:
    """Return the value that :func:`write` has written; its tensors are mapped."""
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


def _error_of(failure: Failure) -> BaseException:
    """Return the exception of a rank, with its traceback as the cause."""
    if failure.exit_code is not None:
        return WorkerDied(failure.rank, failure.exit_code)
    try:
        error: BaseException = pickle.loads(failure.pickled)
    except Exception:  # the class cannot be pickled, or cannot be imported here
        #: Read its traceback above. Define the exception's class in a file, with an __init__ that accepts its args. If
        #: the text ends with an error about a file, free space there, or set TMPDIR to a folder with more space.
        error = WorkerRaised(
            f"Rank {failure.rank} raised an exception that cannot be sent to this process: {failure.text}. [J216]"
        )
    error.__cause__ = RemoteTraceback(f"\non rank {failure.rank}\n{failure.trace}")
    return error


# -- a worker ---------------------------------------------------------------------------------------------------------


def _placed(args: Sequence[Any], place: Place) -> list[Any]:
    return [place if arg is Place else arg for arg in args]


def _put(field: Any, path: Path) -> Any:
    """Return a field of a result, or the name of a file that has it, which is then read as the parent will read it."""
    with suppress(TypeError, ValueError, RecursionError):  # it is not plain data
        if len(json.dumps(field)) <= _SHORT:
            return field
    write(field, path)
    read(path)
    return Path(path.name)


def _read_call(folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function that a process which was not forked runs, and its arguments; take the parent's settings."""
    try:
        fn, args, captured = torch.load(folder / "call", weights_only=False, mmap=True)
    except AttributeError as error:
        raise LaunchError(
            f"A started process cannot import a part of the call: {error}. Define functions and classes at the top"
            " level of a file, outside of if __name__ == \"__main__\", or fork the processes: start_method='fork', or"
            " strategy='ddp_fork' of a Trainer. [J621]"
        ) from error
    settings.restore(captured)
    return fn, args


def write(value: Any, path: Path) -> None:
    """Write ``value`` for another process.

    Raises:
        NotPicklable: If it cannot be pickled.
        OSError: If it cannot be written, with ``errno.ENOSPC`` if the disk is full.
    """
    try:
        with replacing(path, 0o600) as file:
            save(value, file.write)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotPicklable(
            f"The {path.name.partition('-')[0]} cannot be pickled for another process: {described(error)}. The cause is"
            f" {_culprit(value)}. Use functions and classes from the top level of a file, or fork the processes:"
            " start_method='fork', or strategy='ddp_fork' of a Trainer. [J230]"
        ) from error


def _culprit(value: Any, place: str = "") -> str:
    """Return the name of a part that cannot be pickled, of which all parts can."""
    if isinstance(value, Mapping):
        parts = [(f"{place}[{key!r}]", part) for key, part in cast("Mapping[Any, Any]", value).items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{place}[{i}]" if place else "", part) for i, part in enumerate(cast("Sequence[Any]", value))]
    else:
        place = place or type(value).__name__
        held: Mapping[str, Any] = getattr(value, "__dict__", {})
        parts = [(f"{place}.{name}", part) for name, part in held.items()]
    for name, part in parts:
        try:
            pickle.dumps(part)
        except RecursionError:
            break
        except Exception:
            return _culprit(part, name)
    return f"{place or 'an object'}, of type {type(cast('object', value)).__name__}"
