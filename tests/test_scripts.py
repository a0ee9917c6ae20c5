"""The demo and the tutorials run, say what they claim, and leave nothing behind; so does a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Torch itself warns of torch.jit.script when its ZeRO is imported; here literal, unlike in pyproject.toml.
STRICT = [
    "-W",
    "error",
    *[
        part
        for name in ("script", "interface")
        for part in ("-W", f"ignore:`torch.jit.{name}` is deprecated:DeprecationWarning")
    ],
]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*args: str, timeout: float = 110, strict: bool = True) -> str:
    command = [sys.executable, *(STRICT if strict else []), *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "tutorials").glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_tutorial(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80
    assert run(str(path)).strip()


def test_tutorial_says_the_same_under_torchrun() -> None:
    path = str(ROOT / "tutorials" / "07_torchrun.py")
    alone, launched = run(path).splitlines(), run(*TORCHRUN, path, strict=False).splitlines()
    assert "started by the trainer" in alone[0]
    assert "started by torchrun" in launched[0]
    assert len(alone) == 2
    assert launched[1:] == alone[1:]  # so rank 1 has printed nothing


def test_what_a_user_writes_is_short() -> None:
    lines = (ROOT / "demo" / "train.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


@pytest.mark.timeout(200)
def test_demo(tmp_path: Path) -> None:
    printed = run("-m", "demo", "--epochs", "2", "--out", str(tmp_path), timeout=190)
    assert "DDP + Adam" in printed
    assert sorted(each.name for each in tmp_path.iterdir()) == ["result.json", "timeline.png"]
    result = json.loads((tmp_path / "result.json").read_text())
    for run_of in result["runs"].values():
        assert run_of["joinables"]["parameter_difference"] < 2e-6
        assert run_of["joinables"]["buffer_difference"] < 2e-6
        assert run_of["joinables"]["accuracy"] > 0.95
        assert run_of["torch"]["status"] != "finished" or run_of["torch"]["parameter_difference"] > 1e-3
    assert (tmp_path / "timeline.png").stat().st_size > 20_000


def test_demo_without_its_extra_says_what_to_install() -> None:
    forget = "import sys, runpy; sys.modules['sklearn'] = None; sys.argv = ['demo']"
    probe = f"{forget}; runpy.run_module('demo', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert result.returncode != 0
    assert "pip install 'joinables[demo]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_benchmark_of_overhead_runs_every_way() -> None:
    few = ("--only", "MLP", "--rounds", "1", "--launches", "1", "--steps", "4")
    table = run("benchmarks/overhead.py", *few, strict=False).splitlines()
    ways = [line.split("|")[1].strip() for line in table if line.startswith("| MLP: ")]
    assert len(ways) == len(set(ways)) == 8
    assert ways[0] == "MLP: plain"
