"""The simulated accelerator fails as NCCL does; else the tests of failures would show nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from threading import Timer

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import simulated
from tests.accelerator.target import SIMULATED, prepare_simulated
from tests.ending import Ending
from tests.harness import Pool, at_night
from tests.meeting import tell, wait_for

pytestmark = pytest.mark.skipif(bool(SIMULATED.why_not()), reason=SIMULATED.why_not())


def use_one_device(rank: int) -> str:
    """Two ranks of one group use the same device, as when ``set_device`` was forgotten."""
    try:
        dist.all_reduce(torch.ones(1, device="sim:0"))
    except RuntimeError as error:
        return str(error)
    return "fine"


def test_ranks_on_one_device(simulated_pool: Pool) -> None:
    for told in simulated_pool.run(use_one_device, ranks=2, backend=SIMULATED.backend):
        assert "Duplicate GPU detected : rank 0 and rank 1 both on device sim:0" in told


def hang(rank: int) -> None:
    """Rank 1 leaves a collective out; rank 0 aborts the group while it waits for a value."""
    ones = torch.ones(1, device=torch.device("sim", rank))
    dist.all_reduce(ones)
    if rank == 1:
        wait_for([0])
        return
    simulated.configure(stall=0.3)
    work = dist.all_reduce(ones, async_op=True)
    assert work is not None
    work.wait()
    assert simulated.hangs() and not work.is_completed()
    started = time.monotonic()
    Timer(0.5, dist.group.WORLD._get_backend(ones.device).abort).start()
    assert ones.item() == 2.0
    assert time.monotonic() - started > 0.4
    assert work.is_completed() and not simulated.hangs()
    with pytest.raises(RuntimeError, match="aborted"):
        dist.all_reduce(ones)
    tell()


def test_a_hang_ends_with_the_group(built: None, ending: Ending) -> None:
    ending.run(hang, ranks=2, backend="simccl", prepare=prepare_simulated)


def hang_for_ever(rank: int) -> None:
    ones = torch.ones(1, device=torch.device("sim", rank))
    simulated.configure(stall=0.3, watchdog=0.5)
    if rank == 0:
        dist.all_reduce(ones)
        ones.item()


def test_the_watchdog_ends_a_hang(built: None, ending: Ending) -> None:
    codes = [end.code for end in ending.ends(hang_for_ever, ranks=2, backend="simccl", prepare=prepare_simulated)]
    assert codes == [-signal.SIGABRT, 0]


@at_night
def test_several_processes_build_it_at_once() -> None:
    """And write nothing; only the first has something to compile."""
    code = "import torch, tests.accelerator.simulated as s; s.install(); torch.ones(1, device='sim').sum()"
    command = [sys.executable, "-W", "error", "-c", code]
    running = [
        subprocess.Popen(command, cwd=simulated.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=200)[0] for process in running] == [b"", b""]


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated.why_not() == ""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert simulated.why_not().startswith("no C++ compiler")
    monkeypatch.setattr(simulated.shutil, "which", lambda name, path=None: None if name == "ninja" else name)
    assert simulated.why_not().startswith("no ninja")
