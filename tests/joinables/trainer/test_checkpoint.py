"""Checkpoint files: whole or not there, and read without running code."""

from __future__ import annotations

import builtins
import hashlib
import io
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from joinables.trainer import ModelCheckpoint, Trainer
from joinables.trainer.checkpoint import _SEAL
from tests.harness import at_night, in_test_all
from tests.joinables.trainer.modules import Classifier, loader, read_checkpoint, write_checkpoint

FORKS = multiprocessing.get_context("forkserver")


def write_for_ever(path: Path, written: Connection) -> None:
    for number in count(1):
        write_checkpoint({"number": number, "data": torch.full((200_000,), number)}, path)
        written.send(number)


def write_and_die(path: Path) -> None:
    os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    write_checkpoint({"number": 1}, path)


def test_what_a_killed_writer_leaves(tmp_path: Path) -> None:
    writer = FORKS.Process(target=write_and_die, args=(tmp_path / "file.ckpt",))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert re.fullmatch(r"\.joinables-\w+\.part", left)


def write_often(path: Path, number: int) -> None:
    for _ in range(5):
        write_checkpoint({"number": number, "data": torch.full((300_000 * (number + 1),), number)}, path)


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    write_often(path, 0)
    writers = [FORKS.Process(target=write_often, args=(path, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        state = read_checkpoint(path)
        assert bool((state["data"] == state["number"]).all())
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert names(tmp_path) == {"file.ckpt"}


@pytest.mark.parametrize("kind", ["pipe", "pipe with a writer", "device"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "pipe"
    if kind != "device":
        os.mkfifo(path)
    writer = os.open(path, os.O_RDWR) if kind == "pipe with a writer" else None
    with pytest.raises(ValueError, match=rf"ckpt_path='{path}' is not a .*: it does not end with the checksum"):
        Trainer().fit(Classifier(), loader(12), ckpt_path=path)
    if writer is not None:
        os.close(writer)


class Short(io.FileIO):
    """A file of which a read or a write moves a few bytes, as the system allows."""

    def read(self, size: int | None = -1, /) -> Any:
        return super().read(min(size, 1000) if size and size > 0 else size)

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(memoryview(buffer).cast("B")[:1000])

    def write(self, data: Any, /) -> int:
        return super().write(memoryview(data).cast("B")[:1000])


def test_short_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(file: Any, mode: str = "r", buffering: int = -1, *_: Any, opener: Any = None) -> Any:
        raw = Short(file, mode.replace("b", ""), opener=opener)
        return raw if buffering == 0 else (io.BufferedWriter if "w" in mode else io.BufferedReader)(raw)

    path, written = tmp_path / "file.ckpt", {"data": torch.arange(100_000)}
    with monkeypatch.context() as patch:
        for module in (io, builtins):
            patch.setattr(module, "open", opened)
        write_checkpoint(written, path)
        read = read_checkpoint(path)
    assert torch.equal(read["data"], written["data"])


def test_killed_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    for delay in (0.0, 0.003, 0.007, 0.011):
        here, there = FORKS.Pipe(duplex=False)
        writer = FORKS.Process(target=write_for_ever, args=(path, there))
        writer.start()
        there.close()
        assert here.recv() == 1
        time.sleep(delay)
        writer.kill()
        writer.join()
        here.close()
        state = read_checkpoint(path)
        assert bool((state["data"] == state["number"]).all())


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    write_checkpoint({"number": 1}, path)
    with pytest.raises(Exception, match=r"pickle|local object"):
        write_checkpoint({"number": lambda: None}, path)
    assert read_checkpoint(path) == {"number": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["file.ckpt"]


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def test_reading_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError, match=r"objects that cannot be read again: .*print\)") as caught:
        write_checkpoint({"x": Harmful()}, tmp_path / "bad.ckpt")
    assert "weights_only" not in str(caught.value) and caught.value.__context__ is None  # torch's advice
    assert names(tmp_path) == set()
    torch.save({"x": Harmful()}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other.ckpt' is not .*: it does not end with the checksum"):
        read_checkpoint(tmp_path / "other.ckpt")
    assert "must not run" not in capsys.readouterr().out


def seal(path: Path) -> None:
    path.write_bytes((data := path.read_bytes()) + _SEAL + hashlib.sha256(data).hexdigest().encode())


def test_compressed_entries_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gigabytes of zeros are a file of three megabytes."""
    torch.save({"data": torch.zeros(100_000)}, tmp_path / "stored")
    with zipfile.ZipFile(tmp_path / "stored") as stored, zipfile.ZipFile(tmp_path / "small.ckpt", "w") as small:
        for name in stored.namelist():
            small.writestr(name, stored.read(name), zipfile.ZIP_DEFLATED if "data.pkl" in name else zipfile.ZIP_STORED)
    seal(tmp_path / "small.ckpt")
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(ValueError, match=r"ckpt_path='.*small.ckpt' .*: it has compressed entries\. .*\[J794\]"):
        read_checkpoint(tmp_path / "small.ckpt")


@pytest.mark.parametrize("kind", ["object", "script", "no archive", "no pickle"])
def test_a_sealed_file_of_another_kind(tmp_path: Path, kind: str) -> None:
    """Torch's text would advise ``weights_only=False``; it does not appear, even further up in the traceback."""
    path = tmp_path / "file.ckpt"
    if kind in ("script", "no pickle"):
        entries = {"data.pkl": b"\x80\x02(.", "version": b"3\n", "byteorder": b"little"}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in {**entries, **({"constants.pkl": b""} if kind == "script" else {})}.items():
                archive.writestr(f"file/{name}", data)
    else:
        torch.save({"x": Harmful()}, path, _use_new_zipfile_serialization=kind == "object")
    seal(path)
    warned = pytest.warns(match="TorchScript") if kind == "script" else nullcontext()
    with warned, pytest.raises(ValueError, match=r"not a checkpoint that a Trainer has written, .*\[J794\]") as caught:
        read_checkpoint(path)
    assert ("data and tensors (builtins.print)" in str(caught.value)) == (kind == "object")
    assert "weights_only" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None


def damaged(data: bytes) -> Iterator[bytes]:
    """``data`` with one bit flipped, at hundreds of places, cut off, or with more behind it."""
    end = len(data)
    for place in sorted({*range(0, end, 37), *range(64), *range(end - 160, end)}):
        yield data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
    for length in (0, 1, 22, end // 3, end - 80, end - 72, end - 1):
        yield data[:length]
    for more in (b"\0", b"\n", data[-72:], data):
        yield data + more


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    written = {"weight": torch.randn(60, 7), "bias": torch.randn(7), "name": "classifier", "epochs": [1, 2.5, None]}
    write_checkpoint(written, path)
    data = path.read_bytes()
    for changed in damaged(data):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=re.escape(repr(str(path)))):
            read_checkpoint(path)
    path.write_bytes(data)
    assert str(read_checkpoint(path)) == str(torch.load(path, weights_only=True)) == str(written)  # also without us


FULL_DISK = """
import errno, sys
from pathlib import Path
import torch
from joinables.trainer import ModelCheckpoint, Trainer
from tests.joinables.trainer.modules import Classifier, loader, read_checkpoint, write_checkpoint

folder = Path(sys.argv[1])
path = folder / "file.ckpt"

def fill():
    with open(folder / "filler", "ab", buffering=0) as filler:
        try:
            while filler.write(bytes(1000)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC

def fails(call, *args, **options):
    found = names()
    try:
        call(*args, **options)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        assert names() == found
        return error
    raise AssertionError("the disk should be full")

def names():
    return sorted(str(each) for each in folder.rglob("*"))

write_checkpoint({"number": 1}, path)
keeper = ModelCheckpoint(folder / "kept", save_last=True)
trainer = Trainer(devices=1, max_epochs=1, callbacks=keeper, default_root_dir=folder)
module = Classifier()
trainer.fit(module, loader(12))
kept = keeper.best_model_path, keeper.last_model_path
for filled in (False, True):
    if filled:
        fill()
    for size in (1, 10_000, 1_000_000) if filled else (1_000_000,):
        error = fails(write_checkpoint, {"data": torch.zeros(size)}, path)
        assert error.filename == str(path), error
trainer.max_epochs = 2
error = fails(trainer.fit, module, loader(12))
assert Path(error.filename).parent == folder / "kept", error
assert (keeper.best_model_path, keeper.last_model_path) == kept
assert read_checkpoint(path) == {"number": 1}
assert [read_checkpoint(each)["epochs"] for each in kept] == [1, 1]
print("done")
"""


@at_night
def test_a_full_disk(tmp_path: Path) -> None:
    """One of 2 MB, which only its own process sees."""
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    disk = f"mount -t tmpfs -o size=2m tmpfs '{tmp_path}'"
    if subprocess.run([*mount, disk], capture_output=True).returncode:
        pytest.skip("needs unshare, and user namespaces in which disks may be mounted")
    script = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    assert subprocess.run([*mount, f'{disk} && exec "$@"', "sh", *script], stdout=subprocess.PIPE).stdout == b"done\n"


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if each.name != "logs"}


@in_test_all
def test_the_best_are_kept(tmp_path: Path) -> None:
    class Scripted(Classifier):
        scores = (0.5, 0.3, float("nan"), 0.4, 0.6)

        def on_validation_epoch_end(self) -> None:
            self.log("score", self.scores[self.trainer.current_epoch])

    def kept(name: str, **options: Any) -> tuple[set[int], ModelCheckpoint]:
        """The epochs of the files, and the keeper."""
        keeper = ModelCheckpoint(tmp_path / name, **options)
        Trainer(max_epochs=5, callbacks=keeper).fit(Scripted(), loader(12), loader(12))
        assert names(tmp_path / name) <= {"last.ckpt", *(f"epoch={e}-step={2 * e + 2}.ckpt" for e in range(5))}
        return {int(each[6]) for each in names(tmp_path / name) - {"last.ckpt"}}, keeper

    found, keeper = kept("min", monitor="score", save_top_k=2, save_last=True)
    assert found == {1, 3}
    assert (Path(keeper.best_model_path).name, keeper.best_model_score) == ("epoch=1-step=4.ckpt", 0.3)
    assert read_checkpoint(tmp_path / "min" / "last.ckpt")["epochs"] == 5
    found, keeper = kept("max", monitor="score", mode="max")
    assert (found, keeper.best_model_score) == ({4}, 0.6)
    found, keeper = kept("latest")
    assert (found, keeper.best_model_score) == ({4}, None)
    assert kept("all", save_top_k=-1)[0] == {0, 1, 2, 3, 4}
    Scripted.scores = (float("nan"), float("inf"), float("nan"), float("inf"), float("nan"))
    assert kept("worst", monitor="score")[0] == {1}
    found, keeper = kept("steps", every_n_train_steps=4, save_top_k=0, save_last=True)
    assert (found, names(tmp_path / "steps")) == (set(), {"last.ckpt"})
    assert read_checkpoint(tmp_path / "steps" / "last.ckpt")["global_step"] == 10


def test_the_last_is_that_of_the_end(tmp_path: Path) -> None:
    """Also where that is in the middle of an epoch."""
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    trainer, module = Trainer(max_epochs=5, max_steps=0, callbacks=keeper), Classifier()
    trainer.fit(module, loader(30))
    assert trainer.global_step == 0
    assert names(tmp_path) == set()
    for trainer.max_steps in (3, 7, 10):
        trainer.fit(module, loader(30))
        assert keeper.last_model_path == str(tmp_path / "last.ckpt")
        assert read_checkpoint(keeper.last_model_path)["global_step"] == trainer.max_steps
    assert names(tmp_path) == {"epoch=1-step=10.ckpt", "last.ckpt"}


def test_two_keepers_leave_each_other_alone(tmp_path: Path) -> None:
    class Scripted(Classifier):
        scores = ((0.9, 0.1), (0.2, 0.2), (0.5, 0.9), (0.6, 0.3), (0.7, 0.3))

        def on_validation_epoch_end(self) -> None:
            for name, score in zip("ab", self.scores[self.trainer.current_epoch], strict=True):
                self.log(name, score)

    keepers = [
        ModelCheckpoint(tmp_path, monitor="a"),
        ModelCheckpoint(tmp_path, monitor="b", mode="max"),
        ModelCheckpoint(tmp_path, save_last=True),
        ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1),
    ]
    Trainer(max_epochs=5, callbacks=keepers).fit(Scripted(), loader(12), loader(12))
    assert [read_checkpoint(keeper.best_model_path)["epochs"] for keeper in keepers[:3]] == [2, 3, 5]
    assert len({keeper.best_model_path for keeper in keepers}) == 4
    assert len(names(tmp_path)) == 3 + 1 + 5


def test_a_fit_that_ends_early_keeps_what_it_has(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path)
    trainer, module = Trainer(max_steps=3, callbacks=keeper), Classifier()
    for trainer.max_steps in (3, 7):
        trainer.fit(module, loader(30))
        path = keeper.best_model_path
        assert read_checkpoint(path)["global_step"] == trainer.max_steps
    keeper = ModelCheckpoint(tmp_path / "best", monitor="val_loss")
    Trainer(max_steps=3, callbacks=keeper).fit(Classifier(), loader(30), loader(12))
    assert math.isnan(keeper.best_model_score or 0.0)
    Trainer(max_steps=7, callbacks=keeper).fit(Classifier(), loader(30), loader(12))
    assert read_checkpoint(keeper.best_model_path)["global_step"] == 5


def test_a_fit_that_goes_on_from_before_what_another_discarded(tmp_path: Path) -> None:
    class Scripted(Classifier):
        scores = (0.5, 0.3)

        def on_validation_epoch_end(self) -> None:
            self.log("score", self.scores[self.trainer.current_epoch])

    def best(max_epochs: int, ckpt_path: Path | None = None) -> Path:
        keeper = ModelCheckpoint(tmp_path, monitor="score")
        fit = Trainer(max_epochs=max_epochs, callbacks=keeper).fit
        fit(Scripted(), loader(12), loader(12), ckpt_path=ckpt_path)
        return Path(keeper.best_model_path)

    first = best(1).rename(tmp_path / "first")  # a better one discards it
    Scripted.scores = (0.5, 0.7)
    assert best(2, first).name == "epoch=1-step=4.ckpt"


def test_a_metric_of_epochs_for_files_of_steps(tmp_path: Path) -> None:
    """There is none in the first epoch, and any that comes later is better."""
    keeper = ModelCheckpoint(tmp_path, monitor="train_loss", every_n_train_steps=3)
    trainer = Trainer(max_epochs=2, callbacks=keeper)
    trainer.fit(Classifier(), loader(30))
    assert names(tmp_path) == {"epoch=1-step=6.ckpt"}
    keeper = ModelCheckpoint(tmp_path, monitor="train_los", every_n_train_steps=3)
    with pytest.raises(ValueError, match=r"monitor='train_los' was not logged\. Use one of .*train_loss"):
        Trainer(callbacks=keeper).fit(Classifier(), loader(30))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "best"}, "mode='best'"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ModelCheckpoint(**options)
    with pytest.raises(TypeError, match=r"save_top_k='3'.* Pass a whole number, or -1 for all\. \[J741\]"):
        ModelCheckpoint(save_top_k="3")  # pyright: ignore[reportArgumentType]


def test_files_outside_the_folder_are_never_removed(tmp_path: Path) -> None:
    """Their paths come from a checkpoint, which another user may have written."""
    keeper = ModelCheckpoint(tmp_path / "mine")
    others = [tmp_path / "theirs.ckpt", tmp_path / "mine" / ".." / "near.ckpt", tmp_path / "mine" / "old.ckpt"]
    (tmp_path / "mine").mkdir()
    for other in others:
        other.touch()
    keeper.load_state_dict({"kept": {str(other): 0.0 for other in others}, "last": "", "step": 0})
    Trainer(callbacks=keeper).fit(Classifier(), loader(12))
    assert names(tmp_path) == {"mine", "theirs.ckpt", "near.ckpt"}
    assert names(tmp_path / "mine") == {"epoch=0-step=2.ckpt"}


def test_metric_that_is_not_there(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="val_los")
    with pytest.raises(ValueError, match=r"monitor='val_los' was not logged\. Use one of .*val_loss"):
        Trainer(callbacks=keeper).fit(Classifier(), loader(12), loader(12))
