"""What torchrun starts on the hosts: a process that forks the rank proper, for each :class:`Call` anew.

Importing torch takes seconds, so it is done once; and a rank may end in any way, as scripts do, while the process that
torchrun watches lives on. What is to be done comes through files in a :class:`Folder`, and so does how it went.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from tests.ending import End

PAUSE = 0.1  # seconds between two looks


@dataclass(frozen=True)
class Call:
    """What all ranks are to do, each in a process of its own.

    Attributes:
        name: tells calls apart.
        fn: called with the rank and ``args``.
        args: its arguments.
        group: whether the default process group is set up.
        timeout: that of the group, in seconds; torch's, if none.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    group: bool = True
    timeout: float | None = None


class Folder:
    """Where ranks are told what to do, and tell how it went.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def hold(self) -> None:
        """Keep the folder for as long as this process lives."""
        self._held = os.open(self.path / "held", os.O_WRONLY | os.O_CREAT)
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def release(self) -> None:
        """Keep it no more."""
        os.close(self._held)

    def is_held(self) -> bool:
        """Whether the process that keeps the folder still lives."""
        with (self.path / "held").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def ask(self, number: int, calls: list[Call]) -> None:
        """Tell all ranks what comes next."""
        _write(self.path / f"calls-{number}", calls)

    def calls(self, number: int) -> list[Call]:
        """What comes next; waits for it. Nothing does, when nobody holds the folder any more."""
        file = self.path / f"calls-{number}"
        while not file.exists() and self.is_held():
            time.sleep(PAUSE)
        return pickle.loads(file.read_bytes()) if file.exists() else []

    def stop(self, call: Call) -> None:
        """Tell all ranks to kill what has not ended of a call."""
        (self.path / f"stop-{call.name}").touch()

    def is_stopped(self, call: Call) -> bool:
        """Whether they have been told so, or nobody is left who could."""
        return (self.path / f"stop-{call.name}").exists() or not self.is_held()

    def told(self, call: Call, rank: int) -> Path:
        """What a rank writes to stdout and stderr."""
        return self.path / f"told-{call.name}-{rank}"

    def said(self, name: str, call: Call, rank: int) -> bool:
        """Whether a rank has said something of that name."""
        told = self.told(call, rank)
        return told.exists() and f"SAID {name}=" in told.read_text(errors="replace")

    def returned(self, call: Call, rank: int, result: Any) -> None:
        """A rank has returned from a call."""
        _write(self._result(call, rank), result)

    def ended(self, call: Call, rank: int, code: int) -> None:
        """A rank's process has ended."""
        _write(self._end(call, rank), (code, time.time()))

    def has_ended(self, call: Call, rank: int) -> bool:
        """Whether a rank's process has ended."""
        return self._end(call, rank).exists()

    def end(self, call: Call, rank: int) -> End:
        """How a rank's process has ended."""
        code, at = pickle.loads(self._end(call, rank).read_bytes())
        text, result = self.told(call, rank).read_text(errors="replace"), self._result(call, rank)
        return End(code, at, text, pickle.loads(result.read_bytes()) if result.exists() else None)

    def _end(self, call: Call, rank: int) -> Path:
        return self.path / f"ended-{call.name}-{rank}"

    def _result(self, call: Call, rank: int) -> Path:
        return self.path / f"result-{call.name}-{rank}"


def _write(file: Path, value: object) -> None:
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(pickle.dumps(value))
    part.rename(file)


def _run(call: Call, rank: int, folder: Folder) -> None:
    """The whole life of a rank."""
    told = os.open(folder.told(call, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(told, stream)
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("error")
    if call.group:
        _set_up(call, rank)
    folder.returned(call, rank, call.fn(rank, *call.args))


def _set_up(call: Call, rank: int) -> None:
    import torch.distributed as dist

    address, port, size = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(call.name, dist.TCPStore(address, port, is_master=False))
    limit = None if call.timeout is None else timedelta(seconds=call.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    dist.barrier()


def _wait_for(forked: dict[int, Call], rank: int, folder: Folder) -> None:
    """Wait until all these processes have ended."""
    ends_by_force: set[int] = set()
    while forked:
        for pid, call in list(forked.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                folder.ended(forked.pop(pid), rank, os.waitstatus_to_exitcode(status))
            elif pid not in ends_by_force and folder.is_stopped(call):
                ends_by_force.add(pid)
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.5)
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)


def _serve(rank: int, folder: Folder) -> Call | None:
    """Fork on request; returns in each fork, with what it is to do, and nothing where no request comes any more."""
    for number in count():
        forked: dict[int, Call] = {}
        calls = folder.calls(number)
        if not calls:
            return None
        for call in calls:
            pid = os.fork()
            if pid == 0:
                return call
            forked[pid] = call
        _wait_for(forked, rank, folder)
    raise AssertionError


def _load() -> None:
    """Import all that a rank may need."""
    import torch

    importlib.import_module("tests.preloaded")

    torch.set_num_threads(1)


def main() -> None:
    _load()
    folder, rank = Folder(Path(sys.argv[1])), int(os.environ["RANK"])
    call = _serve(rank, folder)
    if call is not None:
        _run(call, rank, folder)


if __name__ == "__main__":
    main()
