"""Output of the processes that a trainer starts, read from outside."""

from __future__ import annotations

import io
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from joinables.trainer import Launcher, Trainer, output
from tests.ending import Ending
from tests.harness import at_night
from tests.joinables.trainer.modules import Classifier, loader
from tests.scripts import ROOT

ALONE: dict[str, Any] = {"ranks": 1, "group": False, "tidies": False}


class Talks(Classifier):
    """Writes in parts of lines; rank 2 has no batch."""

    def on_train_start(self) -> None:
        rank = self.trainer.global_rank
        print("a", rank, "a" * 3000)
        print("b", rank)
        for part in ("c ", f"{rank}\n", "end"):
            sys.stderr.write(part)
        logging.getLogger("mine").warning("of all\nranks")
        warnings.warn(f"of rank {rank}", stacklevel=1)


def talk(rank: int) -> None:
    logging.basicConfig(format="%(message)s")
    warnings.simplefilter("always")
    print("before")
    Trainer(devices=3, strategy="ddp_fork", logger=False).fit(Talks(), loader(12, 6))
    print("after", threading.active_count())


def parts(text: str, rank: int) -> list[str]:
    """The lines of a rank, without its number."""
    start = f"[rank {rank}] "
    return [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]


def test_each_line_has_its_rank(ending: Ending) -> None:
    (end,) = ending.ends(talk, **ALONE)
    assert end.code == 0, end.text
    stdout = end.text.removesuffix(end.stderr)
    assert [line for line in stdout.splitlines() if line[0] != "["] == ["before", "after 1"]
    assert all(line.startswith("[rank ") for line in end.stderr.splitlines())
    for rank in range(3):
        assert parts(stdout, rank) == [f"a {rank} {'a' * 3000}", f"b {rank}"]
        lines = parts(end.stderr, rank)
        assert lines[0] == f"c {rank}" and "endof all" in lines and "ranks" in lines
        assert sum(f"UserWarning: of rank {rank}" in line for line in lines) == 1


def test_a_bar_keeps_its_width() -> None:
    written = io.StringIO()
    lines = output._Lines(written, "[rank 0] ")
    for part in ("begin\n\n", "\r 50%", "\r100%\n", "1/2\r", "2/2\r", "\nend\n", "\r 50%"):
        lines.write(part)
    shown = "[rank 0] begin\n\n\r 50%\r100%\n[rank 0] 1/2\r[rank 0] 2/2\r\n[rank 0] end\n\r 50%"
    assert written.getvalue() == shown


def test_a_single_rank_needs_no_number(capfd: pytest.CaptureFixture[str]) -> None:
    Launcher(1, start_method="fork").launch(print, "line")
    assert capfd.readouterr().out == "line\n"


class IsKilled(Classifier):
    """Rank 1 is killed by its last statement."""

    def on_train_start(self) -> None:
        print("last line of", self.trainer.global_rank)
        self.trainer.run.collective.barrier()
        if self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def is_killed(rank: int) -> None:
    Trainer(devices=2, strategy="ddp_fork", logger=False).fit(IsKilled(), loader(12, 6))


def test_a_killed_rank_loses_no_line(ending: Ending) -> None:
    (here,) = ending.ends(is_killed, **ALONE)
    assert "WorkerDied: Rank 1 was killed by SIGKILL" in here.error
    assert {"[rank 0] last line of 0", "[rank 1] last line of 1"} <= set(here.text.splitlines())


class Asks(Classifier):
    """Rank 0 asks the person at the terminal, as a debugger does."""

    def on_train_start(self) -> None:
        if self.trainer.global_rank == 0:
            sys.stdin = os.fdopen(os.open("/dev/stdin", os.O_RDONLY))  # multiprocessing has closed it
            print("answer", input("(Pdb) "), sys.stdout.isatty(), sys.stderr.isatty(), flush=True)


def asks(rank: int, terminal: str) -> None:
    for number in range(3):
        os.dup2(os.open(terminal, os.O_RDWR), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    Trainer(devices=2, strategy="ddp_fork", enable_progress_bar=False, logger=False).fit(Asks(), loader(12, 6))


def test_rank_0_in_a_terminal(ending: Ending) -> None:
    controlling, terminal = pty.openpty()
    os.write(controlling, b"yes\n")
    (end,) = ending.ends(asks, os.ttyname(terminal), **ALONE)
    assert (end.code, os.read(controlling, 1000)) == (0, b"yes\r\n[rank 0] (Pdb) answer yes True True\r\n"), end.text
    os.close(terminal)
    os.close(controlling)


SCRIPT = """
from tests.joinables.trainer.test_output import Talks, Trainer, loader

if __name__ == "__main__":
    Trainer(devices=2, logger=False).fit(Talks(), loader(12, 6))
"""


@at_night
def test_spawned(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=True)
    for rank in range(2):
        assert parts(ended.stdout, rank) == [f"a {rank} {'a' * 3000}", f"b {rank}"]
    assert "UserWarning: of rank 1" in ended.stderr
