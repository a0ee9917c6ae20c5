"""Running one function as all ranks of a process group: :class:`Launcher`.

The parent and a worker, where the launcher starts the processes::

    parent                                      worker
    pickles fn and args into a file
    serves a store, starts the workers
    waits for messages and ends of processes    reads the file; if forked, waits until all workers are
                                                sets the group up, awaits the others
                                                runs fn, tears the group down
                                                writes its result (rank 0) or what it raised into a file
                                                puts one message
    reads the message                           ends
    reaps all workers, reads the file
    removes the folder with the files

Processes that torchrun, SLURM or MPI has started do the worker's middle part, and each keeps what ``fn`` returns or
raises. This is the parent's side; the worker's is in ``launch.worker``, the files are in ``launch.payload``.

A message has only a rank and whether it succeeded; whatever may be long goes through a file. So no pipe can be full
while its reader waits for the writer to end, and a message is there as a whole or not at all when its writer is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker, spawn
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
import torch.distributed as dist

from join.collectives.timeouts import timeouts
from joinables.trainer.launch.environment import Environment
from joinables.trainer.launch.errors import ABORTED, OWN, Failure, LaunchError, WorkerDied, raise_cause
from joinables.trainer.launch.folders import temporary_folder
from joinables.trainer.launch.launched import detect_environment
from joinables.trainer.launch.payload import Call, Payload
from joinables.trainer.launch.worker import Job, Queue, as_rank, work

StartMethod: TypeAlias = Literal["spawn", "fork", "forkserver"]

_T = TypeVar("_T")


class Launcher:
    """Runs a function as every rank of a process group, in processes that it starts or that are there already.

    Workers keep the parent's number of torch threads unless all of them together would have more than there are
    processors. Their environment variables are the parent's. They do not hear Ctrl-C: the parent does, and ends them.
    They end when the parent dies. They may have child processes of their own, which end with a worker that is killed:
    each worker makes a process group of its own, so signals to the parent's group, as on Ctrl-Z, do not reach it.

    Args:
        world_size: the number of ranks.
        environment: where the processes come from; by default, what the environment variables say.
        start_method: how processes are started, if they are. ``fork`` needs no pickling of ``fn`` and its arguments,
            and is safe only before the parent has computed on several threads, or on a GPU. With the other two the main
            script is imported by each worker, so what starts the run belongs under ``if __name__ == "__main__"``.
        backend: of the process group.
        timeout: of the process group's collectives; by default, torch's.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if ``world_size`` is not positive or not that of the environment; for an unknown ``start_method``;
            and as ``environment.place``.
    """

    def __init__(
        self,
        world_size: int,
        *,
        environment: Environment | None = None,
        start_method: StartMethod = "spawn",
        backend: str = "gloo",
        timeout: timedelta | None = None,
    ) -> None:
        _check_types(world_size, environment, timeout)
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1 [J221]")
        self._start_method: StartMethod = checked_start_method(start_method)
        self._environment = detect_environment() if environment is None else environment
        if not self._environment.creates_processes and (there := self._environment.place().world_size) != world_size:
            raise ValueError(
                f"world_size={world_size}, but {self._environment.name} started {there} processes; make them the same,"
                " or pass environment=LocalEnvironment() to start processes here [J222]"
            )
        self._world_size = world_size
        self._backend, self._timeout = backend, timeout

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
            WorkerDied: if a worker did not live to the end of ``fn``, or ended with another exit code than 0.
            WorkerRaised: if a worker raised something that cannot be pickled.
            LaunchError: if a process group is in the way, or workers cannot import the main script.
            BaseException: whatever ``fn`` raised on a rank, with the worker's traceback as its cause. If several ranks
                failed, the exception that caused the others, of the lowest such rank.
        """
        if not callable(fn):
            raise TypeError(f"fn={fn!r} cannot be called; give a function [J223]")
        if not self._environment.creates_processes:
            return as_rank(self._environment, self._backend, self._timeout, fn, args)
        forks = self._start_method == "fork"
        if forks and dist.is_initialized():
            raise LaunchError(
                "start_method='fork' would copy this process's group into the workers; destroy it first, or use 'spawn'"
                " [J224]"
            )
        with temporary_folder() as folder:
            payload = Payload(folder)
            if not forks:
                _check_main()
                payload.write_call(fn, args)
            context = multiprocessing.get_context(self._start_method)
            queue = Queue(context)
            with queue.reader, queue.writer, self._environment.hosting(self._world_size) as environments:
                by_server = self._start_method == "forkserver"
                gate = context.Semaphore(0) if forks else None
                job = Job(self._backend, self._timeout, self._threads(), payload, queue, by_server, gate)
                _run(context, job, environments, (fn, args) if forks else None)
            return payload.read_result()

    def _threads(self) -> int:
        """How many threads torch may use in each worker."""
        fair = len(os.sched_getaffinity(0)) // self._world_size
        return min(torch.get_num_threads(), max(1, fair))


def _run(context: Any, job: Job, environments: Sequence[Environment], call: Call | None) -> None:
    """Start the workers, wait for them, and leave none behind; raise the failure that caused the others, if any."""
    # multiprocessing's helpers would start with the first worker otherwise, and ignore Ctrl-C as it does then.
    if job.forked_by_server:
        forkserver.ensure_running()
    elif call is None:
        resource_tracker.ensure_running()
    workers: list[BaseProcess] = []
    try:
        for rank, environment in enumerate(environments):
            # Not a daemon, even if this process is one: daemons may not have children.
            arguments = {"target": work, "args": (job, environment, call), "name": f"rank {rank}", "daemon": False}
            workers.append(context.Process(**arguments))
            with _interrupts_held():
                workers[-1].start()
        if job.all_forked is not None:
            for _ in workers:
                job.all_forked.release()
        failures = _watch(workers, job)
    finally:
        _reap(workers)
    if failures:
        raise_cause(failures)


def _check_main() -> None:
    """Refuse a main script that workers cannot import, such as one that comes from standard input."""
    path = spawn.get_preparation_data("worker").get("init_main_from_path")
    if path is not None and not os.path.exists(path):
        raise LaunchError(
            f"the main script is {os.path.basename(path)!r}, and workers, which import it, cannot: there is no such"
            " file. Write it into one, or start processes by fork (start_method='fork'; of a trainer,"
            " strategy='ddp_fork') [J225]"
        )


@contextmanager
def _interrupts_held() -> Generator[None, None, None]:
    """Hold Ctrl-C back. A worker that starts meanwhile inherits this, so none hits it before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(workers: Sequence[BaseProcess], job: Job) -> list[Failure]:
    """Wait until all workers have ended, or a while after the first failure; return the failures."""
    running = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    failures: dict[int, Failure] = {}
    has_result, deadline = False, None
    while running and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ready = connection.wait([job.queue.reader, *running], left)
        ended = [running.pop(sentinel) for sentinel in list(running) if sentinel in ready]
        # A worker puts its message before it ends: those of workers that have ended are there by now.
        while job.queue.reader.poll():
            rank, ok = job.queue.get()
            if ok:
                has_result = True
            else:
                failures[rank] = job.payload.read_failure(rank)
        for rank in ended:
            workers[rank].join()
            code = workers[rank].exitcode or 0
            returned = has_result if rank == 0 else job.payload.has("returned", rank)
            if rank not in failures and (code != 0 or not returned):
                imported = job.all_forked is not None or job.payload.has("began", rank)
                failures[rank] = _death(rank, code, returned, imported)
        if failures and deadline is None:
            deadline = time.monotonic() + timeouts().first
    return list(failures.values())


def _death(rank: int, code: int, returned: bool, imported: bool) -> Failure:
    """The failure of a worker that ended without telling why; ``imported`` says whether it had the main script."""
    hint = (
        "It ended before its work began, perhaps while it imported the main script, as each worker does: what starts"
        ' the run there belongs under if __name__ == "__main__"'
    )
    error = WorkerDied(rank, code, returned, "" if imported else hint)
    return Failure(rank, error, ABORTED if code == -signal.SIGABRT else OWN, str(error))


def _reap(workers: Sequence[BaseProcess]) -> None:
    """Terminate the workers that still run, and kill those that do not end; return when all have ended."""
    started = [worker for worker in workers if worker.pid is not None]
    try:
        for worker in started:
            worker.terminate()
        deadline = time.monotonic() + timeouts().term
        for worker in started:
            worker.join(max(deadline - time.monotonic(), 0.0))
    finally:  # also if Ctrl-C is pressed again
        for worker in started:
            _kill_group(worker)
            worker.kill()
            worker.join()
            worker.close()


def _kill_group(worker: BaseProcess) -> None:
    """Kill a worker that did not end by itself, and the processes that it started, such as those of a DataLoader."""
    pid, code = cast("int", worker.pid), worker.exitcode
    if code is not None:
        if code >= 0:
            return  # it has ended its children, or left them on purpose
        # The system does not reuse a process id while a process group of that id has a member.
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            return
    with suppress(ProcessLookupError):  # it had no process group of its own yet, or all processes in it are gone
        os.killpg(pid, signal.SIGKILL)


def checked_start_method(start_method: Any) -> StartMethod:
    """Return ``start_method``, or raise a ``ValueError`` for an unknown one."""
    known: tuple[str, ...] = get_args(StartMethod)
    if start_method not in known:
        raise ValueError(f"start_method={start_method!r} is unknown; use one of {', '.join(known)} [J226]")
    return start_method


def _check_types(world_size: Any, environment: Any, timeout: Any) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size={world_size!r} must be a whole number [J227]")
    if environment is not None and not isinstance(environment, Environment):
        raise TypeError(f"environment={environment!r} must be an Environment, or None to find out [J228]")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout={timeout!r} must be a datetime.timedelta, or None for torch's [J229]")
