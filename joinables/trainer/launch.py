"""A function run as all ranks of a process group: :class:`Launcher`.

If the launcher starts the processes, the parent and each worker share the work as follows::

    parent                                      worker
    pickles fn and args into a file
    binds a port, and starts the workers        maps the file
    serves a store at that port                 asks the socket for its port, and closes its copy
                                                meets the others at the store; the first removes the file
    waits until the processes end               makes the process group
                                                runs fn
                                                the first puts one tuple into the queue: its result
                                                puts "done" into the store; waits a while for the other ranks
                                                takes the group down, unless fn raised, or did so itself
                                                leaves a report: that fn returned, or its exception
    reads the reports                           ends
    ends the others after a failure
    gets the tuple, once; maps its files

With several nodes, there is a parent on each. The first worker of a node has the lowest rank there. The parent of the
first node serves the store, at the address that ``MASTER_ADDR`` and ``MASTER_PORT`` name.

A process that torchrun or another launcher has started does the middle part of the worker, and keeps the result or the
exception of ``fn`` for itself.

torchrun describes the rank of a process and the address of the store in environment variables. The variables are read,
never set. For another launcher, the user passes a :class:`ClusterEnvironment`.

The tuple has short fields themselves, and of long ones the name of a file. So it is shorter than ``PIPE_BUF``, and no
pipe can be full while its reader waits for the writer to end. A report is complete or missing if its writer is killed.
Space for a short report is reserved before the workers start, so a failure can be reported, shortened, even if the disk
is full.

A process that a worker forks or starts is not a worker. It has a copy of all that the worker has open, so the parent
waits for the end of the process itself, and not for a pipe. A fork that leaves ``fn`` ends there.

Files are mapped and not copied: all workers share the tensors of the call in memory until they change them.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig
from typing_extensions import override

from join import JoinTimeoutError, PeerError
from join.collectives import collective_of
from join.collectives._torch_private import let_go_before_exit
from join.collectives.broken import is_broken
from join.collectives.store import local_store
from join.collectives.timeouts import TIMEOUTS
from join.errors import add_note, described
from join.generators import used_accelerator
from joinables.processes import ended, ending_forks, start, wait_for_all
from joinables.trainer import output, settings
from joinables.trainer.files import replacing, save, temporary_folder
from joinables.trainer.rendezvous import fresh_store, job_of

StartMethod: TypeAlias = Literal["spawn", "fork", "forkserver"]

_T = TypeVar("_T")

_LOOPBACK = "127.0.0.1"  # the address of this machine, which all started processes share
_SPARE = 4096  # bytes that are reserved for the report of each rank
_SHORT, _MOST_FIELDS = 200, 15  # characters of a field of the tuple, and fields; longer ones go through files


class LaunchError(RuntimeError):
    """Base of all errors of a launch: ``fn`` did not run on all ranks, or its result is not available."""


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
            names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
            #: SIGKILL is sent when memory has run out (see the kernel's log), or by the person or scheduler that ended
            #: the job. SIGABRT and SIGSEGV come from native code. Read its last messages in the output.
            return f"Rank {self.rank} was killed by {names.get(-self.exit_code, f'signal {-self.exit_code}')}. [J214]"
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
    have the parent's environment variables. They end with the parent, and at Ctrl-C.

    Args:
        world_size: The number of ranks.
        start_method: How processes are started, if this launcher starts them. ``fork`` does not pickle ``fn`` and its
            arguments. It is safe only before the parent has computed on several threads, or on a GPU. With the other
            two, each worker imports the main script, so start the run under ``if __name__ == "__main__"``.
        backend: The backend of the process group.
        timeout: The timeout of the process group's collectives; torch's by default.
        worker_logs: The folder for the output of the processes that this launcher starts; ``None`` to write where this
            process writes. If there are several ranks, each line then begins with the rank.
        environment: The place of this process, if a launcher has started it; by default, the environment variables of
            torchrun say whether it has.
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
        worker_logs: Path | None = None,
        environment: Environment | None = None,
        node: Node | None = None,
    ) -> None:
        self._environment = launcher_of(world_size, environment)
        started = world_size if self._environment is None else self._environment.place.world_size
        self._node = node or Node(range(world_size))
        if world_size < 1 or world_size != started:
            raise ValueError(
                f"{world_size=} is not positive, or is not the number of processes that a launcher has started. Pass"
                " the number of processes that torchrun has started, or at least 1 without it. [J411]"
            )
        multiprocessing.get_context(start_method)  # raises a ValueError if the method is unknown
        self._world_size = world_size
        self._start_method: StartMethod = start_method
        self._options = {"backend": backend, "timeout": timeout}
        self._worker_logs = worker_logs

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
            LaunchError: If this process has a process group or has used its GPU, and processes are to be forked.
            OSError: If the call or the result does not fit on the disk of the temporary folder, which ``TMPDIR`` names.
            BaseException: The exception that ``fn`` raised on a rank, with the worker's traceback as its cause. If
                several ranks failed, it is the exception that caused the others, of the lowest such rank.
        """
        environment = self._environment
        if environment is None:
            return self._start(fn, args)
        place = environment.place
        store = fresh_store(environment.store(), place.rank, place.world_size, environment.environ)
        return _as_rank(place, store, self._options, ending_forks()(fn), _placed(args, place))

    def _start(self, fn: Callable[..., _T], args: tuple[Any, ...]) -> _T:
        """Run ``fn(*args)`` in processes that are started for it."""
        forks, ranks = self._start_method == "fork", self._node.ranks
        if forks and dist.is_initialized():
            raise LaunchError(
                "start_method='fork' would copy the process group of this process. Destroy the group first, or pass"
                " start_method='spawn'. [J224]"
            )
        if forks and self._uses_gpu:
            raise LaunchError(
                "This process has used its GPU, so processes that start_method='fork' starts cannot use it. Pass"
                " start_method='spawn', or do not use the GPU before the launch. [J500]"
            )
        threads = min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // len(ranks)))
        if self._worker_logs is not None:
            output.create(self._worker_logs, ranks)
        with temporary_folder() as name, socket.create_server((_LOOPBACK, 0)) as listening:
            folder = Path(name)
            if not forks and _needs_fork((fn, args, settings.capture()), folder / "call"):
                if dist.is_initialized() or self._uses_gpu:
                    raise LaunchError(
                        "The call uses functions or classes of a notebook, a prompt, python -c or stdin, which only"
                        " forked processes have. This process has used its GPU or has a process group, so it cannot be"
                        " forked. Restart it and launch first, as strategy='ddp_fork' of a Trainer requires, too. Or"
                        " move the definitions into a file, and import them. [J620]"
                    )
                # This process may have computed on several threads, and a fork of it has none of them.
                forks, threads = True, 1
            for rank in ranks:
                (folder / f"spare-{rank}").write_bytes(bytes(_SPARE))
            start_method = "fork" if forks else self._start_method
            results = multiprocessing.get_context(start_method).SimpleQueue()
            call = (fn, args) if forks else None
            job = _Job(
                self._world_size,
                self._node,
                self._options,
                threads,
                folder,
                self._worker_logs,
                results,
                listening,
                call,
            )
            if failures := _run(job, start_method):
                (_, _, error, _), *others = sorted(failures, key=lambda failure: failure[:2])
                if others:
                    text = "; ".join(f"rank {rank} failed too: {text[:200]}" for _, rank, _, text in others)
                    add_note(error, text)
                raise error
            is_tuple, *fields = results.get()
            got = tuple(read(folder / field) if isinstance(field, _Name) else field for field in fields)
            return cast("Any", got if is_tuple else got[0])

    @property
    def _uses_gpu(self) -> bool:
        """Whether the ranks use GPUs, and this process has used its own."""
        return self._options["backend"] != "gloo" and used_accelerator() is not None


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


@dataclass(frozen=True)
class _Job:
    """The task of a worker.

    Attributes:
        node: The ranks of the workers.
        options: The options of the process group.
        worker_logs: The folder for the output of the workers, if it has one.
        results: The queue into which the first worker puts one tuple: the result of ``fn``.
        listening: The socket of the store, which all workers inherit. The store is served only after all workers are
            forked: a fork copies locks as they are, and the store's thread takes a lock of the C library at each
            connection. Until then, connections wait.
        call: ``fn`` and its arguments, for forked workers. Others read them from the file ``call`` in ``folder``, with
            the settings of the parent.
    """

    world_size: int
    node: Node
    options: dict[str, Any]
    threads: int
    folder: Path
    worker_logs: Path | None
    results: Any
    listening: socket.socket
    call: tuple[Callable[..., Any], tuple[Any, ...]] | None


# -- processes that a launcher has started ----------------------------------------------------------------------------

_made: WeakSet[dist.ProcessGroup] = WeakSet()
"""The process groups that launches have made in this process."""

_served: dict[tuple[str, int], dist.TCPStore] = {}
"""The stores that this process serves as rank 0. They live until it ends, since other ranks may need them longer."""


def _serve(address: tuple[str, int]) -> dist.TCPStore:
    """Return the store that this process serves at an address."""
    if address not in _served:
        # Multi-tenant: the script itself may have made a process group on the same port.
        _served[address] = dist.TCPStore(*address, is_master=True, wait_for_workers=False, multi_tenant=True)
    return _served[address]


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


@dataclass(frozen=True)
class Environment:
    """torchrun's environment variables, or a user's environment that is written as such.

    The processes meet at a store. With torchrun, its agent may serve the store (``TORCHELASTIC_USE_AGENT_STORE``); the
    store then holds keys of ranks from before a restart. Otherwise rank 0 serves it.

    Rank 0 of another job may serve a store at the same address, which ``fresh_store`` notices. An agent of torchrun may
    serve the store of several jobs, so each job uses a part of that store.

    Attributes:
        name: The launcher's name, for messages.
        environ: The environment variables.
    """

    name: str
    environ: Mapping[str, str]

    @property
    def place(self) -> Place:
        """The numbers of this process.

        Raises:
            ValueError: If a variable is missing or makes no sense.
        """
        rank, world_size = self._number("RANK"), self._number("WORLD_SIZE")
        if rank >= world_size:
            self._refuse(f"RANK={rank} is not below WORLD_SIZE={world_size}")
        # Systems that start one process on each node set no number on the node.
        is_alone = world_size == 1 and "LOCAL_RANK" not in self.environ
        return Place(rank, world_size, 0 if is_alone else self._number("LOCAL_RANK"))

    def store(self) -> dist.Store:
        """Connect to the store where the processes meet, and serve it first if that is the task of this rank.

        Raises:
            ValueError: If the variables do not contain its address, or a variable that ``place`` needs.
            torch.distributed.DistError: If the store cannot be reached within 5 minutes, or its port is taken.
        """
        place, address = self.place, self.address()
        if self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):  # an agent may serve several jobs
            return dist.PrefixStore(
                job_of(self.environ, place.world_size), dist.TCPStore(*address, place.world_size, is_master=False)
            )
        if place.rank != 0:
            return dist.TCPStore(*address, place.world_size, is_master=False)
        return _serve(address)

    def address(self) -> tuple[str, int]:
        """Return host and port of the store."""
        host, port = self.environ.get("MASTER_ADDR"), self.environ.get("MASTER_PORT")
        if not host or not port:
            self._refuse("MASTER_ADDR and MASTER_PORT do not name rank 0's node and a free port on it")
        return host, self._number("MASTER_PORT")

    def _number(self, name: str) -> int:
        text = self.environ.get(name, "")
        if not re.fullmatch(r"\d+", text):
            self._refuse(f"{name}={text!r} is not a whole number")
        return int(text)

    def _refuse(self, problem: str) -> NoReturn:
        raise ValueError(
            f"{problem}. Start the script with {self.name}, so that every process has its variables, set the missing"
            " variables yourself, or unset all of them to run without a launcher. [J410]"
        )


class ClusterEnvironment(Protocol):
    """Launcher that has started this process: an object for ``DDPStrategy(cluster_environment=...)``.

    Cluster environments of Lightning have these methods and properties.
    """

    @property
    def main_address(self) -> str:
        """Name or address of the host of rank 0."""
        ...

    @property
    def main_port(self) -> int:
        """Free port on that host, the same on all ranks."""
        ...

    def world_size(self) -> int:
        """Return the number of processes."""
        ...

    def global_rank(self) -> int:
        """Return the number of this process among all processes, from 0."""
        ...

    def local_rank(self) -> int:
        """Return the number of this process on its node, from 0."""
        ...


def environment_of(own: ClusterEnvironment) -> Environment:
    """Return a user's environment, written as the variables of torchrun.

    Raises:
        ValueError: If a method or property is missing or fails, or its value makes no sense.
    """
    try:
        environ = {
            "RANK": str(own.global_rank()),
            "WORLD_SIZE": str(own.world_size()),
            "LOCAL_RANK": str(own.local_rank()),
            "MASTER_ADDR": str(own.main_address or ""),
            "MASTER_PORT": str(own.main_port),
        }
        environment = Environment(type(own).__name__, environ)
        _ = environment.place, environment.address()
        return environment
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = described(error).partition(". ")[0]
        raise ValueError(
            f"cluster_environment={own!r} does not describe this process ({problem}). Define the methods global_rank(),"
            " world_size() and local_rank(), which return numbers from 0 on, and the properties main_address and"
            " main_port with a host and a free port of rank 0. [J711]"
        ) from error


def launcher_of(world_size: int, own: Environment | None = None) -> Environment | None:
    """Return the launcher that started the processes of a run with ``world_size`` processes; ``None`` without one.

    A launcher that has started a single process has not started a larger run.

    Args:
        world_size: The number of processes.
        own: The launcher that the user has passed, if any. Then environment variables are not read.
    """
    if own is not None:
        return own
    environment = detect_environment(os.environ)
    return None if environment is None or environment.place.world_size == 1 < world_size else environment


def detect_environment(environ: Mapping[str, str]) -> Environment | None:
    """Return torchrun's environment if it has started this process, or somebody has set its variables; or ``None``.

    Args:
        environ: The environment variables of the process.

    Raises:
        RuntimeError: If srun or mpirun has started several processes, since each would train by itself.
    """
    # RANK alone is too common a name to identify torchrun.
    by_hand = "RANK" in environ and ("WORLD_SIZE" in environ or "LOCAL_RANK" in environ)
    if by_hand or "TORCHELASTIC_RUN_ID" in environ:
        return Environment("torchrun", environ)
    for launcher, name in {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}.items():
        if environ.get(name, "1") != "1":
            raise RuntimeError(
                f"{launcher} has started {environ[name]} processes ({name}), but nothing says that they train together."
                " Start one torchrun on each node, or pass the cluster environment of your cluster to DDPStrategy."
                " [J873]"
            )
    return None


# -- the parent -------------------------------------------------------------------------------------------------------

_OWN, _ABORTED, _OTHERS = 0, 1, 2
"""Values of ``blame``: the rank itself failed; it aborted, as libraries do that lose peers; another rank's failure."""

_Failure: TypeAlias = tuple[int, int, BaseException, str]
"""The failure of a rank: blame, rank, exception, text. Failures with the lowest blame caused the others."""


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


def _run(job: _Job, start_method: StartMethod) -> list[_Failure]:
    """Start the workers, wait until all have ended, and return their failures; no worker is left running."""
    workers: list[BaseProcess] = []
    try:
        for rank in job.node.ranks:
            workers.append(start(_work, rank, job, method=start_method))
        store = local_store(job.listening)
        if job.node.address is not None and 0 in job.node.ranks:
            _serve(job.node.address)
        try:
            return _watch(dict(zip(job.node.ranks, workers, strict=True)), job.folder)
        finally:
            del store  # an exception that passes here keeps this frame, and with it the socket
    finally:
        _end(workers)


def _watch(workers: Mapping[int, BaseProcess], folder: Path) -> list[_Failure]:
    """Wait until all workers have ended, or for a while after the first failure, and return the failures."""
    running = {worker: rank for rank, worker in workers.items()}
    failures: list[_Failure] = []
    silent, deadline = set(workers), None  # the ranks that have not left a report
    while running and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(deadline - time.monotonic(), TIMEOUTS.look)
        gone = [running.pop(worker) for worker in ended(running, left)]
        # A worker leaves its report before it ends, so the reports of all ended workers exist.
        for rank in sorted(silent):
            if (report := folder / f"report-{rank}").exists():
                silent.remove(rank)
                failures += _failures_in(rank, report.read_bytes())
        for rank in gone:
            workers[rank].join()
            code = workers[rank].exitcode or 0
            if rank in silent:
                error = WorkerDied(rank, code)
                failures.append((_ABORTED if code == -signal.SIGABRT else _OWN, rank, error, str(error)))
        if failures and deadline is None:
            deadline = time.monotonic() + TIMEOUTS.first
    return failures


def _failures_in(rank: int, report: bytes) -> list[_Failure]:
    """Return the failure in a worker's report; none if ``fn`` has returned."""
    if (parts := pickle.loads(report)) is None:
        return []
    text, trace, blame, pickled = parts
    try:
        error: BaseException = pickle.loads(pickled)
    except Exception:  # the class cannot be pickled, or cannot be imported here
        #: Read its traceback above. Define the exception's class in a file, with an __init__ that accepts its args. If
        #: the text ends with an error about a file, free space there, or set TMPDIR to a folder with more space.
        error = WorkerRaised(f"Rank {rank} raised an exception that cannot be sent to this process: {text}. [J216]")
    error.__cause__ = RemoteTraceback(f"\non rank {rank}\n{trace}")
    return [(blame, rank, error, text)]


def _end(workers: Sequence[BaseProcess]) -> None:
    """Terminate the workers that still run, kill those that do not end in time, and return when all have ended."""
    try:
        for worker in workers:
            worker.terminate()
        wait_for_all([worker for worker in workers if worker.is_alive()], TIMEOUTS.term)
    finally:  # runs even if Ctrl-C is pressed again
        for worker in workers:
            worker.kill()
            worker.join()


# -- a worker ---------------------------------------------------------------------------------------------------------


def _work(rank: int, job: _Job) -> None:
    """Run the task of a worker process."""
    torch.set_num_threads(job.threads)
    try:
        with job.listening:  # the copy of this process
            address = job.node.address or cast("tuple[str, int]", job.listening.getsockname())
        output.begin(rank, job.world_size, job.folder, job.worker_logs)
        fn, args = _call_of(job)
        place = Place(rank, job.world_size, job.node.ranks.index(rank))
        store = fresh_store(dist.TCPStore(*address, is_master=False), rank, job.world_size)
        if place.local_rank == 0:  # all ranks have opened it, and it should not stay if the parent is killed
            (job.folder / "call").unlink(missing_ok=True)
        _as_rank(place, store, job.options, _run_and_put, (job, place, fn, args))
    except SystemExit:
        raise  # fn ends the process with this code, which the parent reads
    except BaseException as error:
        blame = _OTHERS if isinstance(error, (PeerError, JoinTimeoutError)) or is_broken(error) else _OWN
        trace = "".join(traceback.format_exception(error))
        text = "".join(traceback.format_exception_only(error))
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = b""
        try:
            _leave_report(rank, job.folder, (text.strip(), trace, blame, pickled))
        except OSError as full:  # all parts together have less bytes than the space that is reserved
            sys.stderr.write(trace)
            text = f"{text[:200]} ({str(full)[:50]}: {str(job.folder)[:150]!r})"
            trace = "(The traceback is in the output of the rank.)"
            _leave_report(rank, job.folder, (text, trace, blame, pickled if len(pickled) < 2000 else b""))
        sys.exit(1)
    _leave_report(rank, job.folder, None)


def _run_and_put(job: _Job, place: Place, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run ``fn(*args)``; the first worker puts the result before it waits for other ranks, which may fail."""
    with ending_forks():
        result: Any = fn(*_placed(args, place))
    if place.local_rank == 0:
        is_tuple = type(result) is tuple and len(cast("tuple[Any, ...]", result)) <= _MOST_FIELDS
        fields: Sequence[Any] = cast("tuple[Any, ...]", result) if is_tuple else [result]
        job.results.put((is_tuple, *(_put(field, job.folder, number) for number, field in enumerate(fields))))


def _placed(args: Sequence[Any], place: Place) -> list[Any]:
    return [place if arg is Place else arg for arg in args]


class _Name(str):
    """Name of a file with a field of a result."""


def _put(field: Any, folder: Path, number: int) -> Any:
    """Return a field of a result, or the name of a file that has it, which is then read as the parent will read it."""
    with suppress(TypeError, ValueError, RecursionError):  # it is not plain data
        if len(json.dumps(field)) <= _SHORT:
            return field
    write(field, folder / f"result-{number}")
    read(folder / f"result-{number}")
    return _Name(f"result-{number}")


def _call_of(job: _Job) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function of a job, and its arguments; a process that was not forked takes the parent's settings."""
    if job.call is not None:
        return job.call
    try:
        fn, args, captured = torch.load(job.folder / "call", weights_only=False, mmap=True)
    except AttributeError as error:
        raise LaunchError(
            f"A started process cannot import a part of the call: {error}. Define functions and classes at the top"
            " level of a file, outside of if __name__ == \"__main__\", or fork the processes: start_method='fork', or"
            " strategy='ddp_fork' of a Trainer. [J621]"
        ) from error
    settings.restore(captured)
    return fn, args


def _leave_report(rank: int, folder: Path, report: tuple[Any, ...] | None) -> None:
    """Leave the report of a rank. A short one fits into the space that the parent has reserved."""
    with open(spare := folder / f"spare-{rank}", "r+b") as file:
        file.write(pickle.dumps(report))
    spare.rename(folder / f"report-{rank}")


def _as_rank(
    place: Place, store: dist.Store, options: dict[str, Any], fn: Callable[..., _T], args: Sequence[Any]
) -> _T:
    """Run ``fn(*args)`` as one rank of the default process group; all ranks call it equally often.

    Args:
        place: The rank.
        store: A store without keys of an earlier launch, or of ranks that were killed.
        options: The options of the process group.
        fn: The function.
        args: Its arguments.
    """
    if dist.is_initialized() and dist.group.WORLD in _made and collective_of(None).kept.lost:
        dist.destroy_process_group()  # a failure in an earlier launch, which all ranks have raised, has left it
    made = not dist.is_initialized()
    if made:
        dist.init_process_group(store=store, rank=place.rank, world_size=place.world_size, **options)
        _made.add(cast("dist.ProcessGroup", dist.group.WORLD))
    found = f"rank {dist.get_rank()} of {dist.get_world_size()}, backend {dist.get_backend_config()}"
    backend = BackendConfig(cast("dist.Backend", dist.Backend(options["backend"])))
    wanted = f"rank {place.rank} of {place.world_size}, backend {backend}"
    if found != wanted:
        raise LaunchError(
            f"The default process group ({found}) contradicts the launch ({wanted}). Create the group with the ranks"
            " and the backend of the launch, or let the launch create it. [J048]"
        )
    # After the group is destroyed, one of its threads may still be clearing the callback of a comm hook. That thread
    # must not free the group, so it is held until the end.
    group: Any = dist.group.WORLD
    let_go_before_exit(group)
    result = fn(*args)
    if dist.is_initialized():  # fn may have destroyed it
        # If a rank takes its group down while others still use theirs, a gloo thread may abort those ranks. But the
        # result of this rank must not be lost because another rank takes long.
        store.set(f"done/{place.rank}", "")
        with suppress(dist.DistError):
            store.wait([f"done/{rank}" for rank in range(place.world_size)], timedelta(seconds=TIMEOUTS.end))
        if made:
            dist.destroy_process_group()
    del group
    return result


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
