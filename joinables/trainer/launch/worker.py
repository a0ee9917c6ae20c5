"""What a launch does on one rank: :func:`as_rank`, and :func:`work` in a process that was started for it.

The order of collectives and waits, on every rank::

    the process group is made          through a part of the store that no other launch has used
    "ready" into the store, and wait   until all ranks' are there
    fn
    "done" into the store, and wait    until all ranks' are there, or for some seconds
    the process group is taken down    unless fn raised, or did so itself
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from join.collectives import TorchCollective
from join.collectives.fresh_store import fresh_store
from join.collectives.timeouts import timeouts
from joinables.trainer.launch.environment import Environment
from joinables.trainer.launch.payload import Call, Payload

_T = TypeVar("_T")


class Queue:
    """A queue of short messages with many writers and one reader, without a lock that a dying writer could keep.

    A message is far shorter than ``PIPE_BUF``, so the kernel writes it whole or not at all.
    """

    def __init__(self, context: Any) -> None:
        self.reader, self.writer = cast("tuple[connection.Connection, connection.Connection]", context.Pipe(False))

    def put(self, rank: int, ok: bool) -> None:
        """Tell the parent that ``rank`` has written its result (``ok``), or what it raised."""
        self.writer.send((rank, ok))

    def get(self) -> tuple[int, bool]:
        """The next message, waiting for it."""
        return self.reader.recv()


@dataclass(frozen=True)
class Job:
    """What every worker is told.

    Attributes:
        backend: of the process group.
        timeout: of its collectives, or torch's.
        threads: how many torch may use.
        payload: the files with the call and the results.
        queue: how the parent learns that a result or a failure is in ``payload``.
        forked_by_server: whether the process above a worker is multiprocessing's server, and not the parent.
        all_forked: a semaphore, for workers that are forked from the parent; it lets them go on when all of them are.
    """

    backend: str
    timeout: timedelta | None
    threads: int
    payload: Payload
    queue: Queue
    forked_by_server: bool
    all_forked: Any = None


def as_rank(
    environment: Environment, backend: str, timeout: timedelta | None, fn: Callable[..., _T], args: Sequence[Any]
) -> _T:
    """Run ``fn(*args)`` as one rank of the default process group; all ranks call it, equally often.

    After an exception the group stays: to take it down could wait for what others never send.
    """
    place = environment.place()
    # Keys of an earlier launch, or of ranks that were killed, must not be taken for this one's.
    store = fresh_store(environment.store(), place.rank, place.world_size)
    collective = TorchCollective(backend=backend, store=store, timeout=timeout)
    collective.setup(place.rank, place.world_size)
    # A rank is set up once its own connections are. It must not be done with fn, and close them, before the others are.
    store.set(f"ready/{place.rank}", "")
    store.wait([f"ready/{rank}" for rank in range(place.world_size)])
    result = fn(*args)
    if dist.is_initialized():  # fn may have destroyed it
        # A rank that takes its group down while others still use theirs may abort, in threads of gloo's. But what it
        # has to return must not be lost because another one takes long.
        store.set(f"done/{place.rank}", "")
        with suppress(dist.DistError):
            store.wait([f"done/{rank}" for rank in range(place.world_size)], timedelta(seconds=timeouts().end))
        collective.teardown()
    return result


def work(job: Job, environment: Environment, call: Call | None) -> None:
    """Do all that a worker process does; the target of the processes that the launcher starts.

    Args:
        job: what every worker is told.
        environment: this one's.
        call: for a forked one; the others read it from ``job.payload``.
    """
    os.setpgid(0, 0)  # so that nothing that this process starts can outlive it, should it be killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends its workers in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    _end_with_parent(job)
    torch.set_num_threads(job.threads)
    place = environment.place()
    rank = place.rank
    if job.all_forked is not None:
        # A fork copies locks as they are. The parent's store thread takes the C library's when somebody connects.
        job.all_forked.acquire()
    try:
        fn, args = job.payload.read_call() if call is None else call
        job.payload.mark("began", rank)
        job.payload.drop_call(place.world_size)
        result = as_rank(environment, job.backend, job.timeout, fn, args)
        if rank == 0:
            job.payload.write_result(result)
        else:
            job.payload.mark("returned", rank)
    except SystemExit:
        raise  # fn wants the process to end with this code; the parent sees it
    except BaseException as error:
        # Before anything is taken down, which may wait for what the other ranks never send.
        job.payload.write_failure(rank, error)
        job.queue.put(rank, False)
        sys.exit(1)
    if rank == 0:
        job.queue.put(rank, True)
    if call is None and not job.forked_by_server:
        _end()


def _end() -> NoReturn:
    """End this spawned process as the interpreter does, but without tearing down the interpreter and torch.

    The teardown takes most of a second, while the parent waits, and backends' threads have aborted in it. A forked
    process ends without it anyway.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent(job: Job) -> None:
    """Start a thread that ends this process, and what it has started, when the parent dies."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        # A forked worker has copies of the pipes by which its elder siblings would notice, so they look for themselves.
        while not connection.wait([parent.sentinel], timeout=1.0):
            if not job.forked_by_server and os.getppid() != parent.pid:
                break
        job.payload.remove()
        with suppress(ProcessLookupError):  # fn may have left the group
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
