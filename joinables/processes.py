"""Ranks as processes that this process starts: :func:`start`, :func:`ended` and :func:`ending_forks`.

A rank is the process that was started. Processes that a rank forks are not ranks. They have everything that the rank
has open, and a copy of its stack. So nothing waits for a pipe of a rank to close, and a fork does not return to the
functions that called the code of the user.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, cast

import torch


def start(fn: Callable[..., object], rank: int, *args: Any, method: str) -> BaseProcess:
    """Start a process that calls ``fn(rank, *args)``, and that ends with this process and at Ctrl-C.

    Args:
        fn: The function. Unless ``method`` is ``fork``, it is at the top level of a module.
        rank: The rank.
        *args: Further arguments.
        method: The start method of ``multiprocessing``.
    """
    start_processes = cast("Any", torch.multiprocessing).start_processes
    return start_processes(_run, (fn, rank, args), join=False, start_method=method).processes[0]


def _run(number: int, fn: Callable[..., object], rank: int, args: Sequence[Any]) -> None:
    # torch.multiprocessing sends it when the parent ends. The default action works within a collective, too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fn(rank, *args)


def ended(processes: Collection[BaseProcess], timeout: float | None = None) -> list[BaseProcess]:
    """Wait until one of several processes has ended, or for ``timeout`` seconds, and return those that have ended.

    The sentinel of ``multiprocessing`` is a pipe, which stays open as long as a fork of the process lives.

    Args:
        processes: Processes that :func:`start` has started and that were not joined.
        timeout: The seconds; ``None`` to wait without limit.
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


def wait_for_all(processes: Collection[BaseProcess], timeout: float) -> None:
    """Wait until all processes have ended, or for ``timeout`` seconds; the arguments are those of :func:`ended`."""
    running, deadline = set(processes), time.monotonic() + timeout
    while running and (left := deadline - time.monotonic()) > 0:
        running.difference_update(ended(running, left))


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
