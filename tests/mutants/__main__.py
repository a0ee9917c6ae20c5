"""Put each mutant into a copy of the repository, and run its test there: ``python -m tests.mutants [--only TEXT]``.

It prints a line for each mutant. ``killed``: its test passes without it and fails with it, or does not end. ``ALIVE``:
its test passes with it. ``stale``: it cannot be put in, or its test does not pass without it, or does not run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import all_mutants
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parent.parent.parent
LONGEST = 300.0  # seconds of a test without mutants
NOT_RUN = (2, 3, 4, 5)  # pytest's exit codes: interrupted, as by an error of syntax; its own errors; no such test


class Copy:
    """A copy of all files of the repository, but of those that git ignores."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listing, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        self.passes_in = cache(self._passes_in)

    def _passes_in(self, test: str) -> float | None:
        """The seconds in which a test passes without a mutant; ``None`` if it does not."""
        began = time.monotonic()
        return None if self._run(test, LONGEST) else time.monotonic() - began

    def verdict(self, mutant: Mutant) -> str:
        """Whether a mutant is killed, ALIVE or stale, and why it is stale."""
        file = self._folder / mutant.path
        before = file.read_text()
        if not (changed := mutant.applied(before)):
            return "stale (its old text is not in the file exactly once)"
        if (seconds := self.passes_in(mutant.killed_by)) is None:
            return "stale (its test does not pass without it)"
        file.write_text(changed)
        try:
            code = self._run(mutant.killed_by, 30 + 4 * seconds)
        finally:
            file.write_text(before)
        return "stale (its test does not run)" if code in NOT_RUN else "killed" if code else "ALIVE"

    def _run(self, test: str, limit: float) -> int:
        """Run a test in a process of its own, and return the exit code of pytest; -1 if it has not ended in time."""
        if (pid := os.fork()) == 0:
            self._be_pytest(test)
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

    def _be_pytest(self, test: str) -> None:
        """Become a process that runs a test of the copy, with torch imported already; this does not return."""
        code = 3
        try:
            os.setsid()
            os.chdir(self._folder)
            for stream in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "join", "joinables")]:
                del sys.modules[name]
            sys.path[:] = [str(self._folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
            # No compiled files, since one of a mutant may be as old and as long as one of the next mutant.
            sys.dont_write_bytecode = True
            os.environ |= {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1", "TESTS": "all"}
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", test]))
        finally:
            os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants with this text in their path, code or test")
    parser.add_argument("--most", type=int, metavar="N", help="no more than so many of these")
    options = parser.parse_args()
    chosen = [mutant for mutant in all_mutants() if any(options.only in part for part in mutant)][: options.most]
    verdicts: list[str] = []
    importlib.import_module("torch.distributed.fsdp")  # once, for all tests: it takes seconds of processor time
    with tempfile.TemporaryDirectory(prefix="join-mutants-") as folder:
        copy = Copy(Path(folder))
        for mutant in chosen:
            verdicts.append(copy.verdict(mutant))
            print(f"{verdicts[-1]}: {mutant.path}: {mutant.old!r} -> {mutant.new!r} ({mutant.killed_by})", flush=True)
    killed = verdicts.count("killed")
    print(f"{killed} of {len(verdicts)} mutants killed")
    sys.exit(killed != len(verdicts))


if __name__ == "__main__":
    main()
