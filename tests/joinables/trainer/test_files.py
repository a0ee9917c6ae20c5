"""Files that replace others, whatever is in the way, and what killed processes leave."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from joinables.trainer.files import replacing, temporary_folder
from tests.joinables.trainer.modules import write_checkpoint


def write(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")


def checkpoint(path: Path) -> None:
    write_checkpoint({"number": 1}, path)


WRITERS = pytest.mark.parametrize("writer", [write, checkpoint])


@WRITERS
def test_no_link_is_followed(tmp_path: Path, writer: Callable[[Path], None]) -> None:
    """Neither one at the file, nor one at a name that could be guessed."""
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_text("precious")
    for link in (path, tmp_path / ".file.part", tmp_path / "file.part"):
        link.symlink_to(other)
    writer(path)
    assert other.read_text() == "precious"
    assert path.is_file() and not path.is_symlink()


@WRITERS
def test_no_pipe_or_folder_is_replaced(tmp_path: Path, writer: Callable[[Path], None]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=rf"The path '{path}' is a folder, a device or a pipe, .* \[J580\]"):
            writer(path)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path)
    with pytest.raises(OSError, match="no space") as caught, replacing(path) as file:
        file.write(b"other")
        raise OSError(28, "no space")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions(tmp_path: Path) -> None:
    for mode in (0o600, 0o666):
        with replacing(tmp_path / "file", mode) as file:
            assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~mode == 0
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) & 0o700 == 0o600
    with temporary_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_a_file_that_survives_is_on_the_disk_before_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    path = tmp_path / "file"
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.readlink(f"/proc/self/fd/{fd}"), path.exists())))
    write_checkpoint({}, path)
    (part, was_there), (folder, is_there) = synced
    assert (Path(part).parent, was_there, folder, is_there) == (tmp_path, False, str(tmp_path), True)


def test_nothing_is_touched_that_another_process_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may belong to another user, who chose its name and made it too deep to be removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = os.fork()
    if not gone:
        with temporary_folder() as folder, replacing(Path(folder, "file")):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(gone, 0)
    (left,) = tmp_path.glob("*/.*.part")
    with temporary_folder():
        write(tmp_path / "file")
        write(left.parent / "file")
    assert left.exists() and len(list(tmp_path.iterdir())) == 2


def test_a_part_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "unlink", mock.Mock(side_effect=PermissionError("refused")))
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "file"):
        raise ZeroDivisionError
