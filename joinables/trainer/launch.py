"""Running one function as all ranks of a process group: :class:`Launcher`.

The parent and a worker, where the launcher starts the processes::

    parent                                      worker
    pickles fn and args into a file
    starts the workers
    serves a store, tells its port              waits for the port; reads the file
    waits for the ends of processes             makes the process group
                                                runs fn
                                                "done" into the store; waits for the others', or some seconds
                                                takes the group down, unless fn raised, or did so itself
                                                writes its result (rank 0) or what it raised into a file
                                                one message: (rank, whether it returned)
    the message of each that has ended          ends
    ends the others after a failure
    reads the file

Processes that torchrun, SLURM or MPI has started do the worker's middle part, and each keeps what ``fn`` returns or
raises.

These launchers say in environment variables which process this is, and where the processes meet. The variables are
read, never set.

Whatever may be long goes through a file. So no pipe can be full while its reader waits for the writer to end, and a
message is there as a whole or not at all when its writer is killed.

Sources: "torchrun (Elastic Launch)" in PyTorch's documentation; "OUTPUT ENVIRONMENT VARIABLES" in srun(1);
"Environment variables set for MPI applications" in Open MPI's documentation; Hydra's variables as MPICH and Intel MPI
set them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from typing_extensions import override

from join import JoinTimeoutError, PeerError
from join.collectives import TorchCollective
from join.collectives.broken import is_broken
from join.collectives.store import fresh_store
from join.collectives.timeouts import timeouts
from join.errors import add_note, described
from joinables.trainer.accelerator import used_accelerator

StartMethod: TypeAlias = Literal["spawn", "fork", "forkserver"]

_T = TypeVar("_T")

_LOOPBACK = "127.0.0.1"  # the address of this machine, for processes that are all on it


class LaunchError(RuntimeError):
    """Base of all errors of a launch: ``fn`` was not carried out on all ranks, or its result could not be had."""


class WorkerDied(LaunchError):
    """A worker ended without a result or an exception: it was killed, or it exited by itself.

    Args:
        rank: the worker's rank.
        exit_code: as ``multiprocessing.Process.exitcode``: negative for a signal.
    """

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(rank, exit_code)  # the arguments and not the text, so that it can be pickled
        self.rank, self.exit_code = rank, exit_code

    @override
    def __str__(self) -> str:
        if self.exit_code < 0:
            names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
            #: SIGKILL comes when memory has run out (the kernel's log says so), or from who ended the job; SIGABRT and
            #: SIGSEGV come from native code, whose last words are in the output.
            return f"rank {self.rank} was killed by {names.get(-self.exit_code, f'signal {-self.exit_code}')} [J214]"
        #: Something called sys.exit or os._exit on that rank, or its main script could not be imported; see the output.
        return (
            f"rank {self.rank} exited with code {self.exit_code} before it returned a result. If that was while it"
            ' imported the main script: what starts the run there belongs under if __name__ == "__main__" [J215]'
        )


class WorkerRaised(LaunchError):
    """A worker raised an exception that cannot be pickled; the message has the rank, and its type and text."""


class NotPicklable(LaunchError):
    """``fn``, an argument or the result cannot be pickled for another process."""


class RemoteTraceback(Exception):
    """The traceback of a worker, as text: the ``__cause__`` of the exception that a launch raises for that worker."""


class Launcher:
    """Runs a function as every rank of a process group, in processes that it starts or that are there already.

    Processes are started unless torchrun, SLURM or MPI have started this one. Workers keep the parent's number of torch
    threads unless all of them together would have more than there are processors. Their environment variables are the
    parent's. They end with the parent, and at Ctrl-C.

    Args:
        world_size: the number of ranks.
        start_method: how processes are started, if they are. ``fork`` needs no pickling of ``fn`` and its arguments,
            and is safe only before the parent has computed on several threads, or on a GPU. With the other two the main
            script is imported by each worker, so what starts the run belongs under ``if __name__ == "__main__"``.
        backend: of the process group.
        timeout: of the process group's collectives; by default, torch's.

    Raises:
        ValueError: if ``world_size`` is not positive or not what was started; for an unknown ``start_method``.
    """

    def __init__(
        self,
        world_size: int,
        *,
        start_method: StartMethod = "spawn",
        backend: str = "gloo",
        timeout: timedelta | None = None,
    ) -> None:
        self._environment = detect_environment()
        started = world_size if self._environment is None else self._environment.place.world_size
        if world_size < 1 or world_size != started:
            raise ValueError(f"world_size={world_size} must be at least 1, and as many as were started, if any [J411]")
        multiprocessing.get_context(start_method)  # an unknown one is its ValueError
        self._world_size = world_size
        self._start_method: StartMethod = start_method
        self._options = {"backend": backend, "timeout": timeout}

    def launch(self, fn: Callable[..., _T], *args: Any) -> _T:
        """Run ``fn(*args)`` on all ranks, with the default process group set up.

        Where processes were started by others, all of them have to call this, equally often. Each then gets its own
        result; after an exception its group stays, since taking it down could wait for what the others never send.

        Args:
            fn: the function; importable, unless processes are forked or were started by others.
            args: its arguments. Pickled as they are; tensors are copied, not shared.

        Returns:
            What it returned on rank 0. Tensors are on the CPU, if they come from a process started here.

        Raises:
            NotPicklable: if ``fn`` or an argument (before any process starts) or the result cannot be pickled.
            WorkerDied: if a worker did not live to the end of ``fn``.
            WorkerRaised: if a worker raised something that cannot be pickled.
            LaunchError: if this process has a group, which forks would copy.
            BaseException: whatever ``fn`` raised on a rank, with the worker's traceback as its cause. If several ranks
                failed, the exception that caused the others, of the lowest such rank.
        """
        environment = self._environment
        if environment is not None:
            return _as_rank(environment.place, environment.store(), self._options, fn, args)
        forks = self._start_method == "fork"
        if forks and dist.is_initialized():
            raise LaunchError("start_method='fork' would copy this process's group; destroy it, or use 'spawn' [J224]")
        if forks and self._options["backend"] != "gloo" and used_accelerator() is not None:
            raise LaunchError(
                "start_method='fork', and this process has used its GPU, which its forks cannot do then; use 'spawn',"
                " or leave the GPU alone before [J500]"
            )
        with tempfile.TemporaryDirectory(prefix="joinables-", ignore_cleanup_errors=True) as folder:
            if not forks:
                # Not by torch.multiprocessing, which would have the workers share the tensors of this process.
                _write((fn, args), Path(folder, "call"))
            context = multiprocessing.get_context(self._start_method)
            ranks = self._world_size
            threads = min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // ranks))
            call = (fn, args) if forks else None
            queues = context.SimpleQueue(), context.SimpleQueue()
            job = _Job(ranks, self._options, threads, Path(folder), *queues, call)
            failures = _run(job, self._start_method)
            if failures:
                (_, _, error, _), *others = sorted(failures, key=lambda failure: failure[:2])
                if others:
                    add_note(error, "; ".join(f"rank {rank} failed too: {text[:200]}" for _, rank, _, text in others))
                raise error
            return torch.load(Path(folder, "result"), map_location="cpu", weights_only=False)


@dataclass(frozen=True)
class _Job:
    """What a worker has to know.

    Attributes:
        options: of the process group.
        ports: the port of the store, once for each worker. It is served when all workers are forked: a fork copies
            locks as they are, and the store's thread takes the C library's when somebody connects.
        messages: one from each worker, with its rank and whether ``fn`` has returned.
        call: ``fn`` and its arguments, for forked workers; the others read them from the file ``call`` in ``folder``.
    """

    world_size: int
    options: dict[str, Any]
    threads: int
    folder: Path
    ports: Any
    messages: Any
    call: tuple[Callable[..., Any], tuple[Any, ...]] | None


# -- processes that somebody else has started -------------------------------------------------------------------------

_served: dict[tuple[str, int], dist.TCPStore] = {}
"""The stores that this process serves as rank 0, until it ends: other ranks may need them longer."""

_FIRST_PORT, _PORTS = 15000, 10000  # below the range from which systems hand out ports to clients


@dataclass(frozen=True)
class Place:
    """Where a process stands in its run.

    Attributes:
        rank: its number among all processes, from 0.
        world_size: the number of processes.
        local_rank: its number among the processes of the same node, from 0.
    """

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class Environment:
    """A launcher that has started this process and says so in environment variables.

    With torchrun, its agent serves the store where the processes meet (``TORCHELASTIC_USE_AGENT_STORE``), with what
    ranks from before a restart have put there; elsewhere rank 0 does. With SLURM that is on the first node of the step,
    unless ``MASTER_ADDR`` says something else, and the port follows from the job's number: two steps of one job at the
    same time need a ``MASTER_PORT`` each. A batch script that calls python without srun looks like task 0 of them all,
    and waits for the others in vain. MPI does not say where rank 0 is: a run on several nodes needs both variables; on
    one node the port follows from the job's name (``PMIX_NAMESPACE``), which Open MPI sets, and Hydra does not.

    Attributes:
        name: for messages.
        environ: the variables.
        names: of the variables with the rank, the number of ranks, and the rank on this node.
    """

    name: str
    environ: Mapping[str, str]
    names: tuple[str, str, str]

    @property
    def place(self) -> Place:
        """Where this process stands.

        Raises:
            ValueError: if a variable is missing or makes no sense.
        """
        place = Place(*map(self._number, self.names))
        if place.rank >= place.world_size:
            self._refuse(f"{self.names[0]}={place.rank} must be below {self.names[1]}={place.world_size}")
        return place

    def store(self) -> dist.Store:
        """Connect to the store where the processes meet; rank 0 may have to serve it.

        Raises:
            ValueError: as for ``place``, if the variables do not say where that is.
            torch.distributed.DistError: if it cannot be reached within 5 minutes, or its port is taken.
        """
        place, address = self.place, self.address()
        if place.rank != 0 or self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            return dist.TCPStore(*address, place.world_size, is_master=False)
        if address not in _served:
            # Multi-tenant: the script itself may have made a process group on the same port.
            _served[address] = dist.TCPStore(
                *address, place.world_size, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        return _served[address]

    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        get = self.environ.get
        host, port = get("MASTER_ADDR"), self._number("MASTER_PORT") if get("MASTER_PORT") else None
        if self.names[0] == "SLURM_PROCID":
            host = host or _first_host(get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST") or "")
            port = port or _FIRST_PORT + self._number("SLURM_JOB_ID") % _PORTS
        elif str(self.place.world_size) in (get("OMPI_COMM_WORLD_LOCAL_SIZE"), get("MPI_LOCALNRANKS")):
            host = host or _LOOPBACK
            if job := get("PMIX_NAMESPACE"):
                port = port or _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
        if not host or not port:
            self._refuse("MASTER_ADDR and MASTER_PORT must be set, to the name of rank 0's node and a free port of it")
        return host, port

    def _number(self, name: str) -> int:
        text = self.environ.get(name, "")
        if not re.fullmatch(r"\d+", text):
            self._refuse(f"{name}={text!r} must be a whole number")
        return int(text)

    def _refuse(self, wrong: str) -> NoReturn:
        raise ValueError(
            f"{wrong}; {self.name} has started this process, or should have: start the script with it, such that all"
            " processes have this variable, or unset its variables [J410]"
        )


def detect_environment(environ: Mapping[str, str] | None = None) -> Environment | None:
    """Find out what started this process: torchrun, else SLURM, else MPI; ``None`` for nothing of these.

    Args:
        environ: the variables; those of this process by default.
    """
    environ = os.environ if environ is None else environ
    # torchrun is often called by srun or mpirun, once a node: the innermost launcher started this process.
    # RANK alone is too common a name to tell anything.
    by_hand = "RANK" in environ and ("WORLD_SIZE" in environ or "LOCAL_RANK" in environ)
    if by_hand or "TORCHELASTIC_RUN_ID" in environ:
        return Environment("torchrun", environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # mpirun inside an allocation of SLURM: its processes all inherit the number of the task that called it.
    by_mpi = "OMPI_COMM_WORLD_RANK" in environ or "MPI_LOCALRANKID" in environ
    if "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ and not by_mpi:
        # salloc's shell may be a step of its own, of one task; what srun starts from there has its name, too.
        job, alone = environ.get("SLURM_JOB_NAME"), environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
        if job != "bash" and not (job == "interactive" and alone):
            return Environment("SLURM's srun", environ, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    if "OMPI_COMM_WORLD_RANK" in environ:
        of_mpi = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
        return Environment("MPI's mpirun", environ, of_mpi)
    if "PMI_RANK" in environ:
        return Environment("MPI's mpiexec", environ, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"))
    return None


def _first_host(nodes: str) -> str:
    """The first name in a list of nodes as SLURM writes it: ``node003`` in ``node[003-005,9],login``; or ``""``."""
    first = re.match(r"(?:[\w.-]|\[\d+[\d,-]*\])+(?=,|$)", nodes)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first.group()) if first else ""


# -- the parent -------------------------------------------------------------------------------------------------------

_OWN, _ABORTED, _OTHERS = 0, 1, 2
"""``blame``: the rank failed by itself; it aborted, as libraries do that lose peers; it failed because another did."""

_Failure: TypeAlias = tuple[int, int, BaseException, str]
"""Why a rank failed: blame, rank, exception, text. Failures with the lowest blame caused the others."""


def _run(job: _Job, start_method: StartMethod) -> list[_Failure]:
    """Start the workers, wait for them, and leave none behind; return the failures."""
    before = set(multiprocessing.active_children())
    try:
        start = cast("Any", torch.multiprocessing).start_processes
        started = start(_work, (job,), job.world_size, join=False, start_method=start_method)
        # Port 0: the system picks a free one, so that two runs never meet. Without a socket of ours, the store would
        # listen on all interfaces. Waiting for workers, which wait for the port, would block.
        listening = socket.create_server((_LOOPBACK, 0))
        port, fd = listening.getsockname()[1], listening.detach()
        store = dist.TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        try:
            for _ in range(job.world_size):
                job.ports.put(port)
            return _watch(started.processes, job)
        finally:
            del store  # an exception that passes here keeps this frame, and would keep the socket
    finally:
        _end(set(multiprocessing.active_children()) - before)


def _watch(workers: Sequence[BaseProcess], job: _Job) -> list[_Failure]:
    """Wait until all workers have ended, or a while after the first failure; return the failures."""
    running = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    failures: list[_Failure] = []
    reported, deadline = set[int](), None
    while running and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ended = [running.pop(sentinel) for sentinel in connection.wait(running, left) if isinstance(sentinel, int)]
        # A worker puts its message before it ends: those of workers that have ended are there by now.
        while not job.messages.empty():
            rank, returned = job.messages.get()
            reported.add(rank)
            if not returned:
                failures.append(_failure(rank, job.folder))
        for rank in ended:
            workers[rank].join()
            code = workers[rank].exitcode or 0
            if rank not in reported:
                error = WorkerDied(rank, code)
                failures.append((_ABORTED if code == -signal.SIGABRT else _OWN, rank, error, str(error)))
        if failures and deadline is None:
            deadline = time.monotonic() + timeouts().first
    return failures


def _failure(rank: int, folder: Path) -> _Failure:
    """What a worker has written of what it raised."""
    text, trace, blame, pickled = pickle.loads((folder / f"failure-{rank}").read_bytes())
    try:
        error: BaseException = pickle.loads(pickled)
    except Exception:  # its class can be pickled no more than imported here
        #: Its traceback is above. Give the exception's class an __init__ that its args can be handed to, in a file.
        error = WorkerRaised(f"rank {rank} raised an exception that cannot be pickled: {text} [J216]")
    error.__cause__ = RemoteTraceback(f"\non rank {rank}\n{trace}")
    return blame, rank, error, text


def _end(workers: set[Any]) -> None:
    """Terminate the workers that still run, and kill those that do not end; return when all have ended."""
    try:
        for worker in workers:
            worker.terminate()
        deadline = time.monotonic() + timeouts().term
        for worker in workers:
            worker.join(max(deadline - time.monotonic(), 0.0))
    finally:  # also if Ctrl-C is pressed again
        for worker in workers:
            worker.kill()
            worker.join()


# -- a worker ---------------------------------------------------------------------------------------------------------


def _work(rank: int, job: _Job) -> None:
    """Do all that a worker process does."""
    # torch.multiprocessing has it interrupted when the parent ends. The default ends it also within a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(job.threads)
    try:
        fn, args = job.call or torch.load(job.folder / "call", weights_only=False)
        store = dist.TCPStore(_LOOPBACK, job.ports.get(), is_master=False)
        result = _as_rank(Place(rank, job.world_size, rank), store, job.options, fn, args)
        if rank == 0:
            _write(result, job.folder / "result")
    except SystemExit:
        raise  # fn wants the process to end with this code; the parent sees it
    except BaseException as error:
        is_of_others = isinstance(error, (PeerError, JoinTimeoutError)) or is_broken(error)
        text, trace = (
            "".join(made) for made in (traceback.format_exception_only(error), traceback.format_exception(error))
        )
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = b""
        failure = (text.strip(), trace, _OTHERS if is_of_others else _OWN, pickled)
        (job.folder / f"failure-{rank}").write_bytes(pickle.dumps(failure))
        job.messages.put((rank, False))
        sys.exit(1)
    job.messages.put((rank, True))


def _as_rank(
    place: Place, store: dist.Store, options: dict[str, Any], fn: Callable[..., _T], args: Sequence[Any]
) -> _T:
    """Run ``fn(*args)`` as one rank of the default process group; all ranks call it, equally often."""
    # Keys of an earlier launch, or of ranks that were killed, must not be taken for this one's.
    store = fresh_store(store, place.rank, place.world_size)
    collective = TorchCollective(store=store, **options)
    collective.setup(place.rank, place.world_size)
    result = fn(*args)
    if dist.is_initialized():  # fn may have destroyed it
        # A rank that takes its group down while others still use theirs may abort, in threads of gloo's. But what it
        # has to return must not be lost because another one takes long.
        store.set(f"done/{place.rank}", "")
        with suppress(dist.DistError):
            store.wait([f"done/{rank}" for rank in range(place.world_size)], timedelta(seconds=timeouts().end))
        collective.teardown()
    return result


def _write(value: Any, path: Path) -> None:
    """Write ``value`` for another process.

    Raises:
        NotPicklable: if it cannot be pickled.
    """
    try:
        torch.save(value, path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotPicklable(
            f"the {path.name} cannot be pickled for another process: {described(error)}. Use functions and classes"
            " from the top level of a file, or start processes by fork (start_method='fork'; of a trainer,"
            " strategy='ddp_fork') [J230]"
        ) from error
