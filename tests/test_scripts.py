"""The demo, the tutorials and the recipes run, say what they claim, and leave nothing behind; so does a benchmark.

In ``make test`` most scripts run as ``tests/scripts.py`` has it, in ``make test-night`` as their users run them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.outputs import output_of, scripts
from tests.ending import Ending
from tests.harness import NIGHT, at_night
from tests.scripts import as_script, complaints, run_forked
from tests.versions import own_lines

ROOT = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*args: str, timeout: float = 110, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert (result.returncode, complaints(result.stderr)) == (0, ""), result.stdout
    return own_lines(result.stdout)


ELSEWHERE = {
    "13_ray": "it needs Ray; where that is installed, tests/integrations/ray runs it",
    "deepspeed_zero": "it needs DeepSpeed; where that is installed, tests/engines runs it",
}
SPAWNING = {"05_gan": "the trainer tells processes that it spawns how torch logs: make test-night"}


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.stem)
def test_tutorial(ending: Ending, path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80
    if path.stem in ELSEWHERE:
        pytest.skip(ELSEWHERE[path.stem])
    if path.stem in SPAWNING and not NIGHT:
        pytest.skip(SPAWNING[path.stem])
    told = run(str(path), timeout=220) if NIGHT else run_forked(ending, str(path))
    assert told.strip()
    if output_of(path).exists():
        assert words(told) == words(output_of(path).read_text()), "make outputs"


def words(told: str) -> list[str]:
    """The words of what is printed, without numbers: ranks print in any order, and what is kept is of another run."""
    return sorted(re.findall(r"[A-Za-z]+", re.sub(r"\b[0-9a-f]{16}\b|\d+([.,]\d+)*(e[-+]\d+)?", " ", told)))


@at_night
def test_tutorial_says_the_same_under_torchrun(ending: Ending) -> None:
    path = str(ROOT / "tutorials" / "07_torchrun.py")
    alone, launched = run_forked(ending, path).splitlines(), run(*TORCHRUN, path, OMP_NUM_THREADS="1").splitlines()
    assert "started by the trainer" in alone[0]
    assert "started by torchrun" in launched[0]
    assert len(alone) == 2
    assert launched[1:] == alone[1:]  # so rank 1 has printed nothing


def test_what_a_user_writes_is_short() -> None:
    lines = (ROOT / "demo" / "train.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


@pytest.mark.timeout(200)
def test_demo(ending: Ending, tmp_path: Path) -> None:
    options = "--epochs", "2", "--out", str(tmp_path)
    printed = run("-m", "demo", *options, timeout=190) if NIGHT else run_forked(ending, "demo", *options, limit=180)
    assert "DDP + Adam" in printed
    assert sorted(each.name for each in tmp_path.iterdir()) == ["result.json", "timeline.png"]
    result = json.loads((tmp_path / "result.json").read_text())
    for run_of in result["runs"].values():
        assert run_of["joinables"]["parameter_difference"] < 2e-6
        assert run_of["joinables"]["buffer_difference"] < 2e-6
        assert run_of["joinables"]["accuracy"] > 0.95
        assert run_of["torch"]["status"] != "finished" or run_of["torch"]["parameter_difference"] > 1e-3
    assert (tmp_path / "timeline.png").stat().st_size > 20_000


def demo_without_its_extra(rank: int) -> None:
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    as_script(rank, str(ROOT), "demo")


def test_demo_without_its_extra_says_what_to_install(ending: Ending) -> None:
    (end,) = ending.ends(demo_without_its_extra, ranks=1, group=False)
    assert end.code != 0
    assert "pip install '.[demo]', in the clone" in end.stderr
    assert "Traceback" not in end.stderr


@at_night
def test_the_benchmark_of_overhead_runs_every_way() -> None:
    few = ("--only", "MLP", "--rounds", "1", "--launches", "1", "--steps", "4")
    table = run("benchmarks/overhead.py", *few).splitlines()
    ways = [line.split("|")[1].strip() for line in table if line.startswith("| MLP: ")]
    assert len(ways) == len(set(ways)) == 9
    assert ways[0] == "MLP: plain"
