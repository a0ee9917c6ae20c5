"""Launching, in real processes: results, what workers raise and how they die, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import join
from join import PeerError
from join.collectives.broken import BrokenCollective
from join.collectives.store import local_store
from joinables.processes import LaunchError, run
from joinables.trainer import launch as module
from joinables.trainer.launch import (
    Launcher,
    Node,
    NotPicklable,
    Place,
    RemoteTraceback,
    WorkerDied,
    WorkerRaised,
)
from tests.ending import Ending
from tests.harness import ALL, NIGHT, assert_soon, in_quiet, in_test_all
from tests.joinables.trainer.modules import KillsWhoWritesIt
from tests.joinables.trainer.ranks import free_port
from tests.scripts import TORCHRUN, run_forked
from tests.shorter import using
from tests.versions import remove_temporary_folders

ROOT = Path(join.__file__).parent.parent
PATIENCE = 30.0  # seconds in which a forked launch must be over, whatever happens; a slow name server takes 5 of them

# Python 3.12 warns of every fork of a process with threads; the tests do nothing on these threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def local(ranks: int = 2, start_method: Any = "fork", **kwargs: Any) -> Launcher:
    return Launcher(ranks, start_method=start_method, **kwargs)


def parents() -> dict[int, int]:
    """The parent of each process of this system, zombies included."""
    found: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def children() -> set[int]:
    """The children of this process, without multiprocessing's own helpers."""
    found: set[int] = set()
    for pid, parent in parents().items():
        command = Path(f"/proc/{pid}/cmdline").read_text() if parent == os.getpid() else "forkserver"
        if not any(helper in command for helper in ("resource_tracker", "forkserver")):
            found.add(pid)
    return found


@pytest.fixture(autouse=True)
def folder(short_path: Path, server: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where launches put their files; whatever a test does, it leaves the process as it was."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))

    def state() -> Any:
        return (
            {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            list(sys.path),
            list(warnings.filters),
            torch.get_num_threads(),
            signal.getsignal(signal.SIGINT),
            signal.pthread_sigmask(signal.SIG_BLOCK, []),
            dist.is_initialized(),
            children(),
            set(multiprocessing.active_children()),
        )

    before = state()
    yield short_path
    assert state() == before
    assert list(short_path.iterdir()) == []


# -- results


def ranks_met(base: float, *more: Any) -> Any:
    total = torch.tensor([base + dist.get_rank()])
    dist.all_reduce(total)
    return {"total": total, "more": more, "rank": dist.get_rank()}, dist.get_world_size(), torch.get_num_threads()


def check_met(met: Any, more: torch.Tensor) -> None:
    result, size, threads = met
    assert result["total"].tolist() == [21.0]
    assert torch.equal(result["more"][0][0], more)
    assert (result["rank"], size) == (0, 2)
    assert threads * 2 <= max(len(os.sched_getaffinity(0)), 2)
    assert threads <= torch.get_num_threads()


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_result_of_rank_0(start_method: str) -> None:
    check_met(local(2, start_method).launch(ranks_met, 10.0, [torch.ones(2), None]), torch.ones(2))


def test_one_launch_after_the_other() -> None:
    launcher = local(3, timeout=timedelta(seconds=30))
    launcher.launch(os.getpid)  # opens what stays open
    files = os.listdir("/proc/self/fd")
    assert [launcher.launch(ranks_met, base)[0]["total"].item() for base in (0.0, 1.0, 2.0)] == [3.0, 6.0, 9.0]
    assert launcher.launch(os.getpid) != os.getpid()
    assert len(os.listdir("/proc/self/fd")) == len(files)
    assert local(1).launch(ranks_met, 5.0)[0]["total"].item() == 5.0


def test_rank_that_is_done_before_the_others_have_set_up() -> None:
    launcher = local(3)
    for _ in range(15 if ALL else 5):  # it is a race
        launcher.launch(os.getpid)


def is_mapped(name: str) -> bool:
    return re.search(rf"/joinables-.*/{name}\b", Path("/proc/self/maps").read_text()) is not None


def large(argument: torch.Tensor) -> Any:
    assert is_mapped("call")
    met = ranks_met(10.0, [argument.clone(), None])
    argument += 1  # in this process only
    dist.barrier()
    return met, argument, {f"key {number}": [number, str(number)] for number in range(10_000)}


@in_test_all
def test_large_result_of_spawned_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes home in a file, whose name is all that is put and got, once, after rank 0 has ended."""
    got: list[Any] = []
    get, before = SimpleQueue.get, children()
    monkeypatch.setattr(SimpleQueue, "get", lambda self: got.append((children() - before, get(self))) or got[-1][1])
    argument = torch.arange(2_500_000, dtype=torch.float32)
    met, tensor, entries = local(2, "spawn").launch(large, argument)
    check_met(met, argument)
    assert torch.equal(tensor, argument + 1)
    assert is_mapped("result")
    assert not argument.is_shared()
    assert len(entries) == 10_000
    assert entries["key 9999"] == [9999, "9999"]
    ((rest, output),) = got
    assert rest == set()
    assert output == (True, *(Path(f"result-{number}") for number in range(3)))
    assert len(pickle.dumps(output)) < select.PIPE_BUF


def found_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("joinables-*/*")]


def test_no_pickle_stays_once_all_have_read_it(folder: Path) -> None:
    """A parent that is killed cannot remove it."""
    assert sorted(local(2, "forkserver").launch(found_in, folder)) == ["spare-0", "spare-1", "store"]


def loads() -> list[int]:
    return [int(batch) for batch in DataLoader(range(4), batch_size=None, num_workers=1)]  # type: ignore[arg-type]


def test_workers_may_have_children() -> None:
    assert local().launch(loads) == [0, 1, 2, 3]


# -- forks of workers, which are not ranks


def with_helper(dies: bool, pipe: tuple[int, int]) -> None:
    if dist.get_rank() == 1:
        if not os.fork():
            os.close(pipe[1])
            select.select([pipe[0]], [], [], 2 * PATIENCE)  # it lives until the parent writes
            os._exit(0)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("dies", [False, True])
def test_a_launch_does_not_wait_for_what_a_worker_has_forked(dies: bool) -> None:
    pipe = os.pipe()
    try:
        with pytest.raises(WorkerDied, match="Rank 1 was killed") if dies else contextlib.nullcontext():
            local().launch(with_helper, dies, pipe)
        os.close(pipe[0])
        os.write(pipe[1], b"end")  # a BrokenPipeError, if the fork has ended, and nothing reads any more
    finally:
        os.close(pipe[1])


def lives_until_the_test_ends(pipe: tuple[int, int]) -> None:
    os.close(pipe[1])
    select.select([pipe[0]], [], [], 2 * PATIENCE)


def waits_for_a_child(pipe: tuple[int, int]) -> None:
    if dist.get_rank() == 1:
        multiprocessing.get_context("fork").Process(target=lives_until_the_test_ends, args=(pipe,)).start()
        raise ValueError("own fault")  # multiprocessing joins the child before this process ends
    dist.all_reduce(torch.ones(1))


@in_quiet
def test_the_cause_is_on_a_rank_that_does_not_end() -> None:
    pipe, started = os.pipe(), time.monotonic()
    try:
        with using(first=0.5), pytest.raises(ValueError, match="own fault"):
            local().launch(waits_for_a_child, pipe)
    finally:
        for end in pipe:
            os.close(end)
    assert_soon(time.monotonic() - started, PATIENCE)


def leaves(how: str) -> int:
    """The code with which a fork ends that leaves the function."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(int(PATIENCE))
    if how == "raises":
        raise OSError("in the fork")
    if how == "exits":
        sys.exit(5)
    return -1


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("raises", 1), ("exits", 5)])
def test_a_fork_that_leaves_the_function_ends(how: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert local().launch(leaves, how) == code
    assert ("OSError: in the fork" in capfd.readouterr().err) == (how == "raises")


def test_a_process_of_another_thread_lives_on() -> None:
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(PATIENCE,))
    other.start()
    try:
        local().launch(os.getpid)
        assert other.is_alive()
    finally:
        other.kill()
        other.join()


@in_test_all
def test_a_port_that_another_program_has() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        node = Node(range(1), ("127.0.0.1", other.getsockname()[1]))
        with pytest.raises(LaunchError, match=r"cannot be served at 127\.0\.0\.1:.*EADDRINUSE.*\[J887\]$"):
            Launcher(2, start_method="fork", node=node).launch(os.getpid)


def test_without_the_system_call_that_waits_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=PermissionError))
    with using(first=0.2), pytest.raises(WorkerDied, match="Rank 0 exited with code 0"):
        local().launch(dies, "0", 0)


# -- what workers raise


class Needy(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code, self.reason = code, reason


class WithLock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def raises(what: str, rank: int) -> None:
    if dist.get_rank() == rank:
        if what == "key":
            raise KeyError("missing")
        if what == "needy":
            raise Needy(7, reason="no luck")
        if what == "lock":
            raise WithLock
        if what == "long":
            raise ValueError("x" * 1_000_000)
        if what == "local":

            class Inside(Exception):
                pass

            raise Inside("cannot be named")
    dist.all_reduce(torch.ones(1))


@in_quiet
@pytest.mark.parametrize("rank", [0, 1])
def test_same_exception_with_the_worker_s_traceback(rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(KeyError) as caught:
        local().launch(raises, "key", rank)
    assert_soon(time.monotonic() - started, PATIENCE)
    assert caught.value.args == ("missing",)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert f"on rank {rank}\n" in str(caught.value.__cause__)
    assert 'raise KeyError("missing")' in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("what", "text"),
    [("lock", "WithLock: holds a lock"), ("local", "Inside: cannot be named"), ("needy", r"Needy: no luck \(7\)")],
)
def test_exception_that_cannot_be_pickled(what: str, text: str) -> None:
    with pytest.raises(
        WorkerRaised, match=f"Rank 1 raised an exception that cannot be sent to this process: .*{text}"
    ) as caught:
        local().launch(raises, what, 1)
    assert text.replace("\\", "") in str(caught.value.__cause__)


def test_long_text_does_not_go_through_the_pipe() -> None:
    with pytest.raises(ValueError, match="xxx") as caught:
        local().launch(raises, "long", 1)
    assert str(caught.value) == "x" * 1_000_000


def several(first: str, second: str) -> None:
    """Rank 0 fails first, and for another's fault; then rank 2, for its own."""
    errors = {
        "peer": PeerError("rank 2 failed"),
        "line": BrokenCollective("the process of rank 2 has ended, or has left the group", [2]),
        "theirs": RuntimeError("socket closed"),  # and not gloo's
        "dist": dist.DistNetworkError("no answer"),
        "own": ValueError("own fault"),
    }
    dist.barrier()  # or whoever ends breaks connections that others are still making
    if dist.get_rank() == 0:
        if first == "abort":  # as NCCL does without the others
            os.abort()
        raise errors[first]
    if dist.get_rank() == 2:
        time.sleep(0.5)
        raise errors[second]


@pytest.mark.parametrize("first", ["peer", "line", "dist", "abort"])
def test_cause_before_its_consequences(first: str) -> None:
    with using(end=0.2), pytest.raises(ValueError, match="own fault") as caught:
        local(3).launch(several, first, "own")
    if sys.version_info >= (3, 11):
        assert "rank 0 failed too: " in caught.value.__notes__[0]


def test_lowest_rank_of_several() -> None:
    with using(end=0.2), pytest.raises(RuntimeError, match="socket closed"):
        local(3).launch(several, "theirs", "own")


def loses_a_peer() -> None:
    """Ranks 0 and 1 wait in a collective of gloo's for rank 2, which raises and ends."""
    if dist.get_rank() == 2:
        raise ValueError("own fault")
    dist.all_reduce(torch.ones(1))


def test_a_collective_that_breaks_is_a_consequence() -> None:
    with pytest.raises(ValueError, match="own fault"):
        local(3).launch(loses_a_peer)


# -- how workers die


def dies(how: str, rank: int) -> str:
    dist.barrier()  # or whoever ends breaks connections that others are still making
    if dist.get_rank() == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            time.sleep(1.0)  # rank 0 has put its result by then
            os._exit(3)
        if how == "exit":
            sys.exit(5)
        os._exit(int(how))
    if how not in ("late", "0"):
        dist.all_reduce(torch.ones(1))
    return "result"


@in_quiet
@pytest.mark.parametrize(
    ("how", "rank", "text"),
    [
        ("3", 1, "^Rank 1 exited with code 3 before it returned a result"),
        ("0", 1, "^Rank 1 exited with code 0 before it returned a result"),
        ("0", 0, "^Rank 0 exited with code 0 before it returned a result"),
        ("exit", 0, "^Rank 0 exited with code 5 before"),
        ("late", 1, "^Rank 1 exited with code 3 before"),
        ("kill", 0, "^Rank 0 was killed by SIGKILL"),
        ("kill", 2, "^Rank 2 was killed by SIGKILL"),
    ],
)
def test_worker_that_dies(how: str, rank: int, text: str) -> None:
    started = time.monotonic()
    with using(end=0.2), pytest.raises(WorkerDied, match=text) as caught:
        local(3).launch(dies, how, rank)
    assert caught.value.rank == rank
    assert_soon(time.monotonic() - started, PATIENCE)


def stubborn() -> None:
    if dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    time.sleep(0.5)
    raise ValueError("no patience")


@in_quiet
def test_worker_that_ignores_sigterm() -> None:
    started = time.monotonic()
    with using(first=0.5, term=0.5), pytest.raises(ValueError, match="no patience"):
        local().launch(stubborn)
    assert_soon(time.monotonic() - started, PATIENCE)


def killed_while_it_writes() -> Any:
    return [torch.ones(1000), KillsWhoWritesIt()]


def test_worker_killed_while_it_writes_its_result() -> None:
    with pytest.raises(WorkerDied, match="Rank 0 was killed by SIGKILL"):
        local().launch(killed_while_it_writes)


# -- a full disk


def full() -> None:
    """Let this process write no file beyond the space of a report. A disk fails a write in the same way."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def raises_on_a_full_disk(text: str) -> None:
    if dist.get_rank() == 1:
        full()
        raise ValueError(text)
    dist.all_reduce(torch.ones(1))


def returns_on_a_full_disk() -> torch.Tensor:
    full()
    return torch.ones(1000)


def test_a_full_disk_keeps_the_worker_s_own_exception(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^own fault \(1207, x*\)") as caught:
        local().launch(raises_on_a_full_disk, f"own fault (1207, {'x' * 1500})")
    assert "The traceback is in the output of the rank" in str(caught.value.__cause__)
    assert "raise ValueError(text)" in capfd.readouterr().err


@pytest.mark.parametrize("letter", ["x", "\N{DROMEDARY CAMEL}"])
def test_an_exception_that_is_too_long_for_a_full_disk(capfd: pytest.CaptureFixture[str], letter: str) -> None:
    with pytest.raises(
        WorkerRaised, match=rf"Rank 1 .*: ValueError: own fault {letter}*.* \(\[Errno 27\] .*: '.*/joinables-"
    ):
        local().launch(raises_on_a_full_disk, f"own fault {letter * 100_000}")
    assert "raise ValueError(text)" in capfd.readouterr().err


def test_a_result_that_does_not_fit() -> None:
    with pytest.raises(OSError, match=r"File too large: '.*/joinables-.*/result-0'"):
        local().launch(returns_on_a_full_disk)


def test_a_call_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "run")  # no process is started
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full()
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/joinables-.*/call'"):
            local(2, "spawn").launch(print, torch.ones(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# -- sessions: a notebook, the prompt, python -c, stdin

SESSION = """
from joinables.trainer import Launcher
class Held:
    def __init__(self, call): self.call = call
def twice(held): return 2 * held.call()
print(Launcher(2).launch(twice, Held(lambda: 21)))
"""


@in_test_all
@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_what_a_session_defines_can_be_launched(how: str) -> None:
    arguments, text = (["-c", SESSION], None) if how == "-c" else (["-"], SESSION)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, env=environ, input=text, capture_output=True, text=True, timeout=100)
    assert (ended.stdout, ended.stderr) == ("42\n", "")


def in_a_session() -> Any:
    return 1


def test_a_session_that_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what it defines needs a fork."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys.modules["__main__"], "in_a_session", in_a_session, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert local(2, "forkserver").launch(in_a_session) == 1
        monkeypatch.setattr(in_a_session, "__module__", "__main__")
        with pytest.raises(LaunchError, match=r"[Ff]unctions and classes of a notebook.* strategy='ddp_fork'"):
            local(2, "forkserver").launch(in_a_session)
    finally:
        dist.destroy_process_group()


UNDER_THE_GUARD = """
    from joinables.trainer import Launcher

    if __name__ == "__main__":
        def fn():
            return 1

        Launcher(1).launch(fn)
"""


@in_test_all
def test_what_is_defined_under_the_guard(tmp_path: Path) -> None:
    error = run_script(tmp_path, UNDER_THE_GUARD).stderr
    assert "LaunchError: A started process cannot import a part of the call: Can't get attribute 'fn'" in error


# -- what cannot be pickled


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: (lambda: None,), r"^The call cannot be pickled for another process: .*<lambda>"),
        (lambda: (os.path.join, {"locks": [1, threading.Lock()]}), r"^The call cannot be pickled .*lock"),
    ],
)
def test_call_that_cannot_be_pickled(
    call: Callable[[], Any], text: str, monkeypatch: pytest.MonkeyPatch, folder: Path, script: None
) -> None:
    monkeypatch.delattr(module, "run")  # no process is started
    with pytest.raises(NotPicklable, match=text):
        local(2, "spawn").launch(*call())


def test_forking_needs_no_pickling() -> None:
    lock = threading.Lock()
    assert local().launch(lambda held: held.locked(), lock) is False


def returns_lock() -> Any:
    return {"weights": torch.ones(1), "locks": [threading.Lock()]}


def test_result_that_cannot_be_pickled() -> None:
    with pytest.raises(NotPicklable, match=r"^The result cannot be pickled for another process: TypeError"):
        local().launch(returns_lock)


# -- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"world_size": 0}, ValueError, "world_size=0 is not positive"),
        ({"start_method": "thread"}, ValueError, "cannot find context for 'thread'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Launcher(**{"world_size": 2, **arguments})


def test_world_size_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
            patch.setenv(name, value)
        with pytest.raises(ValueError, match="world_size=2 is not positive, or is not the number of processes"):
            Launcher(2)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerDied(2, -9), "Rank 2 was killed by SIGKILL. [J214]"),
        (WorkerDied(2, -40), "Rank 2 was killed by signal 40. [J214]"),
        (WorkerDied(1, 3), "Rank 1 exited with code 3 before it returned a result."),
    ],
)
def test_worker_died_can_be_pickled(error: WorkerDied, text: str) -> None:
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each).startswith(text)
        assert (each.rank, each.exit_code) == (error.rank, error.exit_code)


def test_no_fork_with_a_process_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LaunchError, match="cannot be forked from this one, because"):
            local().launch(ranks_met, 1.0)
    finally:
        dist.destroy_process_group()


def test_an_existing_process_group_is_used() -> None:
    agent = local_store()
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.dict(os.environ, {**told, **address}):
            with pytest.raises(LaunchError, match=r"backend .*:gloo\) contradicts the launch \(.*, backend .*:nccl"):
                Launcher(1, backend="nccl").launch(dist.get_backend)
            assert Launcher(1).launch(dist.get_backend) == "gloo"
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


# -- whole programs


SLEEPER = """
    import os, sys, time
    from pathlib import Path
    from joinables.trainer import Launcher

    def fn(folder):
        import torch
        import torch.distributed as dist
        (Path(folder) / f"{dist.get_rank()}.part").write_text(str(os.getpid()))
        (Path(folder) / f"{dist.get_rank()}.part").rename(Path(folder) / f"{dist.get_rank()}.pid")
        while dist.get_rank() == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))

    if __name__ == "__main__":
        Launcher(2, start_method=sys.argv[1]).launch(fn, sys.argv[2])
"""


@in_test_all
@pytest.mark.parametrize(
    ("start_method", "sent"),
    [("fork", "SIGKILL"), *([("fork", "SIGINT"), ("spawn", "SIGINT"), ("spawn", "SIGKILL")] if NIGHT else [])],
)
def test_end_of_the_parent_is_the_end_of_its_workers(
    start_method: str, sent: str, folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SLEEPER))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    with open(tmp_path / "stderr", "w") as told:
        parent = subprocess.Popen(
            [sys.executable, str(script), start_method, str(tmp_path)], env=environ, stderr=told, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        while len(files := list(tmp_path.glob("*.pid"))) < 2:
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        workers = {int(file.read_text()) for file in files}
        assert workers <= set(parents())
        assert len(list(folder.glob("joinables-*"))) == 1
        if sent == "SIGINT":
            os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: to all processes
        else:
            parent.kill()
        parent.wait(timeout=30)
        remove_temporary_folders(folder)
        assert parent.returncode == -signal.Signals[sent]
        deadline = time.monotonic() + (0 if sent == "SIGINT" else 5)
        while workers & set(parents()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not workers & set(parents())
        if sent == "SIGINT":
            text = (tmp_path / "stderr").read_text().strip()
            assert text.count("Traceback") == 1
            assert text.endswith("KeyboardInterrupt")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        for left in folder.iterdir():  # a parent that is killed cannot remove it
            assert sent == "SIGKILL"
            shutil.rmtree(left)


SAME_EVERYWHERE = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from joinables.trainer.launch import launcher_of, place_of
    from joinables.trainer import Launcher

    def fn(base):
        total = torch.tensor([base + dist.get_rank()])
        dist.all_reduce(total)
        return {"rank": dist.get_rank(), "total": total.item()}

    if __name__ == "__main__":
        environ = dict(os.environ)
        told = [Launcher(2, start_method="fork").launch(fn, base) for base in (0.0, 1.0)]
        assert environ == os.environ
        assert not dist.is_initialized()
        if told[0]["rank"] == 0:
            environment = launcher_of(2)
            print(json.dumps([environment and "torchrun", environment and str(place_of(environment)), told]))
"""
TOLD = [{"rank": 0, "total": 1.0}, {"rank": 0, "total": 3.0}]


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("command", "name", "place"),
    [
        ([], None, None),
        ([TORCHRUN, "--standalone", "--nproc-per-node", "2"], "torchrun", str(Place(0, 2, 0))),
    ],
)
def test_same_script_alone_and_under_torchrun(
    ending: Ending, command: list[str], name: str | None, place: str | None, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SAME_EVERYWHERE))
    printed = run_forked(ending, *command, "script.py", folder=tmp_path)
    assert json.loads(printed) == [name, place, TOLD]


def by_hand(rank: int, port: int, job: int) -> dict[str, str]:
    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": job}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in variables.items()}}


def meets(variables: dict[str, str]) -> list[Any]:
    os.environ.update(variables)
    environ = dict(os.environ)
    told = [Launcher(2).launch(ranks_met, base) for base in (0.0, 1.0)]
    assert Launcher(2).launch(leaves, "returns") == 0
    assert environ == os.environ
    assert not dist.is_initialized()
    return [(result["rank"], size, result["total"].item()) for result, size, _ in told]


def test_processes_of_other_launchers() -> None:
    """The launchers are not here; what they do is: two processes with variables."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        how: Any = {"method": "fork", "folder": Path(folder), "limit": 60}
        told, failures = run(lambda rank: meets(by_hand(rank, port, 7)), range(2), **how)
    assert not failures
    assert told == [[(rank, 2, 1.0), (rank, 2, 3.0)] for rank in range(2)]


def meets_or_says_why(variables: dict[str, str], results: Any) -> None:
    try:
        results.send(meets(variables))
    except RuntimeError as error:
        results.send(str(error))


def test_a_rank_of_another_job_is_refused() -> None:
    context = multiprocessing.get_context("fork")
    port = free_port()
    pipes = [context.Pipe() for _ in range(3)]
    places = [by_hand(0, port, 1), by_hand(1, port, 2), by_hand(1, port, 1)]
    ranks = [
        context.Process(target=meets_or_says_why, args=(place, there))
        for place, (_, there) in zip(places, pipes, strict=True)
    ]
    told: list[Any] = []
    try:
        for start, waits_for in (((0, 1), 1), ((2,), 2), ((), 0)):
            for at in start:
                ranks[at].start()
            here = pipes[waits_for][0]
            told.append(here.recv() if here.poll(60) else None)
    finally:
        for rank in ranks:
            rank.join(5)
            rank.kill()
            rank.join()
    own, other = (f"TORCHELASTIC_RUN_ID={job}, 2 ranks, user {os.getuid()}" for job in (2, 1))
    assert told[0].startswith(f"Rank 1 of a job ({own}) has reached the store of another job ({other}). Start each job")
    assert told[1:] == [[(rank, 2, 1.0), (rank, 2, 3.0)] for rank in (1, 0)]


WITHOUT_GUARD = """
    import os
    from joinables.trainer import Launcher

    Launcher(1).launch(os.getpid)
"""


@in_test_all
def test_script_without_main_guard(tmp_path: Path) -> None:
    ended = run_script(tmp_path, WITHOUT_GUARD)
    assert ended.returncode == 1
    last = [line for line in ended.stderr.splitlines() if "WorkerDied" in line][-1]
    assert "exited with code 1 before it returned a result." in last
    assert "If it exited while it imported the main script" in last
    assert 'if __name__ == "__main__"' in last
