"""Ranks that end as scripts do: an exception leaves the process, and the interpreter takes itself down.

Importing torch takes seconds, so one process does it and is forked for each rank. What it forks runs to the end of the
program like any script; it is judged from outside. In ``make test``, what C++ frees after the interpreter's end is left
to the system, since that takes a tenth of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import importlib
import itertools
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.harness import ALL


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        code: its exit code, negative for a signal.
        at: when it ended, in seconds since the epoch.
        text: what it wrote to stdout, and then to stderr.
        result: what its function returned, if it did.
        stderr: what it wrote there.
    """

    code: int
    at: float
    text: str
    result: Any
    stderr: str = ""

    @property
    def error(self) -> str:
        """The exception that left it, as its traceback ends; empty without one."""
        told = self.text.splitlines()
        lines = [line.partition("]: ")[2] if line.startswith("[rank") else line for line in told]
        starts = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        if not starts:
            return ""
        after = [line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")]
        return "\n".join(after).removeprefix("join.errors.")

    def said(self, name: str) -> str:
        """What it has said by :func:`say` under a name; empty if nothing."""
        start = f"SAID {name}="  # in a worker of the trainer's, behind its rank
        found = [line.partition("=")[2] for line in self.text.splitlines() if start in line]
        return found[-1] if found else ""


def say(name: str, value: object) -> None:
    """Tell the judge something."""
    print(f"SAID {name}={value}", flush=True)


def assert_blamed(texts: list[str], who: int, told: str) -> None:
    """One rank is told something, and all others that it has failed."""
    assert texts[who].startswith(told)
    for rank, text in enumerate(texts):
        assert rank == who or text.startswith(f"PeerError: rank {who} failed: {texts[who]}")


class Ending:
    """A process that has imported everything, and is forked for each rank."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ending"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._ended: dict[int, tuple[int, float]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="ending-"))
        self._calls = itertools.count()
        self._started: list[Running] = []

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        signal.pthread_sigmask(
            signal.SIG_BLOCK, [signal.SIGALRM]
        )  # of pytest-timeout: the next answer would be this one
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])

    def run(self, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """What ``fn(rank, *args)`` returns on each rank, whose process then ends; ``how`` as for :meth:`start`."""
        ends = self.ends(fn, *args, tidies=False, **how)
        told = "\n".join(f"-- rank {rank}: {end.code}\n{end.text}" for rank, end in enumerate(ends))
        assert [end.code for end in ends] == [0] * len(ends), told
        return [end.result for end in ends]

    def ends(self, fn: Callable[..., Any], *args: Any, **how: Any) -> list[End]:
        """Run ``fn(rank, *args)`` in a process for each rank, and tell how each of them ended; ``how`` as above."""
        return self.start(fn, *args, **how).ends()

    def start(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: int = 3,
        over_group: bool = False,
        group: bool = True,
        tidies: bool = True,
        limit: float = 60.0,
        backend: str = "gloo",
        prepare: Callable[[int], None] | None = None,
    ) -> Running:
        """Start ``fn(rank, *args)`` in a process for each rank; several of these may run at once.

        Args:
            fn: what a rank does.
            args: what it is told.
            ranks: how many there are.
            over_group: whether headers go over the process group, as between machines.
            group: whether the default process group is set up.
            tidies: whether a rank that has returned ends as the interpreter does; a tenth of a second of CPU.
            limit: seconds, after which those that have not ended print their stacks and are killed.
            backend: of the default process group; with "nccl" it is told the GPU of its rank.
            prepare: what a rank does with its number ahead of its process group.
        """
        folder = self._folder / str(next(self._calls))
        folder.mkdir()
        call = _Call(fn, args, ranks, over_group, group, tidies, folder, backend, prepare)
        self._started.append(Running(self, call, self._ask(pickle.dumps(call)), time.monotonic() + limit))
        return self._started[-1]

    def look(self) -> dict[int, tuple[int, float]]:
        """By number of the rank that has ended, of all that were started here: its exit code, and when that was."""
        self._ended.update(self._ask("ended"))
        return self._ended

    def close(self) -> None:
        """End the process, and ranks that no test has waited for."""
        for running in self._started:
            running.end_by_force()
        self._process.communicate(timeout=10)
        shutil.rmtree(self._folder)


@dataclass
class Running:
    """Ranks that were started by :meth:`Ending.start`."""

    _ending: Ending
    _call: _Call
    _started: list[tuple[int, int]]
    """The ranks' numbers, of which no two started here have the same, and process ids, which are used again."""
    _deadline: float

    def ends(self) -> list[End]:
        """Wait until all ranks have ended, and tell how.

        Raises:
            AssertionError: if a rank has forked processes that go on without it.
        """
        try:
            while self._left() and time.monotonic() < self._deadline:
                time.sleep(0.02)
        finally:  # also where a time limit of pytest's ends the test
            self.end_by_force()
        ended, call = self._ending.look(), self._call
        for rank in range(call.ranks):
            assert call.leaves_nobody(rank), f"processes that rank {rank} has forked are still there"
        found = [End(*ended[number], *call.came_out(rank)) for rank, (number, _) in enumerate(self._started)]
        shutil.rmtree(call.folder)
        return found

    def _left(self) -> list[int]:
        """The process ids of ranks that have not ended."""
        return [pid for number, pid in self._started if number not in self._ending.look()]

    def end_by_force(self) -> None:
        """End ranks that have not ended; they print their stacks first."""
        for number in (signal.SIGUSR1, signal.SIGKILL) if self._left() else ():
            for pid in self._left():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, number)
            time.sleep(0.5)
        while self._left():
            time.sleep(0.02)


@dataclass(frozen=True)
class _Call:
    """What the ranks are to do."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    ranks: int
    over_group: bool
    group: bool
    tidies: bool
    folder: Path
    backend: str
    prepare: Callable[[int], None] | None

    def came_out(self, rank: int) -> tuple[str, Any, str]:
        out, err = ((self.folder / f"{name}-{rank}").read_text(errors="replace") for name in ("stdout", "stderr"))
        file = self.folder / f"result-{rank}"
        return out + err, pickle.loads(file.read_bytes()) if file.exists() else None, err

    def leaves_nobody(self, rank: int) -> bool:
        """Whether the processes that a rank has forked have ended, too, or do so soon."""
        deadline = time.monotonic() + 10
        with (self.folder / f"alive-{rank}").open("a") as file:
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.05)
                else:
                    return True
        return False

    def run(self, rank: int) -> None:
        """The whole life of a rank."""
        alive = os.open(self.folder / f"alive-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        fcntl.flock(alive, fcntl.LOCK_EX)  # whom it forks keeps the lock, too
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(self.folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.register(signal.SIGUSR1)
        if not ALL:
            c = ctypes.CDLL(None)
            c.on_exit(c._exit, None)
        os.environ["JOIN_SHARED_MEMORY"] = "0" if self.over_group else "1"
        if self.prepare is not None:
            self.prepare(rank)
        if self.group:
            self._set_up_group(rank)
        result = self.fn(rank, *self.args)
        (self.folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        if not self.tidies:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(0)

    def _set_up_group(self, rank: int) -> None:
        import torch.distributed as dist

        from tests.gpus import gpu_of

        gpu = gpu_of(rank) if "nccl" in self.backend else None
        dist.init_process_group(
            self.backend,
            store=dist.FileStore(str(self.folder / "store"), self.ranks),
            rank=rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=120),
            device_id=gpu,
        )
        dist.barrier(device_ids=None if self.backend == "gloo" else [gpu.index if gpu else rank])


def _serve() -> tuple[_Call, int] | None:
    """Fork ranks on request; returns in each of them, with what it is to do, and ``None`` at the end."""
    running: dict[int, int] = {}  # the numbers of ranks by process id
    numbers = itertools.count()
    ended: list[tuple[int, tuple[int, float]]] = []
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        is_asked = select.select([sys.stdin], [], [], 0.02 if running else None)[0]
        for pid in list(running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended.append((running.pop(pid), (os.waitstatus_to_exitcode(status), time.time())))
        if not is_asked:
            continue
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return None
        answer: list[Any] = []
        if request == "ended":
            answer, ended = ended, []
        else:
            call: _Call = pickle.loads(request)
            for rank in range(call.ranks):
                pid = os.fork()
                if pid == 0:
                    return call, rank
                running[pid] = next(numbers)
                answer.append((running[pid], pid))
        pickle.dump(answer, answers)
        answers.flush()


def main() -> None:
    import torch

    importlib.import_module("tests.preloaded")

    torch.set_num_threads(1)
    served = _serve()
    if served is not None:
        call, rank = served
        call.run(rank)


if __name__ == "__main__":
    main()
