"""Running one function as all ranks of a process group: :class:`Launcher`.

The parent and a worker, where the launcher starts the processes::

    parent                                      worker
    pickles fn and args into a file
    serves a store, starts the workers
    waits for messages and ends of processes    reads the file, sets the group up, awaits the others
                                                runs fn, tears the group down
                                                writes its result (rank 0) or what it raised into a file
                                                puts one message
    reads the message                           ends
    reaps all workers, reads the file
    removes the folder with the files

Where they are started by others, each of them is such a worker that keeps what ``fn`` returns or raises.

A message says only which rank has what; whatever may be long goes through a file. So no pipe can be full while its
reader waits for the writer's end, and a message is there or not, whenever its writer is killed.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from join import JoinTimeoutError, PeerError
from join.collectives import TorchCollective
from joinables.trainer.environment import Environment, detect_environment
from joinables.trainer.errors import LaunchError, NotPicklable, RemoteTraceback, WorkerDied, WorkerRaised

StartMethod: TypeAlias = Literal["spawn", "fork", "forkserver"]

_T = TypeVar("_T")
_GRACE_SECONDS = 2.0  # after the first failure: how long to wait for the one that caused it
_TERM_SECONDS = 5.0  # how long a worker may take over SIGTERM
_OTHERS_FAULT = (PeerError, JoinTimeoutError, dist.DistError)
_GLOO_ERRORS = ("gloo", "connection closed", "connection reset", "connection refused", "broken pipe", "socket")


class Launcher:
    """Runs a function as every rank of a process group, in processes that it starts or that are there already.

    Workers keep the parent's number of torch threads unless all of them together would have more than there are
    processors. Their environment variables are the parent's. They do not hear Ctrl-C: the parent does, and ends them.
    They end when the parent dies, and may have child processes of their own.

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
            raise ValueError(f"world_size={world_size} must be at least 1")
        self._start_method: StartMethod = start_method
        known: tuple[str, ...] = get_args(StartMethod)
        if start_method not in known:
            raise ValueError(f"start_method={start_method!r} is unknown; use one of {', '.join(known)}")
        self._environment = detect_environment() if environment is None else environment
        if not self._environment.creates_processes and (there := self._environment.place().world_size) != world_size:
            raise ValueError(
                f"world_size={world_size}, but {self._environment.name} started {there} processes; make them the same,"
                " or pass environment=LocalEnvironment() to start processes here"
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
            LaunchError: if a process group is in the way.
            BaseException: whatever ``fn`` raised on a rank, with the worker's traceback as its cause. If several ranks
                failed, the one that the others did not fail for, and of these the lowest.
        """
        if not callable(fn):
            raise TypeError(f"fn={fn!r} cannot be called")
        if not self._environment.creates_processes:
            return _as_rank(self._environment, self._backend, self._timeout, fn, args)
        forks = self._start_method == "fork"
        if forks and dist.is_initialized():
            raise LaunchError(
                "start_method='fork' would copy this process's group into the workers; destroy it first, or use 'spawn'"
            )
        with tempfile.TemporaryDirectory(prefix="joinables-") as name:
            folder = Path(name)
            if not forks:
                _write_call(folder / "call", fn, args)
            context: Any = multiprocessing.get_context(self._start_method)
            queue = _Queue(context)
            with queue.reader, queue.writer, self._environment.hosting(self._world_size) as environments:
                jobs = [
                    _Job(each, self._backend, self._timeout, self._threads(), folder, queue, self._start_method)
                    for each in environments
                ]
                _run(context, jobs, (fn, args) if forks else None)
            return _read(folder / "result")

    def _threads(self) -> int:
        fair = len(os.sched_getaffinity(0)) // self._world_size
        return min(torch.get_num_threads(), max(1, fair))


class _Queue:
    """Many writers and one reader, without a lock that a dying writer could keep.

    A message is far shorter than ``PIPE_BUF``, so the kernel writes it whole or not at all.
    """

    def __init__(self, context: Any) -> None:
        self.reader, self.writer = cast("tuple[connection.Connection, connection.Connection]", context.Pipe(False))

    def put(self, rank: int, ok: bool) -> None:
        """Say that ``rank`` has written its result, or else what it raised."""
        self.writer.send((rank, ok))

    def get(self) -> tuple[int, bool]:
        """The next message, waiting for it."""
        return self.reader.recv()


@dataclass(frozen=True)
class _Job:
    """What a worker is told."""

    environment: Environment
    backend: str
    timeout: timedelta | None
    threads: int
    folder: Path
    queue: _Queue
    start_method: StartMethod


@dataclass(frozen=True)
class _Account:
    """What a worker tells of an exception: its text, where it was, how likely another rank caused it, itself."""

    text: str
    traceback: str
    blame: int
    pickled: bytes | None


@dataclass(frozen=True)
class _Failure:
    """Why a rank did not do its part, as the parent sees it. The lowest ``blame`` is the cause of the others."""

    rank: int
    error: BaseException
    blame: int = 0
    text: str = ""
    cause: RemoteTraceback | None = None


# What a rank does, in a process of its own or in one that was there.


def _as_rank(
    environment: Environment, backend: str, timeout: timedelta | None, fn: Callable[..., _T], args: Sequence[Any]
) -> _T:
    place, store = environment.place(), environment.store()
    # Keys of an earlier launch must not be taken for this one's. The store counts, since it may outlive launchers.
    launch = store.add(f"launches/{place.rank}", 1)
    store = dist.PrefixStore(f"launch/{launch}", store)
    collective = TorchCollective(backend=backend, store=store, timeout=timeout)
    collective.setup(place.rank, place.world_size)
    # A rank is set up once its own connections are. It must not be done with fn, and close them, before the others are.
    store.set(f"ready/{place.rank}", "")
    store.wait([f"ready/{rank}" for rank in range(place.world_size)])
    result = fn(*args)
    if dist.is_initialized():  # fn may have destroyed it
        collective.teardown()
    return result


def _work(job: _Job, call: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> None:
    """The whole life of a worker; ``call`` is given to forked ones, the others read it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends its workers in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    _end_with_parent(job)
    torch.set_num_threads(job.threads)
    rank = job.environment.place().rank
    try:
        fn, args = _read_call(job.folder / "call") if call is None else call
        (job.folder / f"began-{rank}").touch()
        result = _as_rank(job.environment, job.backend, job.timeout, fn, args)
        if rank == 0:
            _write_result(job.folder / "result", result)
        (job.folder / f"returned-{rank}").touch()
    except SystemExit:
        raise  # fn wants the process to end with this code; the parent sees it
    except BaseException as error:
        # Before anything is taken down, which may wait for what the other ranks never send.
        _dump(job.folder / f"failure-{rank}", _account(error))
        job.queue.put(rank, False)
        sys.exit(1)
    if rank == 0:
        job.queue.put(rank, True)


def _end_with_parent(job: _Job) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    forkserver_between = job.start_method == "forkserver"

    def watch() -> None:
        # A forked worker has copies of the pipes by which its elder siblings would notice, so they look for themselves.
        while not connection.wait([parent.sentinel], timeout=1.0):
            if not forkserver_between and os.getppid() != parent.pid:
                break
        shutil.rmtree(job.folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


# The parent's side.


def _run(context: Any, jobs: Sequence[_Job], call: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> None:
    """Start the workers, wait for them, and leave none behind; raise what the first cause of a failure is."""
    # They would start with the first worker, and with the signals as they are then.
    if jobs[0].start_method == "forkserver":
        forkserver.ensure_running()
    elif jobs[0].start_method == "spawn":
        resource_tracker.ensure_running()
    workers: list[BaseProcess] = []
    try:
        for rank, job in enumerate(jobs):
            workers.append(context.Process(target=_work, args=(job, call), name=f"rank {rank}", daemon=False))
            with _interrupts_held():
                workers[-1].start()
        failures = _watch(workers, jobs[0])
    finally:
        _reap(workers)
    if failures:
        _raise(failures)


@contextmanager
def _interrupts_held() -> Generator[None, None, None]:
    """Ctrl-C waits until the end. A worker inherits this, so that none hits it before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(workers: Sequence[BaseProcess], job: _Job) -> list[_Failure]:
    """Wait until all workers have ended, or a while after the first failure; return the failures."""
    running = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    failures: dict[int, _Failure] = {}
    result, deadline = False, None
    while running and (deadline is None or time.monotonic() < deadline):
        patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ready = connection.wait([job.queue.reader, *running], patience)
        ended = [running.pop(sentinel) for sentinel in list(running) if sentinel in ready]
        # A worker puts before it ends: what those that have ended had to say is there by now.
        while job.queue.reader.poll():
            rank, ok = job.queue.get()
            if ok:
                result = True
            else:
                failures[rank] = _read_failure(job.folder, rank)
        for rank in ended:
            workers[rank].join()
            code = workers[rank].exitcode or 0
            returned = (job.folder / f"returned-{rank}").exists() and (result or rank != 0)
            if rank not in failures and (code != 0 or not returned):
                failures[rank] = _death(job, rank, code, returned)
        if failures and deadline is None:
            deadline = time.monotonic() + _GRACE_SECONDS
    return list(failures.values())


def _death(job: _Job, rank: int, code: int, returned: bool) -> _Failure:
    hint = ""
    if job.start_method != "fork" and not (job.folder / f"began-{rank}").exists():
        hint = (
            "It ended before fn began, perhaps while it imported the main script, as each worker does: what launches"
            ' there belongs under if __name__ == "__main__"'
        )
    error = WorkerDied(rank, code, returned, hint)
    # A library that sees its peers gone may abort.
    return _Failure(rank, error, blame=1 if code == -signal.SIGABRT else 0, text=str(error))


def _reap(workers: Sequence[BaseProcess]) -> None:
    started = [worker for worker in workers if worker.pid is not None]
    try:
        for worker in started:
            worker.terminate()
        deadline = time.monotonic() + _TERM_SECONDS
        for worker in started:
            worker.join(max(deadline - time.monotonic(), 0.0))
    finally:  # also if Ctrl-C is pressed again
        for worker in started:
            worker.kill()
            worker.join()
            worker.close()


def _raise(failures: Sequence[_Failure]) -> NoReturn:
    first, *others = sorted(failures, key=lambda failure: (failure.blame, failure.rank))
    add_note = getattr(first.error, "add_note", None)  # Python 3.11
    if others and add_note is not None:
        add_note("; ".join(f"rank {other.rank} failed too: {other.text[:200]}" for other in others))
    raise first.error from first.cause


# What goes through files.


def _dump(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        pickle.dump(value, file, protocol=5)


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


def _write_call(path: Path, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        _dump(path, (fn, args))
    except Exception:
        for name, value in [("fn", fn), *zip(_names(fn, len(args)), args, strict=True)]:
            part, error = _unpicklable_part(value)
            if error is not None:
                raise NotPicklable(
                    f"{name}{part} cannot be pickled for the workers: {type(error).__name__}: {error}. Give something"
                    " that a module defines by name, make it inside fn, or use start_method='fork'"
                ) from error
        raise


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of the first ``count`` positional parameters."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in named][:count]
    rest = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return names + [f"{rest}[{position}]" for position in range(count - len(names))]


def _unpicklable_part(value: Any) -> tuple[str, Exception | None]:
    """Where in ``value`` the trouble is, as one would index it, and what it is; ``None`` if there is none."""
    try:
        pickle.dumps(value)
    except Exception as whole:
        for path, leaf in cast("Any", pytree.tree_flatten_with_path(value)[0]):
            try:
                pickle.dumps(leaf)
            except Exception as error:
                return pytree.keystr(path), error
        return "", whole
    return "", None


def _read_call(path: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        return _read(path)
    except Exception as error:
        raise NotPicklable(
            f"fn or an argument cannot be found again in a worker: {type(error).__name__}: {error}. What they refer to"
            ' has to be in a file that workers can import, and not under if __name__ == "__main__"'
        ) from error


def _write_result(path: Path, result: Any) -> None:
    def moved(leaf: Any) -> Any:
        return leaf.cpu() if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta") else leaf

    result = pytree.tree_map(moved, result)
    try:
        _dump(path, result)
    except Exception:
        part, error = _unpicklable_part(result)
        if error is None:
            raise  # the disk is full
        raise NotPicklable(
            f"result{part} of rank 0 cannot be pickled: {type(error).__name__}: {error}. Return values and state_dicts"
        ) from error


def _account(error: BaseException) -> _Account:
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    others = isinstance(error, _OTHERS_FAULT) or (
        type(error) is RuntimeError and any(word in str(error).lower() for word in _GLOO_ERRORS)
    )
    # An exception whose constructor does not take its args is pickled and then cannot be loaded: go round it.
    for form in (error, (type(error), error.args, vars(error))):
        try:
            pickled = pickle.dumps(form)
            if type(_revived(pickled)) is type(error):
                return _Account(text, told, 2 if others else 0, pickled)
        except Exception:
            continue
    return _Account(text, told, 2 if others else 0, None)


def _revived(pickled: bytes) -> BaseException:
    form = pickle.loads(pickled)
    if not isinstance(form, tuple):
        return form
    cls, args, state = cast("tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]", form)
    error = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(state)
    return error


def _read_failure(folder: Path, rank: int) -> _Failure:
    account: _Account = _read(folder / f"failure-{rank}")
    error: BaseException = WorkerRaised(f"rank {rank} raised an exception that cannot be pickled: {account.text}")
    if account.pickled is not None:
        try:
            error = _revived(account.pickled)
        except Exception as lost:  # its class cannot be imported here
            error = WorkerRaised(f"rank {rank} raised an exception that cannot be loaded here ({lost}): {account.text}")
    return _Failure(rank, error, account.blame, account.text, RemoteTraceback(f"on rank {rank}\n{account.traceback}"))


def _check_types(world_size: Any, environment: Any, timeout: Any) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size={world_size!r} must be a whole number")
    if environment is not None and not isinstance(environment, Environment):
        raise TypeError(f"environment={environment!r} must be an Environment, or None to find out")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout={timeout!r} must be a datetime.timedelta, or None for torch's")
