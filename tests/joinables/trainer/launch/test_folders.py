"""Temporary folders: what a killed process leaves goes, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from joinables.trainer import Trainer
from joinables.trainer.launch.folders import temporary_folder
from tests.joinables.trainer.modules import Classifier, loader

HOLDS = """
import sys, time
from joinables.trainer.launch.folders import temporary_folder

with temporary_folder() as folder:
    (folder / "file").touch()
    print(folder.name, flush=True)
    time.sleep(1000)
"""

FITS = """
import os, sys, time
from pathlib import Path
from joinables.trainer import Callback, Trainer
from tests.joinables.trainer.modules import Classifier, loader

class Slow(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        part = Path(sys.argv[1], f"{trainer.global_rank}.part")
        part.write_text(str(os.getpid()))
        part.rename(part.with_suffix(".pid"))
        time.sleep(1000)

if __name__ == "__main__":
    Trainer(devices=2, callbacks=Slow()).fit(Classifier(), loader())
"""


@pytest.fixture
def folder(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, here and in processes that are started."""
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    monkeypatch.setenv("TMPDIR", str(short_path))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    return short_path


def ours(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if each.name.startswith("joinables-")}


def test_only_what_killed_processes_leave_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(3)
    ]
    killed, stopped, _ = holders
    names = [holder.stdout.readline().strip() for holder in holders if holder.stdout is not None]
    try:
        (folder / "joinables-other").mkdir()  # of an older version, or of somebody else
        stopped.send_signal(signal.SIGSTOP)
        killed.kill()
        killed.wait()
        (folder / "joinables-link").symlink_to(names[0])
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with temporary_folder():
            assert names[0] in ours(folder), "it is another user's"
        monkeypatch.undo()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with temporary_folder() as mine:
            assert ours(folder) == {*names[1:], mine.name, "joinables-other", "joinables-link"}
            assert (folder / names[2] / "file").exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    with temporary_folder():
        pass
    assert ours(folder) == {"joinables-other", "joinables-link"}


def test_folders_of_a_killed_trainer_go_with_the_next_run(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FITS)
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while len(files := list(tmp_path.glob("*.pid"))) < 2:
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert ours(folder)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while any(Path("/proc", file.read_text()).exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    Trainer().fit(Classifier(), loader(12))
    assert not ours(folder)
