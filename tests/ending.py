"""Ranks that end as scripts do: an exception leaves the process, and the interpreter takes itself down.

Importing torch takes seconds, so one process does it and is forked for each rank: :func:`main`. What it forks runs to
the end of the program like any script; it is judged from outside. Such processes may also be on several hosts, each
with one rank (``tests/two_hosts``). What is to be done comes through files in a folder, and so does how it went.

In ``make test``, what C++ frees after the interpreter's end is left to the system, and modules of others are not
emptied (``tests/preloaded.py``): each takes a tenth of a second.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import importlib
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from typing_extensions import override

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


def text_of(ends: list[End], since: float | None = None) -> str:
    """What ranks have told, and how many seconds ``since`` they have ended."""
    after = ["" if since is None else f" after {end.at - since:.1f} s" for end in ends]
    return "\n".join(f"-- rank {rank}: {end.code}{after[rank]}\n{end.text}" for rank, end in enumerate(ends))


def assert_blamed(texts: list[str], who: int, told: str) -> None:
    """One rank is told something, and all others that it has failed."""
    assert texts[who].startswith(told)
    for rank, text in enumerate(texts):
        assert rank == who or text.startswith(f"PeerError: rank {who} failed: {texts[who]}")


PAUSE = 0.02  # seconds between two looks


class Forks:
    """Ranks that are forked from processes that have imported everything.

    Args:
        folder: through which they are told what to do, and tell how it went.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self._started: list[Running] = []
        self._held = os.open(folder / "held", os.O_WRONLY | os.O_CREAT)
        fcntl.flock(self._held, fcntl.LOCK_EX)  # which this process loses where it ends

    def run(self, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        """What ``fn(rank, *args)`` returns on each rank, whose process then ends; ``how`` as for :meth:`start`."""
        ends = self.ends(fn, *args, tidies=False, **how)
        assert [end.code for end in ends] == [0] * len(ends), text_of(ends)
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
        timeout: float = 120.0,
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
            timeout: of the process group.
        """
        number = next(self._numbers)
        call = _Call(fn, args, ranks, over_group, group, tidies, self.folder / str(number), backend, prepare, timeout)
        call.folder.mkdir()
        _write(self.folder / f"call-{number}", call)
        self._started.append(Running(call, time.monotonic() + limit, self.pause))
        return self._started[-1]

    def pause(self) -> None:
        """Wait a little for ranks."""
        time.sleep(PAUSE)

    def close(self) -> None:
        """End ranks that no test has waited for, and the processes that fork them."""
        for running in self._started:
            running.end_by_force()
        os.close(self._held)


class Ending(Forks):
    """A process that has imported everything, and is forked for each rank."""

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="ending-")))
        self._process = subprocess.Popen([sys.executable, "-m", "tests.ending", str(self.folder)])

    @override
    def pause(self) -> None:
        assert self._process.poll() is None, "the process that forks ranks has ended"
        super().pause()

    @override
    def close(self) -> None:
        super().close()
        self._process.wait(timeout=10)
        shutil.rmtree(self.folder)


@dataclass
class Running:
    """Ranks that were started by :meth:`Forks.start`."""

    _call: _Call
    _deadline: float
    _pause: Callable[[], None]

    def ends(self, limit: float | None = None) -> list[End]:
        """Wait until all ranks have ended, or for another limit from now on, and tell how.

        Raises:
            AssertionError: if a rank has forked processes that go on without it.
        """
        deadline, call = self._deadline if limit is None else time.monotonic() + limit, self._call
        try:
            while self._left() and time.monotonic() < deadline:
                self._pause()
        finally:  # also where a time limit of pytest's ends the test
            self.end_by_force()
        for rank in range(call.ranks):
            assert call.leaves_nobody(rank), f"processes that rank {rank} has forked are still there"
        found = [call.end(rank) for rank in range(call.ranks)]
        shutil.rmtree(call.folder)
        return found

    def wait_until_said(self, name: str) -> None:
        """Wait until all ranks have said something of that name, or have ended."""
        for rank in range(self._call.ranks):
            while rank in self._left() and f"SAID {name}=" not in self._call.text(rank, "stdout"):
                assert time.monotonic() < self._deadline, self._call.text(rank, "stderr")
                self._pause()

    def _left(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self._call.ranks) if not self._call.file("ended", rank).exists()]

    def end_by_force(self) -> None:
        """End ranks that have not ended; they print their stacks first."""
        if self._call.folder.exists():
            (self._call.folder / "stop").touch()
            while self._left():
                self._pause()


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
    timeout: float

    def file(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}-{rank}"

    def text(self, rank: int, name: str) -> str:
        file = self.file(name, rank)
        return file.read_text(errors="replace") if file.exists() else ""

    def end(self, rank: int) -> End:
        """How a rank has ended."""
        code, at = pickle.loads(self.file("ended", rank).read_bytes())
        out, err, result = self.text(rank, "stdout"), self.text(rank, "stderr"), self.file("result", rank)
        return End(code, at, out + err, pickle.loads(result.read_bytes()) if result.exists() else None, err)

    def leaves_nobody(self, rank: int) -> bool:
        """Whether the processes that a rank has forked have ended, too, or do so soon."""
        deadline = time.monotonic() + 10
        while is_held(self.file("alive", rank)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return time.monotonic() < deadline

    def run(self, rank: int) -> None:
        """The whole life of a rank."""
        alive = os.open(self.file("alive", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        fcntl.flock(alive, fcntl.LOCK_EX)  # whom it forks keeps the lock, too
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(self.file(name, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
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
        _write(self.file("result", rank), self.fn(rank, *self.args))
        if not self.tidies:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
            atexit.unregister(importlib.import_module("tests.preloaded").leave_out_others)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(0)

    def _set_up_group(self, rank: int) -> None:
        import torch.distributed as dist

        from tests.gpus import gpu_of

        gpu = gpu_of(rank) if "nccl" in self.backend else None
        store: dist.Store = dist.FileStore(str(self.folder / "store"), self.ranks)
        if IS_TORCHRUNS:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.PrefixStore(self.folder.name, dist.TCPStore(*address, is_master=False))
        dist.init_process_group(
            self.backend,
            store=store,
            rank=rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=self.timeout),
            device_id=gpu,
        )
        dist.barrier(device_ids=None if self.backend == "gloo" else [gpu.index if gpu else rank])


def _write(file: Path, value: object) -> None:
    """Write a file that exists as a whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(pickle.dumps(value))
    part.rename(file)


def is_held(file: Path) -> bool:
    """Whether a process holds a file."""
    with file.open("a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# -- the process that is forked ---------------------------------------------------------------------------------------

IS_TORCHRUNS = "TORCHELASTIC_RUN_ID" in os.environ
"""Whether torchrun has started this process, which then forks the rank with the same number."""


def _serve(folder: Path) -> tuple[_Call, int] | None:
    """Fork ranks on request; returns in each of them, with what it is to do, and ``None`` at the end."""
    running: dict[int, tuple[_Call, int]] = {}  # by process id
    for number in itertools.count():
        for _ in _waiting(folder, folder / f"call-{number}"):
            _look_after(running)
        if not (folder / f"call-{number}").exists():
            break
        call: _Call = pickle.loads((folder / f"call-{number}").read_bytes())
        for rank in [int(os.environ["RANK"])] if IS_TORCHRUNS else range(call.ranks):
            pid = os.fork()
            if pid == 0:
                return call, rank
            running[pid] = call, rank
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return None


def _waiting(folder: Path, file: Path) -> Iterator[None]:
    """Yield now and then, until a file is there, or the process that asks is not."""
    while not file.exists() and is_held(folder / "held"):
        yield
        time.sleep(PAUSE)


def _look_after(running: dict[int, tuple[_Call, int]]) -> None:
    """Tell which ranks have ended, and end those that are to."""
    for pid, (call, rank) in list(running.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            del running[pid]
            _write(call.file("ended", rank), (os.waitstatus_to_exitcode(status), time.time()))
    stopped = [pid for pid, (call, _) in running.items() if (call.folder / "stop").exists()]
    for number in (signal.SIGUSR1, signal.SIGKILL) if stopped else ():
        for pid in stopped:
            os.kill(pid, number)
        time.sleep(0.5)


def main() -> None:
    import torch

    importlib.import_module("tests.preloaded")

    torch.set_num_threads(1)
    served = _serve(Path(sys.argv[1]))
    if served is not None:
        call, rank = served
        call.run(rank)


if __name__ == "__main__":
    main()
