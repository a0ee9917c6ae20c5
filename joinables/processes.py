"""Functions as ranks, in processes that this process starts: :func:`run`, and :func:`rank_of_group` in each of them.

A :class:`joinables.trainer.Launcher` and ``joinables.testing.run_ranks`` share the work with the ranks as follows::

    parent                                      rank
    ------                                      ----
    reserves space for a report of each rank    .
    starts the ranks                            makes the process group
    waits until the processes end               runs fn
                                                waits a while for the other ranks
                                                takes the group down, unless fn raised, or did so itself
                                                leaves a report: what fn returned, or its exception
                                                ends
    reads the reports
    after a failure, waits for its cause
    ends the ranks that still run

A report is a file. It is complete or missing if its writer is killed. A failure can be reported, shortened, even if the
disk is full.

A rank is the process that was started. Processes that a rank forks are not ranks. They have everything that the rank
has open, and a copy of its stack. So nothing waits for a pipe of a rank to close, and a fork does not return to the
functions that called the code of the user (:func:`ending_forks`).
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from join import JoinTimeoutError, PeerError
from join.collectives import collective_of
from join.collectives._torch_private import let_go_before_exit
from join.collectives.broken import is_broken
from join.collectives.timeouts import TIMEOUTS

_SPARE = 4096  # bytes that are reserved for the report of each rank
_PAUSE = 1.0  # seconds between two looks for reports of ranks that have not ended
_TO_SHOW = 2.0  # seconds that a rank has to write its stack
_OWN_FRAME = re.compile(rf'  File "{re.escape(str(Path(__file__).parent))}/(processes|testing)\.py"')

OWN, ABORTED, OTHERS, RUNNING = range(4)
"""Values of ``Failure.blame``: the rank itself; it aborted, as libraries do that lose peers; another rank; the rank
still ran at the end."""


class LaunchError(RuntimeError):
    """Base of all errors of a launch: ``fn`` did not run on all ranks, or its result is not available."""


@dataclass(order=True)
class Failure:
    """Failure of a rank. The least of several is the cause of the others, on the lowest such rank.

    Attributes:
        blame: Whether this rank has caused it: one of the values above.
        rank: The rank.
        text: The exception, as the last lines of its traceback, or how the process ended.
        trace: The traceback, or the stack of a rank that did not return in time.
        pickled: The exception, if it can be pickled.
        exit_code: The exit code of a rank that has neither returned nor raised.
    """

    blame: int
    rank: int
    text: str
    trace: str = ""
    pickled: bytes = b""
    exit_code: int | None = None


def run(
    fn: Callable[..., Any],
    ranks: Sequence[int],
    *args: Any,
    method: str,
    folder: Path,
    limit: float | None = None,
) -> tuple[list[Any], list[Failure]]:
    """Run ``fn(rank, *args)`` in a process for each rank. None of these processes is left at the end.

    A rank ends with this process and at Ctrl-C. After a first failure, the others may run a little longer, since one
    of them may be its cause. Processes that ranks have forked or started live on, unless there is a limit.

    Args:
        fn: The function. Unless ``method`` is ``fork``, it is at the top level of a module, and its arguments and
            results are pickled.
        ranks: The ranks.
        *args: Further arguments.
        method: The start method of ``multiprocessing``.
        folder: An empty folder for the files of this call.
        limit: The seconds until ranks that still run write where they are, and end. Then all processes end that they
            have forked or started. ``None`` is without a limit.

    Returns:
        The results by rank, and the failures; the first one is the cause. Ranks that still run after the failure
        of another one, or at the limit, have failed, too.
    """
    running: dict[BaseProcess, int] = {}
    reports: dict[int, tuple[Failure | None, Any]] = {}
    deadline = time.monotonic() + (limit or float("inf"))
    try:
        for rank in ranks:
            (folder / f"spare-{rank}").write_bytes(bytes(_SPARE))
            start_processes = cast("Any", torch.multiprocessing).start_processes
            work = _work, (fn, rank, args, folder, limit is not None)
            running[start_processes(*work, join=False, start_method=method).processes[0]] = rank
        while running and (left := deadline - time.monotonic()) > 0:
            for process in _ended(running, min(left, _PAUSE)):
                code, rank = _reap(process, limit is not None), running.pop(process)
                reports[rank] = _report_of(folder, rank, code)
            for rank in set(running.values()) - reports.keys():
                if (folder / f"report-{rank}").exists():  # it may still wait for processes that it has started
                    reports[rank] = _report_of(folder, rank, None)
            if any(failure for failure, _ in reports.values()):
                deadline = min(deadline, time.monotonic() + TIMEOUTS.first)
        if limit is not None:
            for process in running:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(cast("int", process.pid), signal.SIGUSR2)
            _wait_for_all(running, _TO_SHOW)
        reports |= {rank: _report_of(folder, rank, None) for rank in running.values()}
    finally:
        _end(running, limit is not None)
    failures = sorted(failure for failure, _ in reports.values() if failure is not None)
    return [result for _, (_, result) in sorted(reports.items())], failures


def _report_of(folder: Path, rank: int, code: int | None) -> tuple[Failure | None, Any]:
    """Return the failure of a rank, or its result; the exit code is ``None`` while it runs."""
    if (report := folder / f"report-{rank}").exists():
        return pickle.loads(report.read_bytes())
    if code is not None:
        blame = ABORTED if code == -signal.SIGABRT else OWN
        return Failure(blame, rank, f"it {how_it_ended(code)}", exit_code=code), None
    stack = (folder / f"stack-{rank}").read_text() if (folder / f"stack-{rank}").exists() else ""
    # The innermost frame comes first. The frames of the user end where this package has called them.
    return Failure(RUNNING, rank, "it did not return in time", _OWN_FRAME.split(stack)[0].rstrip()), None


def how_it_ended(code: int) -> str:
    """Return how a process ended, by its exit code as in ``multiprocessing.Process.exitcode``."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _reap(process: BaseProcess, with_children: bool) -> int:
    """Join a process that has ended, or is killed, and return its exit code."""
    if with_children:
        with suppress(ProcessLookupError):  # it has left no process
            os.killpg(cast("int", process.pid), signal.SIGKILL)
    process.join()
    return process.exitcode or 0


def _ended(processes: Collection[BaseProcess], timeout: float) -> list[BaseProcess]:
    """Wait until one of several processes has ended, or for ``timeout`` seconds, and return those that have ended.

    The sentinel of ``multiprocessing`` is a pipe, which stays open as long as a fork of the process lives.
    """
    with ExitStack() as stack:
        files: dict[int, BaseProcess] = {}
        for process in processes:
            file = process.sentinel
            with suppress(OSError):  # the kernel refuses it, or the server of multiprocessing has joined the process
                file = os.pidfd_open(cast("int", process.pid))
                stack.callback(os.close, file)
            files[file] = process
        return [files[cast("int", file)] for file in connection.wait(files, timeout)]


def _wait_for_all(processes: Collection[BaseProcess], timeout: float) -> None:
    running, deadline = set(processes), time.monotonic() + timeout
    while running and (left := deadline - time.monotonic()) > 0:
        running.difference_update(_ended(running, left))


def _end(processes: Collection[BaseProcess], with_children: bool) -> None:
    """Terminate processes that still run, kill those that do not end in time, and return when all have ended."""
    try:
        for process in processes:
            process.terminate()
        _wait_for_all([process for process in processes if process.is_alive()], TIMEOUTS.term)
    finally:  # runs even if Ctrl-C is pressed again
        for process in processes:
            process.kill()
            _reap(process, with_children)


# -- a rank -----------------------------------------------------------------------------------------------------------


def _work(number: int, fn: Callable[..., Any], rank: int, args: Sequence[Any], folder: Path, is_limited: bool) -> None:
    """Run the function as one rank, and leave its report."""
    # torch.multiprocessing sends it when the parent ends. The default action works within a collective, too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if is_limited:
        os.setsid()  # so that the processes that it starts can be ended with it
        stack = (folder / f"stack-{rank}").open("w")
        faulthandler.register(signal.SIGUSR2, stack, all_threads=False, chain=True)
    try:
        report = pickle.dumps((None, fn(rank, *args)))
    except SystemExit:
        raise  # fn ends the process with this code, which the parent reads
    except BaseException as error:
        is_others = isinstance(error, (PeerError, JoinTimeoutError)) or is_broken(error)
        text = "".join(traceback.format_exception_only(error)).strip()
        failed = partial(Failure, OTHERS if is_others else OWN, rank)
        trace, pickled = "".join(traceback.format_exception(error)), b""
        with suppress(Exception):
            pickled = pickle.dumps(error)
        try:
            _leave_report(folder, rank, pickle.dumps((failed(text, trace, pickled), None)))
        except OSError as full:  # all parts together have less bytes than the space that is reserved
            sys.stderr.write(trace)
            text = f"{text[:200]} ({str(full)[:50]}: {str(folder)[:150]!r})"
            trace, pickled = "(The traceback is in the output of the rank.)", pickled * (len(pickled) < 2000)
            _leave_report(folder, rank, pickle.dumps((failed(text, trace, pickled), None)))
        sys.exit(1)
    _leave_report(folder, rank, report)


def _leave_report(folder: Path, rank: int, report: bytes) -> None:
    """Leave the report of a rank. A short one fits into the space that the parent has reserved."""
    with open(spare := folder / f"spare-{rank}", "r+b") as file:
        file.write(report)
    spare.rename(folder / f"report-{rank}")


_made: WeakSet[dist.ProcessGroup] = WeakSet()
"""The process groups that :func:`rank_of_group` has made in this process."""


@contextmanager
def rank_of_group(
    rank: int,
    world_size: int,
    store: dist.Store,
    backend: str,
    patience: float | None = None,
    **options: Any,
) -> Generator[None]:
    """Return the context of one rank of the default process group; all ranks enter it equally often.

    A group that the process has already is used. After an exception its own process group stays, since taking it down
    could wait for messages that the other ranks never send.

    Args:
        rank: The rank.
        world_size: The number of ranks.
        store: A store without keys of an earlier group, or of ranks that were killed.
        backend: The backend of the process group.
        patience: The seconds that a rank which has left the body waits for the others; ``TIMEOUTS.end`` by default.
        **options: Other arguments of ``init_process_group``.
    """
    if dist.is_initialized() and dist.group.WORLD in _made and collective_of(None).kept.lost:
        dist.destroy_process_group()  # a failure in an earlier launch, which all ranks have raised, has left it
    made = not dist.is_initialized()
    if made:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
        _made.add(cast("dist.ProcessGroup", dist.group.WORLD))
    found = f"rank {dist.get_rank()} of {dist.get_world_size()}, backend {dist.get_backend_config()}"
    wanted = f"rank {rank} of {world_size}, backend {BackendConfig(cast('dist.Backend', dist.Backend(backend)))}"
    if found != wanted:
        raise LaunchError(
            f"The default process group ({found}) contradicts the launch ({wanted}). Create the group with the ranks"
            " and the backend of the launch, or let the launch create it. [J048]"
        )
    # After the group is destroyed, one of its threads may still be clearing the callback of a comm hook. That thread
    # must not free the group, so it is held until the end.
    group: Any = dist.group.WORLD
    let_go_before_exit(group)
    yield
    if dist.is_initialized():  # the body may have destroyed it
        # If a rank takes its group down while others still use theirs, a gloo thread may abort those ranks. But the
        # result of this rank must not be lost because another rank takes long.
        with suppress(RuntimeError):
            store.set(f"done/{rank}", "")
            limit = timedelta(seconds=TIMEOUTS.end if patience is None else patience)
            store.wait([f"done/{other}" for other in range(world_size)], limit)
        if made:
            dist.destroy_process_group()
    del group


@contextmanager
def ending_forks() -> Generator[None]:
    """Return a context, also a decorator, in which forks of this process end when they leave the body.

    A fork whose body raises an exception prints it, and ends with code 1, or with the code of ``sys.exit``. Its
    interpreter is not taken down, since that may wait for threads that only this process has.
    """
    rank = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != rank:
            _end_fork(sys.exc_info()[1])


def _end_fork(error: BaseException | None) -> NoReturn:
    code = 0 if error is None else 1
    try:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
        elif error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
