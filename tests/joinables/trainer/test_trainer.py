"""A trainer that starts its processes itself: everything comes back, whatever happens in them."""

from __future__ import annotations

import copy
import fcntl
import gc
import importlib
import math
import multiprocessing
import os
import pickle
import pty
import random
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from joinables.trainer import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    NotPicklable,
    Trainer,
    TrainModule,
    WorkerDied,
)
from joinables.trainer.launch import Place
from tests.harness import NIGHT, in_test_all
from tests.joinables.trainer.modules import Classifier, dataset, loader, read_checkpoint
from tests.scripts import ROOT
from tests.training import TOLERANCE, assert_same, flat_state


@pytest.fixture(autouse=True)
def nothing_left(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No process and no temporary file stays behind."""
    importlib.import_module("torch._dynamo")  # as optimizers do, where it makes a folder for temporary files
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    others = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= others
    assert list(short_path.iterdir()) == []


class Metrics(Callback):
    """Logs very many metrics, and keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for index in range(1_000 if batch_idx == 0 else 0):
            module.log(f"metric {index}", float(index))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(f"epoch {trainer.current_epoch}")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = list(state["seen"])


class Counting(Classifier):
    """Counts its steps."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


@in_test_all
def test_everything_comes_back(tmp_path: Path) -> None:
    """fit, test, predict, fit on one trainer: counters, metrics, weights, callbacks; and as one longer fit."""
    environ = dict(os.environ)

    def build(epochs: int, name: str) -> Trainer:
        keeper = ModelCheckpoint(tmp_path / name, monitor="val_loss", save_top_k=2)
        callbacks = [Metrics(), keeper]
        return Trainer(devices=2, max_epochs=epochs, seed=0, callbacks=callbacks, default_root_dir=tmp_path)

    data = loader(30, 4, shuffle=True), loader(21, 4)
    module = Counting()
    trainer = build(1, "parts")
    trainer.fit(module, *data)
    assert (trainer.epochs, trainer.global_step, trainer.should_stop) == (1, 4, False)
    assert len(trainer.callback_metrics) == 1_004
    assert trainer.callback_metrics["metric 999"] == 999
    keeper = next(each for each in trainer.callbacks if isinstance(each, ModelCheckpoint))
    best = keeper.best_model_path
    assert keeper.best_model_score == trainer.callback_metrics["val_loss"]
    assert Path(best).is_file()
    assert trainer.join_report is not None
    assert [row.steps for row in trainer.join_report.ranks] == [4, 4]
    kept = torch.load(best, weights_only=True)["module"]
    assert_same(flat_state(kept), flat_state(module.state_dict()))

    steps = module.steps
    assert steps.item() == 4

    restored = Counting()
    tested = trainer.test(restored, data[1], ckpt_path=best)[0]
    assert_same(flat_state(restored.state_dict()), flat_state(kept))
    assert tested["test_loss"] == pytest.approx(trainer.callback_metrics["val_loss"], abs=1e-12)
    assert trainer.callback_metrics["test_loss"] == tested["test_loss"]
    predictions = trainer.predict(module, loader(21, 4, num_workers=1))
    assert torch.allclose(torch.cat(predictions), module.eval()(data[1].dataset.tensors[0]), atol=TOLERANCE)  # pyright: ignore[reportAttributeAccessIssue]
    module.train()
    assert module.steps is steps

    trainer.max_epochs = 3
    trainer.fit(module, *data)
    assert (trainer.epochs, steps.item()) == (3, 12)
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    assert trainer.callbacks[0].seen == ["epoch 0", "epoch 1", "epoch 2"]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(list((tmp_path / "parts").glob("*.ckpt"))) == 2

    whole = Counting()
    expected = build(3, "whole")
    expected.fit(whole, *data)
    assert_same(flat_state(module.state_dict()), flat_state(whole.state_dict()))
    assert trainer.callback_metrics["val_loss"] == expected.callback_metrics["val_loss"]
    assert os.environ == environ


class Draws(Classifier):
    """Predicts random numbers."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return [random.random(), torch.rand(())]


def test_random_numbers_go_on_from_those_of_this_process() -> None:
    def predict(ranks: int) -> Any:
        torch.manual_seed(3)
        random.seed(3)
        predicted = Trainer(devices=ranks, accelerator="cpu").predict(Draws(), loader(4 * ranks, 4))
        return predicted, [random.random(), torch.rand(())]

    (predicted,), then = predict(1)
    assert predict(2) == ([predicted, predicted], then)


class PredictsColumn(Classifier):
    """Predicts a part of what it computed."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"first": self(batch[0])[:, 0], "sparse": batch[1].to_sparse()}


def test_predictions_hold_nothing_else() -> None:
    predicted = Trainer(accelerator="cpu").predict(PredictsColumn(), loader(8, 4))
    assert [each["first"].untyped_storage().nbytes() for each in predicted] == [4 * 4, 4 * 4]
    whole = Classifier().eval()(dataset(8).tensors[0])
    assert torch.allclose(torch.cat([each["first"] for each in predicted]), whole[:, 0], atol=TOLERANCE)
    assert predicted[0]["sparse"].is_sparse


class Exhausted(Classifier):
    """Asks an iterator for too much."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        next(iter(()))


def test_a_step_may_raise_whatever_it_wants() -> None:
    with pytest.raises(StopIteration):
        Trainer().validate(Exhausted(), loader())


class Failing(Callback):
    """Fails on one rank, in the middle of a fit."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            if self.how == "exit":
                os._exit(3)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how:
                raise KeyError(f"{self.how} on rank 1")


def fails(how: str) -> None:
    module = Classifier()
    before = flat_state(copy.deepcopy(module.state_dict()))
    try:
        Trainer(devices=2, callbacks=Failing(how)).fit(module, loader(30, 4))
    finally:
        assert_same(flat_state(module.state_dict()), before)


@pytest.mark.spawns
def test_a_worker_that_raises() -> None:
    with pytest.raises(KeyError, match="raise on rank 1") as caught:
        fails("raise")
    assert "on_train_batch_end" in str(caught.value.__cause__)


def test_a_worker_that_exits() -> None:
    with pytest.raises(WorkerDied, match="Rank 1 exited with code 3"):
        fails("exit")


def test_a_worker_that_is_killed() -> None:
    with pytest.raises(WorkerDied, match="Rank 1 was killed by SIGKILL"):
        fails("kill")


@in_test_all
def test_files_of_a_fit_that_failed(tmp_path: Path) -> None:
    """They are known, and a fit goes on from there; one that begins anew writes the same again."""
    keeper = ModelCheckpoint(tmp_path / "files", save_last=True, save_top_k=-1, every_n_train_steps=1)
    failing = Failing("kill")
    trainer, module = Trainer(devices=2, seed=0, callbacks=[failing, keeper]), Classifier(dropout=0.2)
    with pytest.raises(WorkerDied):
        trainer.fit(module, loader(30, 4))
    assert Path(keeper.last_model_path) == tmp_path / "files" / "last.ckpt"
    last = shutil.copy(keeper.last_model_path, tmp_path)
    assert read_checkpoint(last)["global_step"] == 2
    assert Path(keeper.best_model_path).is_file()
    failing.how = ""
    trainer.fit(module, loader(30, 4))
    written = {"last.ckpt", *(f"epoch=0-step={step}.ckpt" for step in range(1, 5))}
    assert {each.name for each in (tmp_path / "files").iterdir()} == written
    resumed = Classifier(dropout=0.2)
    Trainer(devices=2, seed=0).fit(resumed, loader(30, 4), ckpt_path=last)
    assert_same(flat_state(resumed.state_dict()), flat_state(module.state_dict()))


INTERRUPTED = """
import os, signal, sys, threading, time
from joinables.trainer import Callback, DDPStrategy, Trainer
from tests.joinables.trainer.modules import Classifier, loader

class Slow(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == 0:
            open(sys.argv[2], "w").close()
        time.sleep(60)

if __name__ == "__main__":
    Trainer(devices=2, strategy=DDPStrategy(sys.argv[1]), callbacks=Slow()).fit(Classifier(), loader())
"""


@in_test_all
@pytest.mark.parametrize("start_method", ["fork", *(["spawn"] if NIGHT else [])])
def test_ctrl_c(tmp_path: Path, start_method: str) -> None:
    script, begun, folder = tmp_path / "script.py", tmp_path / "begun", tmp_path / "left"
    script.write_text(INTERRUPTED)
    folder.mkdir()
    environ = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    parent = subprocess.Popen(
        [sys.executable, str(script), start_method, str(begun)],
        env=environ,
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    deadline = time.monotonic() + 150
    while not begun.exists():
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.05)
    os.write(keyboard, b"\x03")  # the terminal makes it an interrupt, of all processes in its foreground
    _, errors = parent.communicate(timeout=60)
    assert termios.tcgetattr(terminal) == before
    os.close(keyboard)
    os.close(terminal)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1, "the workers say nothing"
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):  # nobody of the group is left
        while time.monotonic() < deadline:
            os.killpg(parent.pid, 0)
            time.sleep(0.05)
    assert not [each for each in folder.iterdir() if each.name.startswith("joinables-")]


def test_what_cannot_be_pickled(script: None) -> None:
    with pytest.raises(NotPicklable, match=r"^The call cannot be pickled .*test_what_cannot_be_pickled.*lambda"):
        Trainer(devices=2).fit(Classifier(), loader(collate_fn=lambda rows: rows))


class Remembered(DataLoader[Any]):
    """Keeps which objects were gone through."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__(dataset(8), 4, shuffle=True)
        self.seen = seen

    def __iter__(self) -> Any:
        self.seen.append(self)
        return super().__iter__()


# -- one process ------------------------------------------------------------------------------------------------------


def test_early_stopping(tmp_path: Path) -> None:
    def epochs(patience: int, **options: Any) -> int:
        stopping = EarlyStopping("val_loss", patience=patience, min_delta=10.0)
        run = Trainer(max_epochs=6, callbacks=stopping)
        run.fit(Classifier(), loader(12), loader(12), **options)
        return run.epochs

    assert [epochs(patience) for patience in (0, 1, 2, 4, 5, 9)] == [2, 2, 3, 5, 6, 6]
    trainer = Trainer(max_epochs=50, callbacks=[EarlyStopping("val_los")])
    with pytest.raises(ValueError, match=r"monitor='val_los' was not logged\. Use one of .*val_loss"):
        trainer.fit(Classifier(), loader(), loader(20))


def test_an_improvement_begins_the_patience_anew() -> None:
    stopping, run = EarlyStopping("x", patience=2), Trainer()
    for value, is_over in ((3.0, False), (3.0, False), (2.0, False), (2.0, False), (2.0, True)):
        run.callback_metrics["x"] = value
        stopping.on_train_epoch_end(run, Classifier())
        assert run.should_stop is is_over


def test_a_fit_that_was_stopped_early_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Over fits and from a checkpoint; with more patience it goes on."""

    def build(patience: int) -> Trainer:
        keeper, stopping = ModelCheckpoint(tmp_path), EarlyStopping("val_loss", patience=patience, min_delta=10.0)
        return Trainer(max_epochs=10, callbacks=[keeper, stopping])

    data = loader(12), loader(12)
    trainer, module = build(2), Classifier()
    trainer.fit(module, *data)
    path = trainer.callbacks[-1].best_model_path  # pyright: ignore[reportAttributeAccessIssue]
    trainer.fit(module, *data)
    assert (trainer.epochs, trainer.should_stop) == (3, True)
    for patience, epochs in ((2, 3), (4, 5)):
        resumed = build(patience)
        resumed.fit(Classifier(), *data, ckpt_path=path)
        assert (resumed.epochs, resumed.should_stop) == (epochs, True)
    assert caplog.text.count("This fit trains nothing: 3 epochs and 6 steps") == 2


class Diverging(Classifier):
    def on_validation_epoch_end(self) -> None:
        self.log("score", math.nan if self.trainer.current_epoch > 0 else 1.0)


def test_early_stopping_where_there_is_no_number() -> None:
    for mode in ("min", "max"):
        trainer, module = Trainer(max_epochs=6, callbacks=EarlyStopping("score", mode=mode)), Diverging()
        for _ in range(2):
            trainer.fit(module, loader(12), loader(12))
            assert (trainer.epochs, trainer.should_stop) == (2, True)


def test_one_validation_loader_a_run() -> None:
    """Its workers may persist."""
    given = Remembered([])
    Trainer(max_epochs=3).fit(Classifier(), loader(), given)
    assert len(given.seen) == 3
    assert len(set(map(id, given.seen))) == 1
    assert given.seen[0] is not given


def test_callbacks_begin_anew_with_another_module(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer = Trainer(max_epochs=2, callbacks=[keeper, metrics := Metrics()])
    for _ in range(2):
        trainer.fit(Classifier(), loader(12), loader(12))
        assert (trainer.epochs, metrics.seen) == (2, ["epoch 0", "epoch 1"])
        assert len(keeper.state_dict()["kept"]) == 1


class Autocasts(Classifier):
    def shared_step(self, batch: Any, stage: str) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().shared_step(batch, stage)


def test_16_bits() -> None:
    trainer = Trainer(max_epochs=6)
    trainer.fit(Autocasts(clip=1.0), loader(), loader(20))
    assert trainer.callback_metrics["val_loss"] < 0.6


def test_weights_from_a_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=2, callbacks=ModelCheckpoint(tmp_path))
    module = Classifier()
    trainer.fit(module, loader())
    path = trainer.callbacks[-1].best_model_path  # pyright: ignore[reportAttributeAccessIssue]
    tested = trainer.test(module, loader(20))
    restored = Classifier()
    assert Trainer().test(restored, loader(20), ckpt_path=path) == tested
    assert_same(flat_state(restored.state_dict()), flat_state(module.state_dict()))


TOO_SMALL = [
    *(("devices", 0), ("num_nodes", 0), ("max_epochs", -1), ("max_steps", -5), ("accumulate_grad_batches", 0)),
]
WRONG = [
    *(("num_nodes", "1"), ("max_epochs", 1.5), ("max_epochs", "3"), ("max_steps", True), ("seed", 1.5)),
    *(("accumulate_grad_batches", "2"), ("seed", "x"), ("devices", "all"), ("devices", True)),
]
BAD = [
    (
        {"accelerator": "cuda"},
        ValueError,
        r"accelerator='cuda', but torch finds .* here\. Use one of cpu, auto",
    ),
    ({"strategy": "dpp"}, ValueError, r"strategy='dpp' is unknown\. Use one of .*ddp_spawn.*strategy='join'"),
    ({"strategy": "single", "devices": 2}, ValueError, "or strategy='single', with which"),
    ({"accumulate_grad_batches": 0}, ValueError, "accumulate_grad_batches=0"),
    ({"num_nodes": 2, "devices": 1}, ValueError, "torchrun or cluster_environment"),
    ({"devices": [0, 1]}, TypeError, r"devices=\[0, 1\] .* CUDA_VISIBLE_DEVICES.*J741"),
    ({"max_epoch": 3}, TypeError, r"no argument 'max_epoch'\. Use one of .*max_epochs.*\[J643\]"),
    ({"fast_dev_run": True}, TypeError, r"no argument 'fast_dev_run'\. Use one of .* strategy='join'.*\[J643\]"),
    ({"callbacks": [print]}, TypeError, "callbacks has an object of type builtin"),
    ({"callbacks": print}, TypeError, "callbacks has an object of type builtin"),
    *(({name: value}, ValueError, rf"{name}={value}.*\. Pass a .*\[J741\]") for name, value in TOO_SMALL),
    *(({name: value}, TypeError, rf"{name}={value!r}.*\. Pass .*\[J741\]") for name, value in WRONG),
    ({"callbacks": [ModelCheckpoint(), ModelCheckpoint()]}, ValueError, "Several callbacks have the same state_key"),
]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="tells what is wrong where there is no GPU")
@pytest.mark.parametrize(("options", "kind", "text"), BAD, ids=lambda value: str(value)[:30])
def test_bad_arguments(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Trainer(**options)


def test_bad_runs(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Derive its class from joinables\.trainer\.TrainModule"):
        Trainer().fit(torch.nn.Linear(1, 1), loader())  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError, match="No such file"):
        Trainer().fit(Classifier(), loader(), ckpt_path=tmp_path / "none.ckpt")
    (tmp_path / "bad.ckpt").write_text("text")
    with pytest.raises(ValueError, match="is not a checkpoint that a Trainer has written"):
        Trainer().fit(Classifier(), loader(), ckpt_path=tmp_path / "bad.ckpt")
    torch.save(Classifier().state_dict(), tmp_path / "weights.ckpt")
    told = r"ckpt_path='.*weights\.ckpt' is not .*: it does not end with the checksum.*into the module yourself"
    for run in (Trainer().fit, Trainer().validate, Trainer().test, Trainer().predict):
        with pytest.raises(ValueError, match=told):
            run(Classifier(), loader(), ckpt_path=tmp_path / "weights.ckpt")
    with pytest.raises(TypeError, match=r"loader=5 cannot be iterated\. Pass a DataLoader"):
        Trainer().fit(Classifier(), 5)
    with pytest.raises(RuntimeError, match="No Trainer runs this Classifier"):
        Classifier().log("x", 1.0)


def test_first_lines_of_users_of_lightning() -> None:
    run, module = cast("Any", Trainer()), cast("Any", Classifier())
    told = {
        r"^Classifier has no attribute 'save_hyperparameters'\. TrainModule has .*log.*'join'.*J870": lambda: (
            module.save_hyperparameters("lr")
        ),
        r"'all_gather'\. Call self\.trainer\.strategy\.all_gather\..*J870": lambda: module.all_gather(1.0),
        r"'reduce'\. Call self\.trainer\.strategy\.reduce\..*J870": lambda: module.reduce(1.0),
        r"^Trainer has no attribute 'fit_loop'\. Trainer has fit, .*metrics.*J870": lambda: run.fit_loop,
    }
    for text, call in told.items():
        with pytest.raises((TypeError, AttributeError), match=text):
            call()


def test_as_many_devices_as_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in {**started, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(accelerator="cpu")
    assert trainer.world_size == 3
    assert trainer.strategy.is_distributed
    assert trainer.global_rank == 1
    assert trainer.global_rank != 0
    with pytest.raises(ValueError, match=r"devices=1 and num_nodes=1 do not fit .* started \(3\)"):
        Trainer(accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match=r"devices=2 and num_nodes=1 do not fit .* started \(3\)"):
        Trainer(accelerator="cpu", devices=2)
    assert Trainer(accelerator="cpu", devices=1, strategy="single").world_size == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(int(name != "RANK")))
    assert Trainer(accelerator="cpu", devices=1).world_size == 1


class TellsItsPlace(Classifier):
    """Logs the rank and the device of a process, as an outsider sees them."""

    def on_train_start(self) -> None:
        self.log("ranks", float(self.trainer.global_rank), reduce_fx="sum")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.accelerator.device_count", lambda: 2)
            patch.setattr("torch.accelerator.set_device_index", lambda device: None)
            device = self.trainer.strategy.device("cuda", self.trainer.run.place)
            self.log("devices", float(device.index), reduce_fx="sum")


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_the_trainer_starts_what_a_launcher_of_one_process_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork")
    assert trainer.global_rank == 0
    trainer.fit(TellsItsPlace(), loader(6))  # a single batch
    assert (trainer.callback_metrics["ranks"], trainer.callback_metrics["devices"]) == (1.0, 1.0)


def test_gpus_by_place_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of two nodes, to which a launcher deals ranks in turn."""

    def device(run: Trainer, rank: int) -> torch.device:
        place = run.strategy.place(run.world_size) or Place(rank, run.world_size, rank)
        return run.strategy.device("cuda", place)

    monkeypatch.setattr("torch.accelerator.set_device_index", lambda device: None)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"accelerator='tpu', but .*\. Use one of cpu, auto, gpu, cuda"):
        Trainer(accelerator="tpu")
    assert device(Trainer(accelerator="gpu", devices=4), 3) == torch.device("cuda", 3)
    for name, value in {"RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert device(Trainer(accelerator="cuda", devices=4, num_nodes=2), 2) == torch.device("cuda", 1)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    assert device(Trainer(accelerator="cuda", devices=1, num_nodes=8), 2) == torch.device("cuda", 0)


class LogsOneName(Classifier):
    def shared_step(self, batch: Any, stage: str) -> torch.Tensor:
        return super().shared_step(batch, "shared")


def test_a_name_that_training_and_validation_share() -> None:
    with pytest.warns(UserWarning, match="shared_accuracy, shared_loss was logged in training and in validation"):
        Trainer().fit(LogsOneName(), loader(12), loader(12))


class Wrong(Classifier):
    """Returns something else than a loss."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.returned(self(batch[0]))


class Only(TrainModule):
    """Has a step and nothing else."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("module", "data", "kind", "text"),
    [
        (Wrong(lambda scores: "loss"), loader(), TypeError, "training_step of Wrong returned 'loss'"),
        (Wrong(lambda scores: scores), loader(), TypeError, "Return the mean loss over the samples"),
        (Wrong(lambda scores: scores.detach().mean()), loader(), TypeError, "a tensor that depends on the parameters"),
        (Only(), loader(), TypeError, "Only has no configure_optimizers, which fit calls"),
        (Classifier(), None, TypeError, "loader=None cannot be iterated"),
        (Classifier(), dataset(), TypeError, r"train_loader is a data set, .* Pass one loader, such as DataLoader"),
        (Classifier(), [loader()], TypeError, r"train_loader .* has several loaders\. Pass one loader"),
    ],
)
def test_what_cannot_be_fitted(module: Any, data: Any, kind: type[Exception], text: str) -> None:
    trainer = Trainer(max_epochs=2)
    with pytest.raises(kind, match=text):
        trainer.fit(module, data)
    trainer.fit(Classifier(), loader())
    assert trainer.epochs == 2, "the trainer works afterwards"


class Raises(Callback):
    def __init__(self, *hooks: str) -> None:
        for hook in hooks:
            setattr(self, hook, lambda *args, hook=hook: self.fail(hook))

    def fail(self, hook: str) -> None:
        raise KeyError(hook)


def test_callbacks_that_raise(caplog: pytest.LogCaptureFixture) -> None:
    module = Classifier().eval()
    for hooks, told in ((("on_train_start", "teardown"), "on_train_start"), (("teardown",), "teardown")):
        trainer = Trainer(callbacks=Raises(*hooks))
        with pytest.raises(KeyError, match=told):
            trainer.fit(module, loader())
        assert not any(part.training for part in module.modules()), "each part is in its own mode again"
        trainer.callbacks = []
        trainer.fit(module, loader())
    assert "a hook raised after the run had raised" in caplog.text


class KeepsItsOptimizer(Classifier):
    """Manual optimization, with one optimizer for all fits."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.mine = torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.mine.zero_grad()
        self.manual_backward(self.shared_step(batch, "train"))
        self.mine.step()

    def configure_optimizers(self) -> Any:
        return self.mine


def test_a_fit_leaves_nothing_at_what_it_trained() -> None:
    trainer, module = Trainer(), KeepsItsOptimizer()
    for epochs in (1, 2):
        trainer.max_epochs = epochs
        trainer.fit(module, loader(24))
        assert trainer.global_step == 4 * epochs
        assert all(parameter.grad is None for parameter in module.parameters())
        assert not module.mine._optimizer_step_post_hooks


def test_workers_end_with_the_fit() -> None:
    others = set(multiprocessing.active_children())
    gc.disable()
    try:
        Trainer().fit(Classifier(), loader(12, shuffle=True, num_workers=1, persistent_workers=True))
        assert set(multiprocessing.active_children()) <= others
    finally:
        gc.enable()


def test_nothing_to_train_on() -> None:
    trainer = Trainer(max_epochs=2)
    with pytest.warns(UserWarning, match=r"An epoch made no optimizer step\. No rank had a batch"):
        trainer.fit(Classifier(), loader(0))
    assert trainer.global_step == 0
    assert trainer.validate(Classifier(), loader(0)) == [{}]
    assert trainer.predict(Classifier(), loader(0)) == []


def test_as_many_epochs_as_the_steps_need() -> None:
    trainer, module = Trainer(max_steps=7), Classifier()
    trainer.fit(module, loader(12))
    assert trainer.global_step == 7
    assert trainer.current_epoch == 3
    trainer.max_steps, trainer.max_epochs = None, 5
    trainer.fit(module, loader(12))
    assert trainer.global_step == 10
    trainer.max_epochs = None
    with pytest.raises(ValueError, match="max_epochs and max_steps set no end"):
        trainer.fit(module, loader(12))
    trainer.max_steps = 12
    trainer.fit(module, loader(12))
    assert trainer.global_step == 12
    for trainer, steps in ((Trainer(max_steps=7, max_epochs=1), 2), (Trainer(), 2), (Trainer(max_epochs=0), 0)):
        trainer.fit(Classifier(), loader(12))
        assert trainer.global_step == steps


def test_a_fit_that_trains_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = Trainer(max_epochs=1), Classifier()
    trainer.fit(module, loader(12))
    assert not caplog.messages
    trainer.fit(module, loader(12))
    assert "trains nothing: 1 epochs and 2 steps reach max_epochs=1 or max_steps=None" in caplog.messages[0]


def test_a_fit_without_steps_has_an_end() -> None:
    with pytest.warns(UserWarning, match="An epoch made no optimizer step"):
        (trainer := Trainer(max_steps=7)).fit(Classifier(), iter(loader(12)))
    assert trainer.global_step == 2


def test_every_module_is_a_new_one() -> None:
    """Also one at the address of another that is gone."""
    trainer = Trainer(max_epochs=1)
    for _ in range(20):
        module = Classifier()
        before = module.body[0].weight.clone()  # pyright: ignore[reportCallIssue]
        trainer.fit(module, loader(12))
        assert trainer.epochs == 1
        assert not torch.equal(before, module.body[0].weight)  # pyright: ignore[reportArgumentType]
        del module


def test_a_missing_checkpoint_leaves_a_trainer_that_works() -> None:
    trainer = Trainer()
    with pytest.raises(FileNotFoundError):
        trainer.test(Classifier(), loader(), ckpt_path="nope")
    assert trainer.test(Classifier(), loader())


class Adds(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.value


def test_what_a_checkpoint_cannot_hold(tmp_path: Path) -> None:
    def fit(value: Any, module: TrainModule) -> str:
        keeper = ModelCheckpoint(tmp_path)
        Trainer(callbacks=[Adds(value), keeper]).fit(module, loader(12))
        return keeper.best_model_path

    with pytest.raises(TypeError, match=r"(?s)The checkpoint has objects .*pathlib.*PosixPath"):
        fit({"path": tmp_path}, Classifier())
    with pytest.raises(TypeError, match=r"(?s)The checkpoint has objects .*pathlib.*PosixPath"):
        fit(1, Pathed(tmp_path))
    for value in (np.ones(3), {"x": np.float32(0.5)}):
        with pytest.raises(TypeError, match=r"(?s)The checkpoint has objects .*numpy"):
            fit(value, Classifier())
    assert not list(tmp_path.glob("epoch*.ckpt"))
    path = fit({"x": [1, "text", torch.ones(2), 0.5]}, Classifier())
    assert read_checkpoint(path)["mine"]["x"][3] == 0.5


class Pathed(Classifier):
    """With a state that is no plain data, and numbers of numpy in those of its optimizer and scheduler."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.norm = torch.nn.BatchNorm1d(1)  # reads the metadata of state dicts
        self.norm.requires_grad_(False)

    def get_extra_state(self) -> Any:
        return {"path": self.path}

    def set_extra_state(self, state: Any) -> None:
        self.path = state["path"] / "again"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.body.parameters(), lr=np.float64(0.01))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(np.array([1, 2])))
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def test_no_weights_are_lost_for_what_a_checkpoint_cannot_hold(tmp_path: Path) -> None:
    module, trainer = Pathed(tmp_path), Trainer(devices=2, accelerator="cpu")
    for trainer.max_epochs in (1, 2):
        before = module.body[0].weight.clone()  # pyright: ignore[reportCallIssue]
        trainer.fit(module, loader(12))
        assert not torch.equal(before, module.body[0].weight)  # pyright: ignore[reportArgumentType]
    assert module.path.name == "again"


def test_a_checkpoint_after_the_fit(tmp_path: Path) -> None:
    trainer, module = Trainer(max_epochs=2), Classifier()
    with pytest.raises(RuntimeError, match="has no fit to save"):
        trainer.save_checkpoint(tmp_path / "before.ckpt")
    trainer.fit(module, loader(12))
    assert trainer.save_checkpoint(tmp_path / "after.ckpt")
    again = Classifier()
    Trainer(max_epochs=3).fit(again, loader(12), ckpt_path=tmp_path / "after.ckpt")
    trainer.max_epochs = 3
    trainer.fit(module, loader(12))
    assert_same(flat_state(module.state_dict()), flat_state(again.state_dict()))
    del module
    gc.collect()
    with pytest.raises(RuntimeError, match="has no fit to save"):
        trainer.save_checkpoint(tmp_path / "gone.ckpt")


def test_a_compiled_module_can_be_pickled() -> None:
    module = Classifier()
    module.compile(backend="eager")
    assert isinstance(pickle.loads(pickle.dumps(module)), Classifier)


def test_automatic_settings_with_manual_optimization() -> None:
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="accumulate_grad_batches needs automatic_optimization"):
        Trainer(accumulate_grad_batches=2).fit(module, loader())


def test_schedulers_that_are_not_understood() -> None:
    class Scheduled(Classifier):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.options}}

    with pytest.raises(TypeError, match=r"(?s)'frequency': 2.* has no known form"):
        Trainer().fit(Scheduled(frequency=2), loader())
    with pytest.raises(TypeError, match="'interval': 'batch'"):
        Trainer().fit(Scheduled(interval="batch"), loader())
    module = Scheduled(monitor="train_loss", interval="epoch")
    rates: list[float] = []

    class Rates(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            rates.append(trainer.run.optimizers[0].param_groups[0]["lr"])

    Trainer(callbacks=Rates(), max_epochs=2).fit(module, loader())
    assert rates == pytest.approx([0.1, 0.01])


def test_what_stands_beside_an_optimizer() -> None:
    class Configured(Classifier):
        def __init__(self, key: str, **options: Any) -> None:
            super().__init__()
            self.key, self.options = key, options

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 1.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            return {"optimizer": optimizer, self.key: {"scheduler": scheduler, **self.options}}

    with pytest.raises(TypeError, match=r"(?s)configure_optimizers returned .*'lr_shceduler'"):
        Trainer().fit(Configured("lr_shceduler"), loader(12))
    with pytest.raises(TypeError, match=r"(?s)configure_optimizers returned .*'frequency': 5"):
        Trainer().fit(Configured("lr_scheduler", frequency=5), loader(12))
    trainer = Trainer(max_epochs=2)
    with pytest.raises(ValueError, match="monitor=None was not logged"):
        trainer.fit(Configured("lr_scheduler"), loader(12))
    trainer.fit(Configured("lr_scheduler", monitor="train_loss"), loader(12))


class LogsLate(Classifier):
    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.trainer.current_epoch))

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.log("lost", 1.0)


def test_metrics_of_hooks() -> None:
    seen: list[float] = []

    class Sees(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.callback_metrics["late"])

    trainer = Trainer(max_epochs=2, callbacks=Sees())
    trainer.fit(LogsLate(), loader())
    assert seen == [0.0, 1.0]
    with pytest.raises(RuntimeError, match="'lost' was logged in a prediction"):
        trainer.predict(LogsLate(), loader())


class LogsAtEnds(Classifier):
    def on_validation_epoch_end(self) -> None:
        self.log("validated", float(self.trainer.global_step))

    def on_train_end(self) -> None:
        self.log("trained", float(self.trainer.global_step))


class LogsInHooks(Callback):
    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("evaluated", float(trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("epoch", float(trainer.current_epoch))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        module.log("end", float(trainer.global_step))


def test_metrics_of_hooks_after_an_epoch(tmp_path: Path) -> None:
    """They are there for callbacks that come later, in the epoch in which they were logged."""
    keeper = ModelCheckpoint(tmp_path, monitor="epoch", mode="max")
    trainer = Trainer(max_epochs=5, max_steps=5, callbacks=[LogsInHooks(), keeper])
    trainer.fit(LogsAtEnds(), loader(12), loader(12))
    late = {"validated": 4.0, "evaluated": 4.0, "epoch": 1.0, "trained": 5.0, "end": 5.0}
    assert late.items() <= trainer.callback_metrics.items()
    assert keeper.best_model_score == 1.0
    assert {"validated", "evaluated"} <= trainer.validate(LogsAtEnds(), loader(12))[0].keys()


class LogsTooLate(Callback):
    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        module.log("lost", 1.0)


def test_metrics_with_which_nothing_can_be_done() -> None:
    with pytest.raises(RuntimeError, match="'lost' was logged in a prediction or in teardown"):
        Trainer(callbacks=LogsTooLate()).fit(Classifier(), loader(12))
