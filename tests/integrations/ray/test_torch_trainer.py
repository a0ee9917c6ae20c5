"""Training under Ray's TorchTrainer and under torchrun, in the same function, compared with one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integrations.ray.page import TRAINED
from tests.integrations.ray.training import CASES, WORKERS
from tests.integrations.samples import Trained, alone, assert_as_one_process
from tests.joinables.trainer.elastic import WORK, assert_exact
from tests.training import assert_same, reference, tolerance_of

pytest.importorskip("ray", reason="Ray is not installed: pip install 'joinables[ray]'")

ROOT = Path(__file__).parents[3]
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)
LIMIT = 600  # seconds; Ray starts some 20 processes, and each needs up to 5 s of processor time


def processes_of(folder: Path) -> set[int]:
    """The processes that were told of a folder in their command line or environment: those that Ray has started."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if str(folder).encode() in told and int(process.name) != os.getpid():
                found.add(int(process.name))
    return found


@pytest.fixture
def folder(short_path: Path) -> Iterator[Path]:
    """Where Ray keeps its files. None of its processes is left when the test ends, however it does."""
    yield short_path
    for pid in processes_of(short_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while processes_of(short_path) and time.monotonic() < deadline:
        time.sleep(0.1)


def run(folder: Path, *args: str) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = {"PYTHONPATH": path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    told |= {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(LIMIT)}
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, env={**os.environ, **told}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("launcher", ["Ray", "torchrun"])
def test_the_same_function_ends_as_one_process(folder: Path, launcher: str) -> None:
    run(folder, *(TORCHRUN if launcher == "torchrun" else ()), "-m", "tests.integrations.ray.training", str(folder))
    wait_until_gone(folder)
    found = [torch.load(folder / f"worker-{rank}") for rank in range(WORKERS)]
    for name, case in CASES.items():
        assert_same(found[0][name], found[1][name])
        assert_same(found[0][name], reference(case), tolerance_of(case))
    for work in WORK if launcher == "Ray" else ():  # which has also restarted workers of which one was killed
        assert (folder / work / "killed-0").exists()
        assert_exact(folder / work, WORKERS)


@pytest.mark.timeout(LIMIT + 60)
def test_the_example_of_the_page(folder: Path) -> None:
    run(folder, "-m", "tests.integrations.ray.page", str(folder))
    wait_until_gone(folder)
    for number, data in enumerate(TRAINED):
        ranks = [Trained(**torch.load(folder / f"{number}-{rank}")) for rank in range(WORKERS)]
        assert_as_one_process(data, ranks, replace(alone(ranks, by_samples=False), logged=[]))


@pytest.mark.timeout(LIMIT + 60)
def test_the_tutorial(folder: Path) -> None:
    told = run(folder, "tutorials/13_ray.py")
    assert float(told.split()[-1].removesuffix(".")) < 1e-6
    wait_until_gone(folder)
