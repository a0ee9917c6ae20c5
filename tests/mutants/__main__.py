"""Put each mutant into a copy of the repository, and run its test there: ``python -m tests.mutants [--only TEXT]``.

It prints a line for each mutant. ``killed``: its test passes without it and fails with it, or does not end. ``ALIVE``:
its test passes with it. ``stale``: it cannot be put in, or its test does not pass without it, or does not run.

All tests first run without a mutant, in one process. Each process that runs tests is forked from this one, which has
imported torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from compileall import compile_dir
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from tests.mutants import all_mutants
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parent.parent.parent
LONGEST = 3600.0  # seconds of all tests without a mutant
NOT_RUN = (2, 3, 4, 5)  # pytest's exit codes: interrupted, as by an error of syntax; its own errors; no such test


class _Report:
    """A plugin of pytest that writes the seconds of each test that passed, and ``None`` for others, to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float | None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = before + report.duration if before is not None and report.passed else None

    def pytest_sessionfinish(self) -> None:
        self._file.write_bytes(pickle.dumps(self._seconds))

    def read(self) -> dict[str, float | None]:
        return pickle.loads(self._file.read_bytes()) if self._file.exists() else {}


class Copy:
    """A copy of all files of the repository, but of those that git ignores.

    Args:
        folder: where it is made.
        tests: those that are to fail with a mutant.
    """

    def __init__(self, folder: Path, tests: Sequence[str]) -> None:
        self._folder = folder
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listing, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        # By hash, since a file of one mutant may be as old and as long as that of the next one.
        compile_dir(folder, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        report = _Report(folder / "report")
        self._run(tests, LONGEST, report)
        self._seconds = report.read()

    def _passes_in(self, test: str) -> float | None:
        """The seconds in which a test, or all of its cases, pass without a mutant; ``None`` if they do not."""
        own = [
            seconds
            for name, seconds in self._seconds.items()
            if name == test or name.startswith((f"{test}[", f"{test}:"))
        ]
        return None if None in own or not own else sum(each for each in own if each)

    def verdict(self, mutant: Mutant) -> str:
        """Whether a mutant is killed, ALIVE or stale, and why it is stale."""
        file = self._folder / mutant.path
        before = file.read_text()
        if not (changed := mutant.applied(before)):
            return "stale (its old text is not in the file exactly once)"
        if (seconds := self._passes_in(mutant.killed_by)) is None:
            return "stale (its test does not pass without it)"
        file.write_text(changed)
        try:
            code = self._run([mutant.killed_by], 60 + 4 * seconds)
        finally:
            file.write_text(before)
        if code in NOT_RUN:
            return "stale (its test does not run)"
        return "killed (its test did not end)" if code < 0 else "killed" if code else "ALIVE"

    def _run(self, tests: Sequence[str], limit: float, report: _Report | None = None) -> int:
        """Run tests in a process of its own, and return the exit code of pytest; -1 if it has not ended in time."""
        if (pid := os.fork()) == 0:
            self._be_pytest(["-x", *tests] if report is None else tests, report)
        deadline, ended, status = time.monotonic() + limit, 0, 0
        try:
            while not ended and time.monotonic() < deadline:
                time.sleep(0.02)
                ended, status = os.waitpid(pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if ended else -1
        finally:
            if not ended:
                os.killpg(pid, signal.SIGKILL)  # its ranks are in its group
                os.waitpid(pid, 0)

    def _be_pytest(self, arguments: Sequence[str], report: _Report | None) -> None:
        """Become a process that runs tests of the copy, with torch imported already; this does not return."""
        code = 3
        try:
            os.setsid()
            os.chdir(self._folder)
            for stream in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "join", "joinables")]:
                del sys.modules[name]
            sys.path[:] = [str(self._folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
            sys.dont_write_bytecode = True
            os.environ |= {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1", "TESTS": "all"}
            code = int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments], [report] if report else []))
        finally:
            os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants with this text in their path, code or test")
    parser.add_argument("--most", type=int, metavar="N", help="no more than so many of these")
    options = parser.parse_args()
    chosen = [mutant for mutant in all_mutants() if any(options.only in part for part in mutant)][: options.most]
    if not chosen:
        parser.error(f"--only={options.only}: no mutant has this text. Pass a part of a path, of code or of a test.")
    verdicts: list[str] = []
    for name in ("torch.distributed.fsdp", "torch._dynamo"):  # once, for all tests: it takes seconds of processor time
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="join-mutants-") as folder:
        copy = Copy(Path(folder), sorted({mutant.killed_by for mutant in chosen}))
        for mutant in chosen:
            verdicts.append(copy.verdict(mutant))
            print(f"{verdicts[-1]}: {mutant.path}: {mutant.old!r} -> {mutant.new!r} ({mutant.killed_by})", flush=True)
    killed = sum(verdict.startswith("killed") for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} mutants killed")
    sys.exit(killed != len(verdicts))


if __name__ == "__main__":
    main()
