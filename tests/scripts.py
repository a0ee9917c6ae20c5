"""Scripts in a process that is forked from one that has imported torch, and so are theirs: see :func:`run_forked`.

A script and each process that it starts would import torch, which takes seconds of CPU.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed.run
import torch.multiprocessing

import joinables.trainer
from joinables.trainer import Launcher, strategy
from tests import torchrun
from tests.ending import Ending
from tests.versions import own_lines

ROOT = Path(joinables.__file__).parent.parent
TORCHRUN = "torch.distributed.run"


class Forking(Launcher):
    """A launcher that forks its workers."""

    def __init__(self, world_size: int, **options: Any) -> None:
        options["start_method"] = "fork"
        super().__init__(world_size, **options)


def as_script(rank: int, folder: str, script: str, *arguments: str) -> None:
    """Run a file, a module or torchrun in a folder, as the interpreter would; what it spawns is forked."""
    start: Any = torch.multiprocessing.start_processes

    def fork(*args: Any, **options: Any) -> Any:
        return start(*args, **options | {"start_method": "fork"})

    torch.multiprocessing.spawn = torch.multiprocessing.start_processes = fork  # type: ignore[assignment]
    joinables.trainer.Launcher = strategy.Launcher = Forking
    torchrun.forks()
    sys.argv = [script, *arguments]
    os.chdir(folder)
    if script == TORCHRUN:
        os.environ["OMP_NUM_THREADS"] = "1"  # or it says that it has chosen so
        torch.distributed.run.main(arguments)
    elif script.endswith(".py"):
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def complaints(stderr: str) -> str:
    """What a script has written to stderr, without the paths of logs and the progress of the demo."""
    stderr = stderr.partition("nanobind: leaked")[0]  # triton tells that a fork does not free it
    return re.sub(r"^(Logged to|training) .*\n", "", stderr, flags=re.MULTILINE)


def run_forked(ending: Ending, *args: str, folder: Path = ROOT, limit: float = 100) -> str:
    """What is printed by what ``python`` (or ``python -m``) does with these arguments, and nothing goes wrong."""
    (end,) = ending.ends(as_script, str(folder), *args, ranks=1, group=False, limit=limit)
    assert (end.code, complaints(end.stderr)) == (0, ""), end.text
    return own_lines(end.text.removesuffix(end.stderr))
