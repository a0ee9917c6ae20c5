"""How tests run: which of them, and on which ranks. It does not import torch: pytest starts without.

``make test`` runs some tests and cases, ``make test-all`` (in CI) more, ``make test-night`` all. The environment
variable ``TESTS`` says so: unset, "all" or "night". Tests that :data:`in_test_all` or :data:`at_night` marks are
collected there only, unless they are named one by one (``pytest FILE::TEST``).

A :class:`Pool` of ranks lives as long as the test session. Ranks are forked from multiprocessing's forkserver and
reused; every call gets a fresh process group on a file store. A call that does not end in time is a hang: its ranks
print their stacks, die, and are replaced.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import importlib
import itertools
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

# -- which tests run --------------------------------------------------------------------------------------------------

NIGHT = os.environ.get("TESTS") == "night"
ALL = NIGHT or os.environ.get("TESTS") in ("all", "gpu")
in_test_all, at_night = pytest.mark.in_test_all, pytest.mark.at_night
in_quiet = pytest.mark.in_quiet
"""Of tests that :func:`assert_soon`: ``make test-quiet`` runs them one by one, with ``QUIET=1``."""
T = TypeVar("T")
Parts = Mapping[str, Hashable]
Epochs = tuple[tuple[int, ...], ...]


def assert_soon(seconds: float, most: float, told: str = "") -> None:
    """Something took less than so many seconds; only where nothing else runs, and so not beside other tests."""
    assert seconds < most or not os.environ.get("QUIET"), told


def parts_in(row: Any) -> Parts:
    """The parts of a row: those of a tuple, or the attributes of an object, in which other such objects may be."""
    if isinstance(row, tuple):
        return {str(at): str(part) for at, part in enumerate(cast("tuple[Any, ...]", row))}
    return {
        f"{name}.{inner}": part
        for name, value in vars(row).items()
        for inner, part in (parts_in(value) if dataclasses.is_dataclass(value) else {"": str(value)}).items()
    }


def all_or_each(rows: Iterable[T], parts_of: Callable[[T], Parts] = parts_in, together: int = 0) -> list[T]:
    """All rows in ``make test-all``; in ``make test`` so few of them that each part still occurs in one.

    Args:
        rows: what there is.
        parts_of: what a row is made of, by name.
        together: 2 if ``make test-all``, too, is to run only so many that each pair of parts which occurs in a row
            still occurs in one, and 1 if it runs what ``make test`` does; the others run at night.
    """
    every = list(rows)
    together = 0 if NIGHT else together if ALL else 1
    if not together:
        return every
    sets = [set(combinations(sorted(parts_of(row).items(), key=lambda part: part[0]), together)) for row in every]
    missing = set[tuple[tuple[str, Hashable], ...]]().union(*sets)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(every)), key=lambda at: len(sets[at] & missing))
        chosen.add(best)
        missing -= sets[best]
    return [row for at, row in enumerate(every) if at in chosen]


def first_and_last(epochs: Epochs) -> Epochs:
    """All epochs at night, or those two: state goes from one to the next, and another rank has no data."""
    return epochs if NIGHT or len(epochs) < 3 else (epochs[0], epochs[-1])


def cases_that_run(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """What a parameter is in the tests of this file that run, in their order."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return [item.callspec.params[name] for item in items if name in item.fixturenames]


# -- ranks ------------------------------------------------------------------------------------------------------------

SIZE = 4


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


class RankHung(AssertionError):
    """Ranks did not come back in time."""


@dataclass
class _Worker:
    process: Any
    pipe: Any


@dataclass(frozen=True)
class _Call:
    """What a rank is to do."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    ranks: int
    path: str
    backend: str
    over_group: bool
    bound: bool

    def device(self) -> Any:
        """The device that the process group is bound to, if it is."""
        import torch

        from tests.gpus import gpu_of

        gpu = gpu_of(self.rank) if "nccl" in self.backend else None
        if not self.bound and self.backend != "nccl":
            return None
        return gpu or torch.device("sim", self.rank)


class Pool:
    """``SIZE`` processes that run functions as ranks of a process group.

    Args:
        prepare: what a rank does with its number before each call, ahead of its process group: what is registered in a
            process for good, such as a device, is not there for tests that use another pool.
    """

    def __init__(self, prepare: Callable[[int], None] | None = None) -> None:
        self._prepare = prepare
        self._context = mp.get_context("forkserver")
        self._workers: list[_Worker] = []

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: int = 3,
        timeout: float = 60.0,
        backend: str = "gloo",
        over_group: bool = False,
        bound: bool = False,
    ) -> list[Any]:
        """Run ``fn(rank, *args)`` on every rank with the default process group set up; return the results by rank.

        With ``backend="nccl"`` the group is told the GPU of its rank; with "simccl" it is told the device if it is to
        be ``bound``. Headers go through shared memory, or ``over_group``, as they do between machines.
        """
        with tempfile.TemporaryDirectory() as folder:
            call = partial(_Call, fn, args, ranks=ranks, path=str(Path(folder) / "store"))
            calls = [call(rank, backend=backend, over_group=over_group, bound=bound) for rank in range(ranks)]
            try:
                return self._run(calls, timeout)
            except BaseException:  # also of a time limit of pytest's: the next test gets ranks that do nothing else
                self.close()
                raise

    def _run(self, calls: list[_Call], timeout: float) -> list[Any]:
        self._start()
        workers = self._workers[: len(calls)]
        for worker, call in zip(workers, calls, strict=True):
            worker.pipe.send(call)
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        pending = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while pending and time.monotonic() < deadline:
            ready: list[Any] = multiprocessing.connection.wait(list(pending), timeout=0.5)
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    workers[rank].process.join(5)
                    results[rank] = (False, f"rank {rank} died with exit code {workers[rank].process.exitcode}")
                    deadline = min(deadline, time.monotonic() + 5)
            if any(not ok for ok, _ in results.values()):
                deadline = min(deadline, time.monotonic() + 10)  # the others may hang now; the cause is known
        if pending:
            self.close(dump=True)
        failed = "\n".join(f"-- rank {rank}\n{text}" for rank, (ok, text) in sorted(results.items()) if not ok)
        if failed:
            raise RankFailed(failed)
        if pending:
            raise RankHung(f"ranks {sorted(pending.values())} did not return within {timeout:g} s")
        self._end_groups(workers)
        return [results[rank][1] for rank in range(len(calls))]

    def _end_groups(self, workers: list[_Worker]) -> None:
        """Only once all are done: a rank that is done early would close connections that others are still making."""
        for worker in workers:
            worker.pipe.send("all are done")
        for rank, worker in enumerate(workers):
            try:
                is_done = worker.pipe.poll(30) and worker.pipe.recv()
            except EOFError:
                is_done = False
            if not is_done:
                self.close(dump=True)
                raise RankHung(f"rank {rank} did not destroy its process group within 30 s, or died in it")

    def _start(self) -> None:
        started: list[_Worker] = []
        while len(self._workers) < SIZE:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there, self._prepare), daemon=True)
            process.start()
            there.close()
            self._workers.append(_Worker(process, here))
            started.append(self._workers[-1])
        for worker in started:
            worker.pipe.recv()  # ready: what starting takes is no part of a call's time

    def close(self, *, dump: bool = False) -> None:
        """End all ranks; ``dump`` prints their stacks first."""
        for worker in self._workers:
            if dump and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGUSR1)
                time.sleep(0.2)
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers.clear()


def _serve(pipe: Any, prepare: Callable[[int], None] | None) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    import torch
    import torch.distributed as dist

    importlib.import_module("tests.preloaded")

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"Guards may run slower on Python 3\.13\.0")
    warnings.filterwarnings("ignore", r"The ``compute`` method of metric")  # of ranks without data
    # A group must not be freed by one of its own threads, which may still be clearing a comm hook's callback.
    last: list[Any] = []
    pipe.send("ready")
    for served in itertools.count(1):
        is_idle = not pipe.poll(0.5)
        if is_idle:
            last.clear()
        if is_idle or served % 8 == 0:  # models in cycles keep groups, whose threads wake up a hundred times a second
            gc.collect()
            gc.freeze()  # or the next collection would look again at what is there for good
        try:
            call: _Call = pipe.recv()
        except EOFError:
            return
        os.environ["JOIN_SHARED_MEMORY"] = "0" if call.over_group else "1"
        try:
            if prepare is not None:
                prepare(call.rank)
            dist.init_process_group(
                call.backend,
                store=dist.FileStore(call.path, call.ranks),
                rank=call.rank,
                world_size=call.ranks,
                device_id=call.device(),
            )
            result = (True, call.fn(call.rank, *call.args))
        except BaseException:
            result = (False, traceback.format_exc())
        # Not ``send``, which shares the memory of each tensor by a file and a socket of its own.
        pipe.send_bytes(pickle.dumps(result))
        try:
            pipe.recv()
        except EOFError:
            return
        if dist.is_initialized():
            last[:] = [dist.group.WORLD]
            dist.destroy_process_group()
        pipe.send("ended")
